"""Qwen2.5-VL's tower: RMS norms, a gated MLP, attention in windows but for a few layers (arXiv:2502.13923)."""

import jax
import numpy as np
from flax import linen as nn

from grpo_jax.models.families.family import COLUMNS, FUSED, ROWS
from grpo_jax.models.families.llama import RMSNorm
from grpo_jax.models.vision.config import ACTIVATIONS, VisionConfig
from grpo_jax.models.vision.family import TowerFamily, names_of
from grpo_jax.models.vision.layers import Block
from grpo_jax.models.vision.qwen2_vl import MERGER


class GatedBlock(Block):
    """A layer with RMS norms and a gated MLP."""

    def norm(self) -> nn.Module:
        """One of the layer's two norms."""
        return RMSNorm(self.config.epsilon, self.param_dtype)

    def setup_mlp(self) -> None:
        """Declare the MLP's weights."""
        self.gate_proj = self.projection(self.config.inner)
        self.up_proj = self.projection(self.config.inner)
        self.down_proj = self.projection(self.config.width)

    def mlp(self, x: jax.Array) -> jax.Array:
        """Normed states [N, S, D] to what is added to them."""
        return self.down_proj(ACTIVATIONS[self.config.activation](self.gate_proj(x)) * self.up_proj(x))


def windows_of(grid: tuple[int, int], config: VisionConfig) -> np.ndarray:
    """The windows of one picture, i32 [windows, B]: the merged tokens of each, row by row, then -1.

    Windows begin at the upper left; those at the lower and right edge may be cut.

    Args:
        grid: rows and columns of patches.
        config: with windows; B = window².
    """
    assert config.window is not None
    height, width, side = grid[0] // config.merge, grid[1] // config.merge, config.window
    tokens = np.full((-(-height // side) * side, -(-width // side) * side), -1, np.int32)
    tokens[:height, :width] = np.arange(height * width, dtype=np.int32).reshape(height, width)
    cut = tokens.reshape(tokens.shape[0] // side, side, tokens.shape[1] // side, side)
    return cut.transpose(0, 2, 1, 3).reshape(-1, side * side)


_MLP = {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS}

FAMILY = TowerFamily(
    block=GatedBlock,
    norm=RMSNorm,
    patch_bias=False,
    projections={"qkv": FUSED, "proj": ROWS, **_MLP},
    names=names_of({name: name for name in _MLP}, MERGER),
)
