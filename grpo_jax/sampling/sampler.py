"""Completions: prefill each prompt once, decode its G completions against that shared prefix.

The sampler knows a policy by its functions (`prefill`, `unstack`, `decode`, `init_cache`, `head`; `forward_group`
is the update's), so it works for anything that offers them. Axes: P prompts, G completions of a prompt, L
prompt tokens, T completion tokens, D model width, V vocabulary; R is a row, one (prompt, completion) pair.

A step costs a pass over the weights (`Policy.unstack` lays them apart once), the prompts' keys and values once for
their group, the filled part of the cache, and one draw. Prompts whose whole group has ended leave in halves.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from grpo_jax.sampling.token_choice import SamplingParams, choose_tokens

Array = jax.Array | np.ndarray

# A step is compiled once more for each size of the cache and for half of the prompts: only where that pays.
_CACHE_STEP, _CACHE_SIZES = 64, 4  # tokens that are worth another size, and how many sizes at most
_HALVING = 32  # tokens above which completions end at times that differ enough


class Samples(NamedTuple):
    """Completions of P prompts, on a device or fetched from it.

    Attributes:
        tokens: int32 [P, G, T], `pad_id` after the end.
        mask: bool [P, G, T], true for tokens of the completion, the end-of-sequence token included.
        logprobs: float32 [P, G, T] under the policy; 0 after the end.
        sampler_logprobs: float32 [P, G, T] under the distribution drawn from; 0 after the end.
        truncated: bool [P, G], true where no end-of-sequence token came within T tokens.
    """

    tokens: Array
    mask: Array
    logprobs: Array
    sampler_logprobs: Array
    truncated: Array


class _Loop(NamedTuple):
    """What one decoding step hands to the next; every array begins with the axis of prompts."""

    step: jax.Array
    prefix: Any
    keys: jax.Array
    done: jax.Array
    last: jax.Array
    cache: Any
    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    sampler_logprobs: jax.Array


def _begin(prefix: Any, keys: jax.Array, done: jax.Array, length: int, pad_id: int, cache: Any) -> _Loop:
    """The state before the first token, for keys [P, G]; rows bool [P] that are done already cost no step."""
    slab = (*keys.shape, length)
    return _Loop(
        step=jnp.int32(0),
        prefix=prefix,
        keys=keys,
        done=jnp.broadcast_to(done[:, None], keys.shape),
        last=jnp.full(keys.shape, pad_id, jnp.int32),
        cache=cache,
        tokens=jnp.full(slab, pad_id, jnp.int32),
        mask=jnp.zeros(slab, bool),
        logprobs=jnp.zeros(slab, jnp.float32),
        sampler_logprobs=jnp.zeros(slab, jnp.float32),
    )


def _unfinished(loop: _Loop) -> jax.Array:
    """Prompts with a completion that goes on, i32 scalar."""
    return jnp.sum(~jnp.all(loop.done, axis=1))


def _run(step: Callable[[_Loop], _Loop], loop: _Loop, until: int | jax.Array, more_than: int) -> _Loop:
    """Step until so many tokens are written or no more prompts than that are unfinished."""
    return lax.while_loop(lambda loop: (loop.step < until) & (_unfinished(loop) > more_than), step, loop)


def _run_half(step: Callable[[_Loop], _Loop], loop: _Loop, until: int) -> _Loop:
    """Go on with half of the prompts once the other half's groups have ended, at half the cost."""
    half = loop.done.shape[0] // 2
    order = jnp.argsort(jnp.all(loop.done, axis=1), stable=True)[:half]
    few = jax.tree.map(lambda x: x[order] if x.ndim else x, loop)
    few = _run(step, few, jnp.where(_unfinished(loop) > half, 0, until), 0)
    return jax.tree.map(lambda x, part: x.at[order].set(part) if x.ndim else part, loop, few)


def cache_sizes(length: int) -> list[int]:
    """Sizes the cache grows through until it holds `length` tokens; attention reads all of the current one.

    >>> cache_sizes(40), cache_sizes(200)
    ([40], [56, 112, 168, 200])
    """
    parts = -(-length // _CACHE_STEP)
    size = -(-length // min(parts, _CACHE_SIZES))
    size = -(-size // 8) * 8
    return [*range(size, length, size), length]


def _move(cache: Any, larger: Any) -> Any:
    """What a cache holds, at the beginning of a larger one."""
    return jax.tree.map(lambda part, room: lax.dynamic_update_slice(room, part, (0,) * part.ndim), cache, larger)


def _generate(policy, params, eos_ids, pad_id, allowed_tokens, variables, prompts, prompt_mask, keys, real):
    """The compiled part, once per bucket of shapes. `real` bool [P] is false for rows added as padding."""
    (rows, _), group, length = prompts.shape, params.group_size, params.max_new_tokens
    prefix = policy.prefill(variables, prompts, prompt_mask)
    # Converted and unstacked here, not in the loop, where it would cost a pass over the weights for every token.
    head = policy.head(variables).astype(prefix.hidden.dtype)
    unstacked = policy.unstack(variables)
    _check_vocabulary(head.shape[0], eos_ids, pad_id, allowed_tokens)
    keys = jax.vmap(lambda key: jax.vmap(lambda g: jax.random.fold_in(key, g))(jnp.arange(group)))(keys)

    def record(loop: _Loop, logits) -> _Loop:
        """Choose the token of this step for every row from logits [V, P·G] and write it down."""
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, loop.step))(loop.keys.reshape(-1))
        choice = choose_tokens(logits, step_keys, params, allowed_tokens)
        choice = jax.tree.map(lambda x: x.reshape(loop.done.shape), choice)
        active = ~loop.done
        tokens = jnp.where(active, choice.tokens, pad_id)
        ended = functools.reduce(jnp.logical_or, [tokens == eos for eos in eos_ids], jnp.zeros_like(active))
        at = (..., loop.step)
        return loop._replace(
            step=loop.step + 1,
            done=loop.done | ended,
            last=tokens,
            tokens=loop.tokens.at[at].set(tokens),
            mask=loop.mask.at[at].set(active),
            logprobs=loop.logprobs.at[at].set(jnp.where(active, choice.logprobs, 0.0)),
            sampler_logprobs=loop.sampler_logprobs.at[at].set(jnp.where(active, choice.sampler_logprobs, 0.0)),
        )

    def step(loop: _Loop) -> _Loop:
        hidden, cache = policy.decode(unstacked, loop.prefix, loop.last, loop.cache)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = jnp.einsum("vd,rd->vr", head, hidden, preferred_element_type=jnp.float32)
        return record(loop._replace(cache=cache), logits)

    sizes = cache_sizes(length)
    loop = _begin(prefix, keys, ~real, length, pad_id, policy.init_cache(rows, group, sizes[0]))
    # The first token of all G completions comes from the prompt's last state: P rows of logits, not P·G.
    first = jnp.einsum("vd,pd->vp", head, prefix.hidden, preferred_element_type=jnp.float32)
    loop = record(loop, jnp.repeat(first, group, axis=1))
    halve = bool(eos_ids) and rows > 1 and length > _HALVING
    for size in sizes:
        loop = loop._replace(cache=_move(loop.cache, policy.init_cache(rows, group, size)))
        loop = _run(step, loop, size, rows // 2 if halve else 0)
        loop = _run_half(step, loop, size) if halve else loop
    return Samples(loop.tokens, loop.mask, loop.logprobs, loop.sampler_logprobs, truncated=~loop.done)


def _check_vocabulary(size: int, eos_ids: tuple[int, ...], pad_id: int, allowed_tokens) -> None:
    if allowed_tokens is not None and allowed_tokens.shape != (size,):
        raise ValueError(f"allowed_tokens must have the shape ({size},) of the vocabulary, got {allowed_tokens.shape}")
    for name, ids in (("eos_ids", eos_ids), ("pad_id", (pad_id,))):
        if any(not 0 <= i < size for i in ids):
            raise ValueError(f"{name} must lie in [0, {size}), the vocabulary of the policy, got {ids}")


def bucket_size(n: int, smallest: int = 1) -> int:
    """Round n up to one of few sizes: multiples of `smallest`, and never more than four sizes per doubling.

    A size depends on n alone, never on earlier calls, so that a resumed run computes in the same shapes.

    Args:
        n: At least 1.
        smallest: A power of two.

    >>> [bucket_size(n) for n in (3, 8, 9, 17)], bucket_size(70, smallest=8)
    ([3, 8, 10, 20], 80)
    """
    multiple = max(smallest, 1 << max((n - 1).bit_length() - 3, 0))
    return -(-n // multiple) * multiple


def _check_prompts(tokens, mask, keys) -> None:
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"prompt_tokens must be a non-empty [P, L], got the shape {tokens.shape}")
    if mask.shape != tokens.shape:
        raise ValueError(f"prompt_mask must have the shape {tokens.shape} of prompt_tokens, got {mask.shape}")
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.shape != tokens.shape[:1]:
        raise ValueError(
            f"keys must be typed PRNG keys of shape ({tokens.shape[0]},), one per prompt, "
            f"got {keys.dtype} of shape {keys.shape}"
        )
    if "rbg" in str(keys.dtype):
        raise ValueError("keys must be of a generator that vmap treats row by row (threefry2x32), got rbg")
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("prompts must be padded on the left and hold at least one token each")


def _check_room(limit: int | None, mask, length: int) -> None:
    """Learned positions end: refuses a prompt that leaves no room for `length` tokens behind it."""
    longest = int(mask.sum(axis=1).max())
    if limit is not None and longest + length > limit:
        raise ValueError(
            f"prompt and completion must have at most {limit} tokens together, the policy's max_positions; "
            f"got a prompt of {longest} tokens and max_new_tokens = {length}"
        )


def _pad_to_bucket(tokens, mask, keys, pad_id):
    """Left-pad L and repeat the last prompt until both are bucket sizes; also tell which rows are real."""
    rows, length = tokens.shape
    more_rows = bucket_size(rows) - rows
    more_tokens = bucket_size(length, smallest=8) - length
    tokens = np.pad(tokens, ((0, 0), (more_tokens, 0)), constant_values=pad_id)
    mask = np.pad(mask, ((0, 0), (more_tokens, 0)))
    if more_rows:
        tokens, mask = (np.pad(x, ((0, more_rows), (0, 0)), mode="edge") for x in (tokens, mask))
        keys = keys[np.minimum(np.arange(rows + more_rows), rows - 1)]
    return tokens, mask, keys, np.arange(rows + more_rows) < rows


def make_sampler(
    policy,
    params: SamplingParams,
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
    allowed_tokens=None,
) -> Callable[..., Samples]:
    """Make the function that writes completions.

    It is compiled once per bucket of shapes (P and L are rounded up by `bucket_size`, T is fixed) and stops
    as soon as every completion has ended. Random numbers of completion g at step t come from
    fold_in(fold_in(keys[p], g), t): they do not depend on the other prompts of the batch.

    Args:
        policy: Has `prefill`, `unstack`, `decode`, `init_cache` and `head`; see `grpo_jax.models.decoder.Policy`.
        params: Group size, length and distribution.
        eos_ids: Tokens that end a completion; may be empty.
        pad_id: Token that fills prompts on the left and completions after their end.
        allowed_tokens: bool [V], the tokens that may be written at all; None for every token.

    Returns:
        `sample(variables, prompt_tokens, prompt_mask, keys) -> Samples` with int [P, L], bool [P, L]
        (left-padded; on the host, or they are fetched) and typed PRNG keys [P], one per prompt. It raises
        ValueError for prompts that are empty, not left-padded or too long for the policy's positions, for keys
        of another kind, and for token ids outside the vocabulary.

    Raises:
        ValueError: `allowed_tokens` is not bool [V] or allows nothing.
    """
    eos_ids, pad_id = tuple(int(i) for i in eos_ids), int(pad_id)
    if allowed_tokens is not None:
        allowed_tokens = np.asarray(allowed_tokens)
        if allowed_tokens.dtype != bool or allowed_tokens.ndim != 1 or not allowed_tokens.any():
            raise ValueError(
                "allowed_tokens must be bool [V] with at least one true entry, "
                f"got {allowed_tokens.dtype} of shape {allowed_tokens.shape}"
            )
    generate = jax.jit(functools.partial(_generate, policy, params, eos_ids, pad_id, allowed_tokens))

    def sample(variables, prompt_tokens, prompt_mask, keys) -> Samples:
        tokens, mask = np.asarray(prompt_tokens, np.int32), np.asarray(prompt_mask, bool)
        _check_prompts(tokens, mask, keys)
        _check_room(getattr(policy, "max_positions", None), mask, params.max_new_tokens)
        samples = generate(variables, *_pad_to_bucket(tokens, mask, keys, pad_id))
        return jax.tree.map(lambda x: x[: tokens.shape[0]], samples)

    return sample
