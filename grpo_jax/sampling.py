"""Completions: prefill each prompt once, decode its G completions against that shared prefix.

The sampler knows a policy by its functions (`prefill`, `unstack`, `decode`, `init_cache`, `head`; `forward_group`
is the update's), so it works for anything that offers them. Axes: P prompts, G completions of a prompt, L
prompt tokens, T completion tokens, D model width, V vocabulary; R is a row, one (prompt, completion) pair.

Two distributions meet here. The *policy's* is softmax(logits / temperature) over the allowed tokens: it is
the one that is trained. The *sampler's* is the policy's restricted by top-k, top-p and min-p: the one
tokens are drawn from.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_BLOCK = 128  # tokens in a block of the two-level draw: between 64 and 256 is fastest for V from 4k to 152k
_CACHE_STEP, _CACHE_SIZES = 64, 4  # tokens that are worth a larger cache, and how many sizes at most: each is compiled


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. Hashable: each distinct value compiles its own sampler.

    Attributes:
        group_size: G, completions per prompt.
        max_new_tokens: T, tokens after which a completion is cut.
        temperature: Divides the logits; 0 takes the most likely token (log-probabilities are then at
            temperature 1).
        top_k: Draw among the k most likely tokens; 0 for all.
        top_p: Draw among the fewest most likely tokens that hold this share of the mass top-k left (tokens as
            likely as the last of them come along); 1 for all.
        min_p: Draw among tokens at least this fraction as likely as the most likely one; 0 for all.
    """

    group_size: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        """Refuse values outside their range.

        Raises:
            ValueError: A value is out of range; the message names the field.
        """
        rules = {
            "group_size": (self.group_size >= 1, "at least 1"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (
                math.isfinite(self.temperature) and self.temperature >= 0,
                "finite and at least 0",
            ),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)}")


class Samples(NamedTuple):
    """Completions of P prompts.

    Attributes:
        tokens: int32 [P, G, T], `pad_id` after the end.
        mask: bool [P, G, T], true for tokens of the completion, the end-of-sequence token included.
        logprobs: float32 [P, G, T] under the policy; 0 after the end.
        sampler_logprobs: float32 [P, G, T] under the distribution drawn from; 0 after the end.
        truncated: bool [P, G], true where no end-of-sequence token came within T tokens.
    """

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    sampler_logprobs: jax.Array
    truncated: jax.Array


class Choice(NamedTuple):
    """A token per row, int32 [R], and its log-probabilities under policy and sampler, float32 [R]."""

    tokens: jax.Array
    logprobs: jax.Array
    sampler_logprobs: jax.Array


def choose_tokens(
    logits: jax.Array, keys: jax.Array, params: SamplingParams, allowed_tokens: jax.Array | None = None
) -> Choice:
    """Draw one token per row.

    Args:
        logits: [V, R], any floating dtype. The vocabulary comes first as in the head's weights [V, D]: a product
            of few rows then reads them as they lie, in two thirds of the time on a CPU.
        keys: Typed PRNG keys [R], one per row: a row's token depends on its own logits and key alone.
        params: Temperature and restrictions; top-k comes first, then top-p on what is left, then min-p.
        allowed_tokens: bool [V], tokens that exist at all; None for every token.
    """
    logits = logits.astype(jnp.float32)
    if allowed_tokens is not None:
        logits = jnp.where(allowed_tokens[:, None], logits, -jnp.inf)
    if params.temperature == 0:
        tokens = jnp.argmax(logits, axis=0).astype(jnp.int32)
        logprobs = _take(logits, tokens) - jax.nn.logsumexp(logits, axis=0)
        return Choice(tokens, logprobs, jnp.zeros_like(logprobs))
    logits = logits / params.temperature
    if params.top_k:
        values, ids = (part.T for part in lax.top_k(logits.T, min(params.top_k, logits.shape[0])))
        survivors = _restrict_sorted(values, params)
        index, survivor_mass = _draw(survivors, keys)
        tokens = _take(ids, index)
    else:
        survivors = _restrict(logits, params)
        index, survivor_mass = _draw(survivors, keys)
        tokens = index
    chosen = _take(logits, tokens)
    if survivors is logits:
        return Choice(tokens, chosen - survivor_mass, chosen - survivor_mass)
    return Choice(tokens, chosen - jax.nn.logsumexp(logits, axis=0), chosen - survivor_mass)


def _take(values: jax.Array, index: jax.Array) -> jax.Array:
    """Pick values[index[r], r] of every row: [n, R], [R] → [R]."""
    return jnp.take_along_axis(values, index[None], axis=0)[0]


def _restrict_sorted(values: jax.Array, params: SamplingParams) -> jax.Array:
    """Top-p and min-p on logits [k, R] sorted downwards; what falls out becomes -inf."""
    if params.top_p < 1:
        probs = jax.nn.softmax(values, axis=0)
        values = jnp.where(jnp.cumsum(probs, axis=0) - probs < params.top_p, values, -jnp.inf)
    return _apply_min_p(values, params.min_p)


def _restrict(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Top-p and min-p on logits [V, R] in any order; what falls out becomes -inf."""
    if params.top_p < 1:
        probs = jnp.exp(logits - jnp.max(logits, axis=0))
        logits = jnp.where(probs >= _nucleus_threshold(probs, params.top_p), logits, -jnp.inf)
    return _apply_min_p(logits, params.min_p)


def _apply_min_p(logits: jax.Array, min_p: float) -> jax.Array:
    if min_p == 0:
        return logits
    return jnp.where(logits >= jnp.max(logits, axis=0) + math.log(min_p), logits, -jnp.inf)


def _nucleus_threshold(probs: jax.Array, top_p: float) -> jax.Array:
    """Find the largest threshold [R] at or above which the entries of probs [V, R] hold top_p of the mass.

    Bisection over the bit patterns of float32, which are ordered as the non-negative numbers they stand
    for: 30 passes reach the exact threshold, at a fiftieth of the cost of sorting a vocabulary. `probs` is
    at most 1. What is compared is the mass left out: near top_p = 1 it is the smaller sum, and so the more
    exact one.
    """
    spare = (1 - top_p) * jnp.sum(probs, axis=0)

    def halve(_, bounds):
        enough, too_few = bounds
        middle = enough + (too_few - enough) // 2
        threshold = lax.bitcast_convert_type(middle, jnp.float32)
        holds = jnp.sum(jnp.where(probs < threshold, probs, 0.0), axis=0) <= spare
        return jnp.where(holds, middle, enough), jnp.where(holds, too_few, middle)

    above_one = int(np.float32(1).view(np.int32)) + 1  # < 2**30, so 30 halvings leave an interval of one
    bounds = (jnp.zeros_like(spare, jnp.int32), jnp.full_like(spare, above_one, jnp.int32))
    return lax.bitcast_convert_type(lax.fori_loop(0, 30, halve, bounds)[0], jnp.float32)


def _draw(logits: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw an index from softmax(logits) per row: [n, R], keys [R] → int32 [R] and the logsumexp [R].

    In two levels, a block of tokens by its mass and then a token of the block: the same distribution as one
    Gumbel per token, with n / 128 + 128 random numbers instead of n.
    """
    n, rows = logits.shape
    blocks = -(-n // _BLOCK)
    logits = jnp.pad(logits, ((0, blocks * _BLOCK - n), (0, 0)), constant_values=-jnp.inf)
    logits = logits.reshape(blocks, _BLOCK, rows)
    block_mass = jax.nn.logsumexp(logits, axis=1)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (blocks + _BLOCK,)), out_axes=1)(keys)
    block = jnp.argmax(block_mass + noise[:blocks], axis=0)
    logits = jnp.take_along_axis(logits, block[None, None], axis=0)[0]
    within = jnp.argmax(logits + noise[blocks:], axis=0)
    return (block * _BLOCK + within).astype(jnp.int32), jax.nn.logsumexp(block_mass, axis=0)


class _Loop(NamedTuple):
    """What one decoding step hands to the next; the outputs are [T, P, G], so that a step writes one slab."""

    step: jax.Array
    done: jax.Array
    last: jax.Array
    cache: Any
    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    sampler_logprobs: jax.Array


def _empty_loop(done: jax.Array, group: int, length: int, pad_id: int, cache: Any) -> _Loop:
    """The state before the first token; rows bool [P] that are done already cost no step."""
    slab = (length, done.shape[0], group)
    return _Loop(
        step=jnp.int32(0),
        done=jnp.broadcast_to(done[:, None], slab[1:]),
        last=jnp.full(slab[1:], pad_id, jnp.int32),
        cache=cache,
        tokens=jnp.full(slab, pad_id, jnp.int32),
        mask=jnp.zeros(slab, bool),
        logprobs=jnp.zeros(slab, jnp.float32),
        sampler_logprobs=jnp.zeros(slab, jnp.float32),
    )


def cache_sizes(length: int) -> list[int]:
    """Sizes the cache grows through until it holds `length` tokens; attention reads all of the current one.

    >>> cache_sizes(40), cache_sizes(200)
    ([40], [104, 200])
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
    keys = keys.reshape(rows * group)

    def record(loop: _Loop, logits) -> _Loop:
        """Choose the token of this step for every row from logits [V, P·G] and write it down."""
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, loop.step))(keys)
        choice = choose_tokens(logits, step_keys, params, allowed_tokens)
        choice = jax.tree.map(lambda x: x.reshape(rows, group), choice)
        active = ~loop.done
        tokens = jnp.where(active, choice.tokens, pad_id)
        ended = functools.reduce(jnp.logical_or, [tokens == eos for eos in eos_ids], jnp.zeros_like(active))
        return loop._replace(
            step=loop.step + 1,
            done=loop.done | ended,
            last=tokens,
            tokens=loop.tokens.at[loop.step].set(tokens),
            mask=loop.mask.at[loop.step].set(active),
            logprobs=loop.logprobs.at[loop.step].set(jnp.where(active, choice.logprobs, 0.0)),
            sampler_logprobs=loop.sampler_logprobs.at[loop.step].set(jnp.where(active, choice.sampler_logprobs, 0.0)),
        )

    def step(loop: _Loop) -> _Loop:
        hidden, cache = policy.decode(unstacked, prefix, loop.last, loop.cache)
        hidden = hidden.reshape(rows * group, -1)
        logits = jnp.einsum("vd,rd->vr", head, hidden, preferred_element_type=jnp.float32)
        return record(loop._replace(cache=cache), logits)

    sizes = cache_sizes(length)
    loop = _empty_loop(~real, group, length, pad_id, policy.init_cache(rows, group, sizes[0]))
    # The first token of all G completions comes from the prompt's last state: P rows of logits, not P·G.
    first = jnp.einsum("vd,pd->vp", head, prefix.hidden, preferred_element_type=jnp.float32)
    loop = record(loop, jnp.repeat(first, group, axis=1))
    for size in sizes:
        loop = loop._replace(cache=_move(loop.cache, policy.init_cache(rows, group, size)))
        loop = lax.while_loop(lambda loop, size=size: (loop.step < size) & ~jnp.all(loop.done), step, loop)
    outputs = (loop.tokens, loop.mask, loop.logprobs, loop.sampler_logprobs)
    return Samples(*(jnp.transpose(x, (1, 2, 0)) for x in outputs), truncated=~loop.done)


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
