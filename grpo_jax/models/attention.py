"""Attention of one layer over prompts and their groups of completions at once, and the KV cache.

Axes: P prompts, G completions of each, S query tokens, T key tokens, K key heads, R query heads of each, E head size.

Each layer's cache has its own arrays: a stack would be copied out layer by layer for every token. Keys have time as
the last axis, values have it before the head size. Both products of attention then read them without a copy, and a
token is written in place. Keys in the values' order take 2.5 times as long to read.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial, reduce
from importlib import import_module
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core.logprobs import capped

_MANY, _BLOCK = 256, 64  # number of queries from which they run in blocks, and the size of a block
_MANY_OF_A_ROW = 120  # the same with `by_row`; it includes the 127 tokens that run for 128 new ones
_DECODED_HEADS = (64, 128)  # head sizes of `attend_token`: Triton's blocks are powers of two
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)  # a masked score; finite, so that no row becomes NaN

_FLASH_PLATFORMS = ("cuda", "tpu")
_FLASH_KINDS = (*_FLASH_PLATFORMS, "cudnn")
_FLASH_SHORTEST = 128  # queries of a row from which on the kernels are taken
_FLASH_HEADS = range(16, 129, 8)
"""Sizes of a head that they take: Triton has no smaller products, larger ones do not fit into every card's core, and
cuDNN takes multiples of 8."""


class Tokens(NamedTuple):
    """Positions and validity of the tokens of prompts or of completions."""

    positions: jax.Array  # i32 [P, S], or [P, G, S] if the rows of a group differ
    mask: jax.Array  # bool like positions, False on padding
    segment: jax.Array | None = None  # i32 like positions: a token reads only its own; None if a row is one


class KeyValues(NamedTuple):
    """Keys and values that a query may read."""

    keys: jax.Array  # [P, K, E, S] read by the whole group, or [P, K, G, E, S] one per completion
    values: jax.Array  # [P, K, S, E] or [P, K, G, S, E]
    tokens: Tokens  # of these keys, [P or 1, S] or [P, G, S]; see `visible` for the mask
    own: bool = False  # whether keys and queries are the same tokens, in causal order


class VisionInput(NamedTuple):
    """Picture states among the running tokens."""

    states: jax.Array  # [P, N, D] from the vision tower
    index: jax.Array  # i32 [P, S], index of the state that replaces a token; -1 for text
    deepstack: tuple[jax.Array, ...] = ()  # [P, N, D] each, added at these tokens after each of the first layers


class Context(NamedTuple):
    """Positions, masks and pictures of the running tokens, the same for every layer."""

    positions: jax.Array  # i32 [P, S] of the S running tokens; with pictures [P, S, 3], for time, row and column
    prompt: Tokens  # the prompts' tokens [P, L], running or cached
    completion: Tokens | None = None  # the completions', [P, T] if equal for the group, else [P, G, T]
    cached: Tokens | None = None  # decoding only: the cache's slots, including the running tokens
    slot: jax.Array | None = None  # decoding only: i32 scalar, the first slot to write the running tokens to
    # cosine and sine of the positions, each float32 [P, S, E/2], or [kinds, P, S, E/2] if layers differ; or None
    rotation: tuple[jax.Array, jax.Array] | None = None
    vision: VisionInput | None = None  # the pictures among the tokens; None without pictures


class LayerInput(NamedTuple):
    """Settings and cached keys and values of one layer."""

    window: jax.Array | None = None  # i32 scalar, or None if no layer has a window
    scale: jax.Array | None = None  # float32 scalar that multiplies the scores; None for E^-0.5 in all layers
    depth: jax.Array | None = None  # i32 scalar, the layer's number; None if no layer needs it
    rotation: jax.Array | None = None  # i32 scalar, the layer's kind of rotation; None if all layers share one
    prefix: tuple[jax.Array, jax.Array] | None = None  # cached keys [P, K, E, L] and values [P, K, L, E] of prompts
    cache: tuple[jax.Array, jax.Array] | None = None  # keys and values of the completions, as in `Cache`


LayerOutput = tuple[jax.Array, tuple[jax.Array, jax.Array] | None]  # new states, and keys and values to cache


class Prefix(NamedTuple):
    """Prompts after their forward pass; shared by all completions of a prompt."""

    hidden: jax.Array  # [P, D], last hidden state of each prompt, which predicts the first completion token
    keys: tuple[jax.Array, ...]  # of each layer [P, K, E, L], rotated
    values: tuple[jax.Array, ...]  # of each layer [P, K, L, E]
    tokens: Tokens  # [P, L], with positions from each prompt's first real token
    lengths: jax.Array  # i32 [P], real tokens of each prompt
    advance: jax.Array  # i32 [P], position of the completions' first token: `lengths`, or less after pictures


class RowState(NamedTuple):
    """State of completions of different lengths, after an environment's observation."""

    mask: jax.Array  # bool [P, G, T], slots that hold a token; the others are not read
    advance: jax.Array  # i32 [P, G], the position of each completion's next token


class Cache(NamedTuple):
    """KV cache of completions."""

    keys: tuple[jax.Array, ...]  # of each layer [P, K, G, E, T], rotated; slots from ``length`` on are not read
    values: tuple[jax.Array, ...]  # of each layer [P, K, G, T, E]
    length: jax.Array  # i32 scalar, written slots, the same for all completions
    rows: RowState | None = None  # differences between completions; None while all have a token in every slot


class _Scoring(NamedTuple):
    window: jax.Array | None
    scale: jax.Array | float
    softcap: float | None


def write_cache(
    cache: tuple[jax.Array, jax.Array], slot: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Write keys [P, K, G, E, A] and values [P, K, G, A, E] into a layer's cache from a slot on; in place under jit.

    XLA drops axes of size 1 from its products (one prompt, one head, groups of one). A cache written or carried with
    such an axis, but read without it, would be copied for every token. This function therefore writes without it, and
    a decoding loop must carry the cache without it, as the sampler does.

    Writing past the end overwrites the last slot: callers make room for every token they decode.
    """
    ones = tuple(axis for axis in range(3) if keys.shape[axis] == 1)

    def placed(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        old, new = old.squeeze(ones), new.astype(old.dtype).squeeze(ones)
        return jnp.expand_dims(jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis), ones)

    return placed(cache[0], keys, -1), placed(cache[1], values, -2)


def of_paths(cache: Cache, parents: jax.Array | np.ndarray) -> Cache:
    """Select the keys and values of the completions `parents` [P, G], or [G] if equal for all prompts."""
    axes = (0, 0 if parents.ndim == 2 else None)
    take = jax.vmap(lambda rows, chosen: jnp.take(rows, chosen, axis=-3), axes)
    keys, values = (tuple(take(part, parents) for part in parts) for parts in (cache.keys, cache.values))
    return cache._replace(keys=keys, values=values)


def embed_pictures(x: jax.Array, vision: VisionInput | None) -> jax.Array:
    """Replace picture tokens among embedded tokens [P, S, D] by their picture states."""
    return x if vision is None else _at_pictures(vision.index, vision.states.astype(x.dtype), x)


def add_deepstack(x: jax.Array, layer_input: LayerInput, context: Context) -> jax.Array:
    """Add the tower's DeepStack states to states [P, S, D] after a layer (Meng et al. 2024, arXiv:2406.04334)."""
    if context.vision is None or not context.vision.deepstack:
        return x
    layers = jnp.stack(context.vision.deepstack).astype(x.dtype)
    depth = jnp.minimum(layer_input.depth, len(layers) - 1)
    states = jax.lax.dynamic_index_in_dim(layers, depth, keepdims=False)
    added = _at_pictures(context.vision.index, states, jnp.zeros_like(x))
    return x + jnp.where(layer_input.depth < len(layers), added, 0)


def _at_pictures(index: jax.Array, states: jax.Array, otherwise: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(states, jnp.maximum(index, 0)[..., None], axis=1)
    return jnp.where(index[..., None] >= 0, chosen, otherwise)


def attend(
    query: jax.Array,
    queries: Tokens,
    sources: Sequence[KeyValues],
    window: jax.Array | None = None,
    scale: jax.Array | None = None,
    softcap: float | None = None,
    by_row: bool = False,
) -> jax.Array:
    """Compute softmax attention over several sets of keys and values as one set.

    The softmaxes are merged by a common maximum and a common sum, as by log-sum-exp: shared keys are never copied.

    Many queries run in blocks: scores and masks are then [.., block, S], never [.., S, S]. The backward pass recomputes
    them (Rabe and Staats 2021, arXiv:2112.05682). Causal self-attention skips the keys of later quarters. With `by_row`
    rows run one by one too, so that a block's scores stay in a CPU's cache. It does not suit rows sharded over devices,
    which would wait for each other.

    Queries and result are [P, K, G, R, S, E], `queries` are [P or 1, S] or [P, G, S]. The result has the queries'
    dtype; scores and softmax are float32. Scalars: i32 `window`, the number of keys to look back (None: all); float32
    `scale` of the scores (None: E^-0.5); `softcap`, the cap of the scores (``core.logprobs.capped``).
    """
    scoring = _Scoring(window, query.shape[-1] ** -0.5 if scale is None else scale, softcap)
    if query.shape[-2] < (_MANY_OF_A_ROW if by_row else _MANY):
        return _attend(query, queries, sources, scoring)
    return (_attend_rows if by_row else _attend_quarters)(query, queries, sources, scoring)


def _attend_rows(query: jax.Array, queries: Tokens, sources: Sequence[KeyValues], scoring: _Scoring) -> jax.Array:
    def per_prompt(tokens: Tokens) -> Tokens:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])), tokens)

    read = [(source.keys, source.values, per_prompt(source.tokens)) for source in sources]
    arrays, structure = jax.tree.flatten((per_prompt(queries), read))
    # Axis of the group after that of prompts is removed, of keys and values and of tokens; None if shared.
    group_axes = [{5: 1, 3: 0}.get(array.ndim) for array in arrays]

    def of_prompt(part):
        query, shared = part

        @partial(jax.checkpoint, prevent_cse=False)
        def of_row(row):
            query, per_row = row
            remaining = iter(per_row)
            with_axes = zip(shared, group_axes, strict=True)
            leaves = [(array if axis is None else next(remaining))[None] for array, axis in with_axes]
            queries, read = jax.tree.unflatten(structure, leaves)
            row_sources = [KeyValues(*arrays, source.own) for arrays, source in zip(read, sources, strict=True)]
            return _attend_quarters(query[None, :, None], queries, row_sources, scoring)[0, :, 0]

        with_axes = zip(shared, group_axes, strict=True)
        per_row = [jnp.moveaxis(array, axis, 0) for array, axis in with_axes if axis is not None]
        return jnp.moveaxis(jax.lax.map(of_row, (jnp.moveaxis(query, 1, 0), per_row)), 0, 1)

    return jax.lax.map(of_prompt, (query, arrays))


def _attend_quarters(query: jax.Array, queries: Tokens, sources: Sequence[KeyValues], scoring: _Scoring) -> jax.Array:
    """Attend block by block; queries of later quarters read more of their own keys."""
    steps = query.shape[-2]
    quarter = -(-steps // (4 * _BLOCK)) * _BLOCK
    parts = []
    for start in range(0, steps, quarter):
        stop = min(start + quarter, steps)
        read = [source if not source.own else _first_keys(source, stop) for source in sources]
        some = jax.tree.map(lambda x, part=slice(start, stop): x[..., part], queries)
        parts.append(_attend_blocks(query[..., start:stop, :], some, read, scoring))
    return jnp.concatenate(parts, axis=-2)


def _first_keys(source: KeyValues, stop: int) -> KeyValues:
    tokens = jax.tree.map(lambda x: x[..., :stop], source.tokens)
    return KeyValues(source.keys[..., :stop], source.values[..., :stop, :], tokens)


def _attend_blocks(query: jax.Array, queries: Tokens, sources: Sequence[KeyValues], scoring: _Scoring) -> jax.Array:
    steps = query.shape[-2]
    blocks = -(-steps // _BLOCK)

    def split(x: jax.Array, axis: int) -> jax.Array:
        x = jnp.moveaxis(x, axis, 0)
        x = jnp.pad(x, [(0, blocks * _BLOCK - steps), *[(0, 0)] * (x.ndim - 1)])
        return jnp.moveaxis(x.reshape(blocks, _BLOCK, *x.shape[1:]), 1, axis + 1)

    @partial(jax.checkpoint, prevent_cse=False)
    def one(block):
        return _attend(*block, sources, scoring)

    tokens = jax.tree.map(lambda x: split(x, x.ndim - 1), queries)
    mixed = jax.lax.map(one, (split(query, query.ndim - 2), tokens))
    mixed = jnp.moveaxis(mixed, 0, -3)
    return mixed.reshape(*mixed.shape[:-3], -1, mixed.shape[-1])[..., :steps, :]


def _attend(query: jax.Array, queries: Tokens, sources: Sequence[KeyValues], scoring: _Scoring) -> jax.Array:
    scores, mixes = [], []
    for source in sources:
        group = "" if source.keys.ndim == 4 else "G"
        score = jnp.einsum(f"PKGRSE,PK{group}ET->PKGRST", query, source.keys, preferred_element_type=jnp.float32)
        mask = visible(queries, source.tokens, scoring.window)
        mask = mask[:, None, :, None] if mask.ndim == 4 else mask[:, None, None, None]
        scores.append(jnp.where(mask, capped(score * scoring.scale, scoring.softcap), _HIDDEN))
        mixes.append(f"PKGRST,PK{group}TE->PKGRSE")
    top = reduce(jnp.maximum, [score.max(axis=-1, keepdims=True) for score in scores])
    top = jax.lax.stop_gradient(top)  # it cancels, so its gradient is zero
    weights = [jnp.exp(score - top) for score in scores]
    total = sum(weight.sum(axis=-1, keepdims=True) for weight in weights)
    mixed = sum(
        jnp.einsum(mix, weight.astype(query.dtype), source.values, preferred_element_type=jnp.float32)
        for mix, weight, source in zip(mixes, weights, sources, strict=True)
    )
    return (mixed / total).astype(query.dtype)


def visible(queries: Tokens, keys: Tokens, window: jax.Array | None) -> jax.Array:
    """Return the mask of keys for each query, [P, (G,) S of queries, S of keys]: causal, windowed, without padding."""
    if queries.positions.ndim > keys.positions.ndim:
        keys = Tokens(keys.positions[:, None], keys.mask[:, None])
    distance = queries.positions[..., :, None] - keys.positions[..., None, :]
    allowed = keys.mask[..., None, :] & (distance >= 0)
    if keys.segment is not None:
        allowed &= queries.segment[..., :, None] == keys.segment[..., None, :]
    return allowed if window is None else allowed & (distance < window)


def attend_streams(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer_input: LayerInput,
    context: Context,
    softcap: float | None = None,
    attention: str = "blocks",
) -> LayerOutput:
    """Compute one layer's attention over prompts and completions at once; `softcap` is that of `attend`.

    `attention` comes from `choose_attention`. ``rows`` and ``blocks`` are `attend` with and without `by_row`. ``cuda``,
    ``tpu`` and ``cudnn`` use `kernels.causal_rows` for many running tokens, in layers without window, scale or softcap.
    Each completion is then a row after a copy of its prompt, so prompts must not be longer than completions. ``cuda``
    also uses `kernels.attend_token`, for one new token of each completion, and so does ``cudnn`` with Triton in jax.

    The S tokens of a prompt's row are its L prompt tokens, then the G·T tokens of its completions. A layer thus applies
    every weight in one product; only attention separates them. L is 0 if the prompts' keys and values are cached, and
    completions may be absent.

    Queries are [P, S, K, R, E], keys and values [P, S, K, E]. Returns the mixed values [P, S, H·E], and keys and values
    to cache. These are the prompts' if prompts run alone, the cache with the new tokens when decoding, and None if
    prompts and completions both run.
    """

    def attend_rows(query: jax.Array, queries: Tokens, sources: Sequence[KeyValues]) -> jax.Array:
        split = _split_group(query, queries.positions.shape[-1]).transpose(0, 3, 1, 4, 2, 5)
        window, scale = layer_input.window, layer_input.scale
        mixed = attend(split, queries, sources, window, scale, softcap, by_row=attention == "rows")
        return mixed.transpose(0, 2, 4, 1, 3, 5).reshape(*query.shape[:2], -1)

    plain = all(setting is None for setting in (softcap, layer_input.window, layer_input.scale))
    flash = plain and layer_input.prefix is None and attention in _FLASH_KINDS and query.shape[-1] in _FLASH_HEADS
    if flash and context.completion is not None and _are_long(context.prompt, context.completion):
        return _flash_groups(query, key, value, context.prompt, context.completion, attention), None
    if plain and attention in ("cuda", "cudnn") and has_triton() and _decodes(query, layer_input, context):
        from grpo_jax.models.kernels import attend_token  # other platforms may lack Pallas for Triton

        cached = layer_input.prefix, context.prompt.mask, layer_input.cache, context.slot
        token, new_keys_values = attend_token(query, key, value, *cached)
        return token.reshape(*token.shape[:2], -1), new_keys_values
    mixed, new_keys_values = [], None
    prefix, length = layer_input.prefix, 0
    if prefix is None:
        length = context.prompt.positions.shape[1]
        prefix = new_keys_values = key[:, :length].transpose(0, 2, 3, 1), value[:, :length].transpose(0, 2, 1, 3)
        if flash and length >= _FLASH_SHORTEST:
            rows = (part[:, :length] for part in (query, key, value))
            mixed.append(_flash_rows(*rows, context.prompt.mask, attention))
        else:
            mixed.append(attend_rows(query[:, :length], context.prompt, [KeyValues(*prefix, context.prompt, own=True)]))
    if context.completion is not None:
        steps = context.completion.positions.shape[-1]
        readable = context.completion
        key, value = (_split_group(part[:, length:], steps) for part in (key, value))
        written, new_keys_values = (key.transpose(0, 3, 1, 4, 2), value.transpose(0, 3, 1, 2, 4)), None
        if layer_input.cache is not None:
            written = new_keys_values = write_cache(layer_input.cache, context.slot, *written)
            readable = context.cached
        sources = [KeyValues(*prefix, context.prompt), KeyValues(*written, readable, own=layer_input.cache is None)]
        mixed.append(attend_rows(query[:, length:], context.completion, sources))
    return mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed, axis=1), new_keys_values


def _decodes(query: jax.Array, layer_input: LayerInput, context: Context) -> bool:
    """Return whether `attend_token` applies: one token of each completion runs, all at the same slot."""
    if layer_input.cache is None or query.shape[-1] not in _DECODED_HEADS:
        return False
    return context.completion.positions.shape[1:] == (1,) and layer_input.cache[0].dtype == query.dtype


def _are_long(prompt: Tokens, completion: Tokens) -> bool:
    """Return whether `causal_rows` applies: long single-turn completions, one per row."""
    steps = completion.positions.shape[-1]
    return completion.positions.ndim == 2 and _FLASH_SHORTEST <= steps >= prompt.positions.shape[-1]


def _flash_groups(
    query: jax.Array, key: jax.Array, value: jax.Array, prompt: Tokens, completion: Tokens, platform: str
) -> jax.Array:
    """Attend over rows of a prompt and one completion each; the prompt's own result comes from the first row."""
    count, length = prompt.positions.shape
    steps = completion.positions.shape[-1]

    def rows_of(x: jax.Array) -> jax.Array:
        own = _split_group(x[:, length:], steps)
        shared = jnp.broadcast_to(x[:, None, :length], (*own.shape[:2], length, *own.shape[3:]))
        joined = jnp.concatenate([shared, own], axis=2)
        return joined.reshape(-1, *joined.shape[2:])

    query, key, value = map(rows_of, (query, key, value))
    mask = jnp.pad(prompt.mask, ((0, 0), (0, steps)), constant_values=True)
    mixed = _flash_rows(query, key, value, jnp.repeat(mask, len(query) // count, axis=0), platform)
    mixed = mixed.reshape(count, -1, *mixed.shape[1:])
    own = mixed[:, :, length:].reshape(count, -1, mixed.shape[-1])
    return jnp.concatenate([mixed[:, 0, :length], own], axis=1)


def _flash_rows(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, platform: str) -> jax.Array:
    """Attend over rows, [B, S, H·E], with the platform's kernels."""
    from grpo_jax.models.kernels import causal_rows  # Pallas, which takes a while to import

    mixed = causal_rows(query, key, value, mask, platform)
    return mixed.reshape(*mixed.shape[:2], -1)


def platform_of(device: jax.Device) -> str:
    """Name the platform of compiled programs: cpu, tpu, cuda, or gpu for one without Triton kernels."""
    if device.platform != "gpu":
        return device.platform
    return "cuda" if float(getattr(device, "compute_capability", "8.0")) >= 8 else "gpu"


def choose_attention(platform: str, dtype: jax.typing.DTypeLike, implementation: str, *, over_mesh: bool) -> str:
    """Return the attention of a platform, for `attend_streams`.

    A CPU uses ``rows``, so that a row's scores fit its cache. A GPU or TPU uses its kernels (``cuda``, ``tpu``) in
    bfloat16 on one device, and a GPU ``cudnn`` if `implementation` says so. Otherwise, and if `implementation` is
    ``eager`` or a GPU's jax has no Triton, it uses ``blocks``.
    """
    if platform == "cpu" and not over_mesh:
        return "rows"
    kernels = platform in _FLASH_PLATFORMS and implementation != "eager" and not over_mesh and dtype == jnp.bfloat16
    if kernels and platform == "cuda" and implementation == "cudnn":
        return "cudnn"
    return platform if kernels and (platform != "cuda" or has_triton()) else "blocks"


@cache
def has_triton() -> bool:
    """Return whether jax has Pallas on Triton, with its own attention; it deprecates both since 0.11."""
    with suppress(ImportError):
        for module in ("triton", "ops.gpu.attention"):
            import_module(f"jax.experimental.pallas.{module}")
        return True
    return False


def _split_group(x: jax.Array, steps: int) -> jax.Array:
    """Reshape [P, G·T, ...] to [P, G, T, ...]."""
    return x.reshape(x.shape[0], -1, steps, *x.shape[2:])
