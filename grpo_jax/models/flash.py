"""Causal attention of whole rows by JAX's own Pallas kernels for GPUs and TPUs: no scores or masks in memory.

Only lengths and segments reach the kernels (Dao et al. 2022, arXiv:2205.14135). They take bfloat16, which every GPU
that Triton compiles for has; their products of float32 would not be float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

PLATFORMS = ("cuda", "tpu")
SHORTEST = 128
"""Queries of a row from which on the kernels are taken."""
HEADS = range(16, 129)
"""Sizes of a head that they take: Triton has no smaller products, and larger ones do not fit into every card's core."""
_BLOCK = 64  # of queries and keys on a GPU: 80 KiB of shared memory with heads of 128
_PADDED = 128  # rows are padded to a multiple of it


def causal_rows(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, platform: str) -> jax.Array:
    """Softmax attention of every token to those before it in its row and itself, with scores scaled by E^-0.5.

    Args:
        query: [B, S, K, R, E].
        key: [B, S, K, E]; R query heads read each.
        value: [B, S, K, E].
        mask: bool [B, S], False on padding, which no other token reads.
        platform: ``cuda`` or ``tpu``.

    Returns:
        [B, S, K, R, E], as large and of the type of the queries.
    """
    rows, length, heads, shared, size = query.shape
    more = -length % _PADDED

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])

    flat = query.reshape(rows, length, heads * shared, size)
    key, value = (jnp.repeat(x, shared, axis=2) for x in (key, value))
    padded = [pad(x) for x in (flat, key, value)]
    kernel = _gpu_kernel if platform == "cuda" else _tpu_kernel
    mixed = kernel(*padded, pad(mask).astype(jnp.int32))
    return mixed[:, :length].reshape(query.shape)


def _gpu_kernel(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    sizes = BlockSizes(_BLOCK, _BLOCK, *[_BLOCK // 2] * 4)
    scale = query.shape[-1] ** -0.5
    return mha(query, key, value, segments, sm_scale=scale, causal=True, block_sizes=sizes)


def _tpu_kernel(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention

    heads_first = [x.swapaxes(1, 2) for x in (query, key, value)]
    ids = SegmentIds(segments, segments)
    mixed = flash_attention(*heads_first, segment_ids=ids, causal=True, sm_scale=query.shape[-1] ** -0.5)
    return mixed.swapaxes(1, 2)
