"""Pallas kernels for attention: JAX's own for whole rows on GPUs and TPUs, and ours for one decoded token on GPUs.

`causal_rows` materialises no scores or masks; only lengths and segments reach its kernels (FlashAttention, Dao et al.
2022, arXiv:2205.14135). They compute in bfloat16, which every GPU supported by Triton has; with float32 inputs their
products would lose precision. cuDNN's attention is a choice beside them (`policy.attn_implementation`).

`attend_token` reads the prompt's shared keys and the completion's written keys with an online softmax (Milakov and
Gimelshein 2018, arXiv:1805.02867). It writes the new key and value into the cache in place.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

_FLASH_BLOCK = 64  # block of queries and keys on a GPU: 80 KiB of shared memory with head size 128
_FLASH_PADDED = 128  # rows are padded to a multiple of this
_ROWS = 16  # least number of rows of a product in Triton
_BLOCK = 64  # keys per block
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


def causal_rows(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, platform: str) -> jax.Array:
    """Compute causal softmax attention within rows, with scores scaled by E^-0.5.

    Queries and result are [B, S, K, R, E], keys and values [B, S, K, E]; R query heads read each key head. The mask,
    bool [B, S], is False on padding, which no other token reads. `platform` is ``cuda``, ``tpu`` or ``cudnn``.
    """
    rows, length, heads, shared, size = query.shape
    more = -length % (2 if platform == "cudnn" else _FLASH_PADDED)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])

    flat = query.reshape(rows, length, heads * shared, size)
    if platform == "cudnn":
        padding = (~mask).sum(axis=-1, dtype=jnp.int32)
        return _cudnn_rows(*map(pad, (flat, key, value)), padding)[:, :length].reshape(query.shape)
    key, value = (jnp.repeat(x, shared, axis=2) for x in (key, value))
    padded, segments = [pad(x) for x in (flat, key, value)], pad(mask).astype(jnp.int32)
    options = {"causal": True, "sm_scale": size**-0.5}
    if platform == "cuda":
        from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

        sizes = BlockSizes(_FLASH_BLOCK, _FLASH_BLOCK, *[_FLASH_BLOCK // 2] * 4)
        mixed = mha(*padded, segments, block_sizes=sizes, **options)
    else:
        from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention

        heads_first = [x.swapaxes(1, 2) for x in padded]
        mixed = flash_attention(*heads_first, segment_ids=SegmentIds(segments, segments), **options).swapaxes(1, 2)
    return mixed[:, :length].reshape(query.shape)


def _cudnn_rows(query: jax.Array, key: jax.Array, value: jax.Array, padding: jax.Array) -> jax.Array:
    """Compute causal attention of rows [B, S, H, E] that begin with `padding` [B] tokens, whose result is 0.

    cuDNN takes lengths, so each row moves to its beginning and back.
    """
    lengths = query.shape[1] - padding
    options = {"is_causal": True, "query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    moved = (_moved(x, padding) for x in (query, key, value))
    return _moved(jax.nn.dot_product_attention(*moved, implementation="cudnn", **options), -padding)


@jax.custom_vjp
def _moved(x: jax.Array, by: jax.Array) -> jax.Array:
    """Move the tokens of each row of [B, S, H, E] left by `by` [B] places, with zeros for the others."""
    source = (jnp.arange(x.shape[1]) + by[:, None])[..., None, None]
    there = (source >= 0) & (source < x.shape[1])
    return jnp.where(there, jnp.take_along_axis(x, jnp.where(there, source, 0), axis=1), 0)


# Move the gradient back: a gather's own would add to memory token by token.
_moved.defvjp(lambda x, by: (_moved(x, by), by), lambda by, slope: (_moved(slope, -by), None))

_Softmax = tuple[jax.Array, jax.Array, jax.Array]  # running maxima, sums, and sums of values


def attend_token(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    prefix: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    slot: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Compute softmax attention of each completion's new token, with scores scaled by E^-0.5; also return the cache.

    Queries are [P, G, K, R, E], key and value of the new token [P, G, K, E]. `prefix` holds the prompts' keys
    [P, K, E, L] and values [P, K, L, E]; the mask, bool [P, L], is False on their padding. `cache` holds keys
    [P, K, G, E, T] and values [P, K, G, T, E] of the completions, with `slot` (i32) tokens written before the new one.
    """
    from jax.experimental.pallas import triton  # here, as TPUs need none and later versions of jax may have none

    shared, size = query.shape[-2:]
    # XLA makes and rotates one array in one kernel.
    heads = jnp.concatenate([query, key[..., None, :], value[..., None, :]], axis=-2)
    rows = max(_ROWS, pl.next_power_of_2(shared))
    operands = heads, *prefix, mask, slot, *cache
    prompts = [pl.BlockSpec((None, None, *x.shape[2:]), lambda g, k, p: (p, k, 0, 0)) for x in prefix]
    own = [pl.BlockSpec((None, None, None, *x.shape[3:]), lambda g, k, p: (p, k, g, 0, 0)) for x in cache]
    mask_spec = pl.BlockSpec((None, mask.shape[1]), lambda g, k, p: (p, 0))
    specs = [_heads_spec(heads, rows), *prompts, mask_spec, pl.BlockSpec((), lambda *_: ())]
    mixed, keys, values = pl.pallas_call(
        partial(_kernel, shared=shared, rows=rows, scale=size**-0.5),
        grid=(query.shape[1], query.shape[2], query.shape[0]),
        in_specs=[*specs, *own],
        out_specs=[_heads_spec(query, rows), *own],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, *cache)],
        input_output_aliases={5: 1, 6: 2},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name="decode_attention",
    )(*operands)
    return mixed, (keys, values)


def _heads_spec(x: jax.Array, rows: int) -> pl.BlockSpec:
    """Return the block of all heads, padded to the rows of a product; those are masked, but jax 0.12 needs them."""
    return pl.BlockSpec((None, None, None, max(rows, x.shape[3]), x.shape[4]), lambda g, k, p: (p, g, k, 0, 0))


def _kernel(heads, *refs, shared: int, rows: int, scale: float):
    """Attend with one completion's token and one key head; the softmax begins with the token itself."""
    from jax.experimental.pallas import triton

    prompt_keys, prompt_values, mask, slot, own_keys, own_values, mixed, new_keys, new_values = refs
    here = (jnp.arange(rows) < shared)[:, None]
    query = triton.load(heads.at[pl.ds(0, rows), :], mask=here, other=0)
    key, value, length = heads[shared, :], heads[shared + 1, :], slot[()]
    new_keys[:, length], new_values[length, :] = key, value
    top = jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32)[None], axis=-1) * scale
    own = jnp.broadcast_to(value.astype(jnp.float32)[None], query.shape)
    state = top, jnp.ones(rows, jnp.float32), own
    state = _attend(query, prompt_keys, prompt_values, prompt_keys.shape[1], state, scale, mask)
    _, total, sums = _attend(query, own_keys, own_values, length, state, scale)
    triton.store(mixed.at[pl.ds(0, rows), :], (sums / total[:, None]).astype(mixed.dtype), mask=here)


def _attend(query, keys, values, length, state: _Softmax, scale: float, mask=None) -> _Softmax:
    """Add the first `length` keys [E, S] and values [S, E] to the running maxima, sums and sums of values."""
    from jax.experimental.pallas import triton

    def block(i: jax.Array, state: _Softmax) -> _Softmax:
        top, total, sums = state
        at = pl.ds(i * _BLOCK, _BLOCK)
        there = i * _BLOCK + jnp.arange(_BLOCK) < length
        score = triton.dot(query, triton.load(keys.at[:, at], mask=there[None], other=0)) * scale
        read = there if mask is None else triton.load(mask.at[at], mask=there, other=False)
        score = jnp.where(read[None], score, _HIDDEN)
        higher = jnp.maximum(top, score.max(axis=-1))
        weight, kept = jnp.exp(score - higher[:, None]), jnp.exp(top - higher)
        value = triton.load(values.at[at, :], mask=there[:, None], other=0)
        added = triton.dot(weight.astype(value.dtype), value)
        return higher, total * kept + weight.sum(axis=-1), sums * kept[:, None] + added

    return jax.lax.fori_loop(0, pl.cdiv(length, _BLOCK), block, state)
