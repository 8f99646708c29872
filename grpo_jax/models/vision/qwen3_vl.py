"""Qwen3-VL's tower: Qwen2-VL's layers with learned positions, and states for the first decoder layers (deepstack).

Bai et al. 2025, arXiv:2511.21631; deepstack: Meng et al. 2024, arXiv:2406.04334.
"""

import jax
import jax.numpy as jnp

from grpo_jax.models.families.gpt2 import LayerNorm
from grpo_jax.models.vision.family import TowerFamily, names_of
from grpo_jax.models.vision.layers import PatchPlaces
from grpo_jax.models.vision.qwen2_vl import PROJECTIONS, PlainBlock


def interpolated(table: jax.Array, side: int, where: PatchPlaces, grid: jax.Array) -> jax.Array:
    """Learned positions, bilinear between those of a square table whose corners are the picture's corners.

    Args:
        table: [positions, D], the square row by row.
        side: of the square.
        where: the patches' places.
        grid: i32 [N, 2], rows and columns of patches.

    Returns:
        float32 [N, S, D].
    """

    def taps(index: jax.Array, size: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        place = index.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1).astype(jnp.float32)
        first = jnp.floor(place)
        corner = first.astype(jnp.int32)
        share = place - first
        return [(jnp.minimum(corner, side - 1), 1 - share), (jnp.minimum(corner + 1, side - 1), share)]

    rows, columns = taps(where.rows, grid[:, :1]), taps(where.columns, grid[:, 1:])
    return sum(
        jnp.take(table, row * side + column, axis=0).astype(jnp.float32) * (share * part)[..., None]
        for row, share in rows
        for column, part in columns
    )


_MERGER = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}

FAMILY = TowerFamily(
    block=PlainBlock,
    norm=LayerNorm,
    patch_bias=True,
    projections=PROJECTIONS,
    names=names_of({"fc1": "linear_fc1", "fc2": "linear_fc2"}, _MERGER)
    | {"pos_embed": "pos_embed"}
    | {f"deepstack/{name}": f"deepstack_merger_list.{{}}.{theirs}" for name, theirs in _MERGER.items()},
)
