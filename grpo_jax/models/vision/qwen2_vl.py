"""Qwen2-VL's tower: layer norms, a plain MLP, full attention (Wang et al. 2024, arXiv:2409.12191)."""

import jax
from flax import linen as nn

from grpo_jax.models.families.family import COLUMNS, FUSED, ROWS
from grpo_jax.models.families.gpt2 import LayerNorm
from grpo_jax.models.vision.config import ACTIVATIONS
from grpo_jax.models.vision.family import TowerFamily, names_of
from grpo_jax.models.vision.layers import Block


class PlainBlock(Block):
    """A layer with layer norms and two linear maps in its MLP."""

    def norm(self) -> nn.Module:
        """One of the layer's two norms."""
        return LayerNorm(self.config.epsilon, self.param_dtype)

    def setup_mlp(self) -> None:
        """Declare the MLP's weights."""
        self.fc1 = self.projection(self.config.inner)
        self.fc2 = self.projection(self.config.width)

    def mlp(self, x: jax.Array) -> jax.Array:
        """Normed states [N, S, D] to what is added to them."""
        return self.fc2(ACTIVATIONS[self.config.activation](self.fc1(x)))


PROJECTIONS = {"qkv": FUSED, "proj": ROWS, "fc1": COLUMNS, "fc2": ROWS}
MERGER = {"norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"}

FAMILY = TowerFamily(
    block=PlainBlock,
    norm=LayerNorm,
    patch_bias=False,
    projections=PROJECTIONS,
    names=names_of({"fc1": "fc1", "fc2": "fc2"}, MERGER),
)
