"""What a tower's family says of itself: a row of the table in `tower`."""

from collections.abc import Mapping
from typing import NamedTuple

from flax import linen as nn

from grpo_jax.models.vision.layers import Block


class TowerFamily(NamedTuple):
    """One family of towers.

    Attributes:
        block: its layer.
        norm: its norms, made as norm(epsilon, param_dtype).
        patch_bias: whether the map from pixels to states has a bias.
        projections: names of the layers' kernels, on which adapters can be put → how devices share them.
        names: of its modules: the tower's → Hugging Face's, with {} for the number of what is stacked.
    """

    block: type[Block]
    norm: type[nn.Module]
    patch_bias: bool
    projections: Mapping[str, str]
    names: Mapping[str, str]


def names_of(modules: Mapping[str, str], merger: Mapping[str, str]) -> dict[str, str]:
    """Names that all families have, with those of a layer's MLP and of the merger."""
    return {
        "patch_embed": "patch_embed.proj",
        **{f"layers/{name}": f"blocks.{{}}.{name}" for name in ("norm1", "norm2")},
        **{f"layers/{name}": f"blocks.{{}}.attn.{name}" for name in ("qkv", "proj")},
        **{f"layers/{name}": f"blocks.{{}}.mlp.{theirs}" for name, theirs in modules.items()},
        **{f"merger/{name}": f"merger.{theirs}" for name, theirs in merger.items()},
    }
