"""Decoding: prefill each prompt once, then decode its G completions with that shared prefix; all of it is compiled.

A decoding step reads the weights, each prompt's keys and values once per group, and the filled part of the cache. Then
it draws one token. `Policy.unstack` separates the layers once. Any object with the policy's functions (`prefill`,
`unstack`, `decode_step`, `init_cache`, `head`, `logits`) can be decoded.

Axes: P prompts, G completions of a prompt, L prompt tokens, T completion tokens, D model width, V vocabulary; R is a
row, one (prompt, completion) pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from grpo_jax.core.trie import ROOT, Trie, children, follow
from grpo_jax.models.attention import Cache, Prefix
from grpo_jax.models.policy import Policy
from grpo_jax.models.variables import PyTree, Variables
from grpo_jax.models.vision.pictures import PictureStates
from grpo_jax.sampling.token_choice import SamplingParams, choose_tokens

Array = jax.Array | np.ndarray

START = 0
"""The state of a text without a token among stop strings; tokenizers may write a text's first token otherwise."""

# Each cache size, and each number of rows, needs another compilation of the step, so only long completions use them.
_CACHE_STEP = 64  # tokens per cache size
_CACHE_SIZES = 4  # maximum number of sizes
_ROW_SHARES = 4, 16  # a quarter of the rows, a sixteenth
_HALVING = 32  # tokens above which the lengths of completions differ enough


class Samples(NamedTuple):
    """Completions of P prompts, on a device or fetched from it."""

    tokens: Array  # int32 [P, G, T], `pad_id` after the end
    mask: Array  # bool [P, G, T], true for tokens of the completion, including EOS
    logprobs: Array  # float32 [P, G, T] under the policy; 0 after the end
    sampler_logprobs: Array  # float32 [P, G, T] under the sampling distribution; 0 after the end
    truncated: Array  # bool [P, G], true if neither EOS nor a stop string came within T tokens
    # bool [P, G, T] of an episode, true for the policy's tokens (`mask`) and observations; None without observations
    present: Array | None = None
    # int32 [P, G, T] of an episode, the turn of each token from 0; an observation has the turn before it. Or None
    turn: Array | None = None
    # int32 [P, G, T, top_k], the candidates of each draw (`Choice.kept`), -1 after the end; or None
    kept: Array | None = None


class Ends(NamedTuple):
    """Allowed tokens and stopping conditions of a completion, as arguments of `make_sampler`."""

    eos_ids: tuple[int, ...]
    pad_id: int
    allowed_tokens: np.ndarray | None = None
    stops: Array | None = None
    trie: Trie | None = None


class Loop(NamedTuple):
    """State of the decoding loop; every array has the axis of prompts first."""

    step: jax.Array
    prefix: Prefix
    keys: jax.Array
    done: jax.Array
    last: jax.Array
    cache: Cache
    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    sampler_logprobs: jax.Array
    place: jax.Array | None = None  # int32 [P, G], state of the stop-string automaton; None without stop strings
    node: jax.Array | None = None  # int32 [P, G], node in the trie; None without one
    kept: jax.Array | None = None  # int32 [P, G, T, top_k], the candidates of each draw; None without keep_mask

    @property
    def samples(self) -> Samples:
        """Return the completions so far."""
        return Samples(self.tokens, self.mask, self.logprobs, self.sampler_logprobs, ~self.done, kept=self.kept)


class PromptBatch(NamedTuple):
    """A bucket of prompts."""

    tokens: jax.Array  # int32 [P, L], left-padded
    mask: jax.Array  # bool [P, L]
    keys: jax.Array  # typed PRNG keys [P]
    real: jax.Array  # bool [P], false for padding rows
    pictures: PictureStates | None  # the vision tower's output for the prompts' pictures


def make_ends(eos_ids: tuple[int, ...], pad_id: int, allowed_tokens: ArrayLike | None) -> Ends:
    """Make the ends of free-form completions, with the allowed tokens as bool [V] on the host."""
    allowed = None if allowed_tokens is None else np.asarray(allowed_tokens)
    return Ends(tuple(int(i) for i in eos_ids), int(pad_id), allowed)


def write_completions(
    policy: Policy, params: SamplingParams, ends: Ends, variables: Variables, batch: PromptBatch
) -> Loop:
    """Sample in one program, once per bucket of shapes."""
    loop, weights = begin_completions(policy, params, ends, variables, batch)
    writer = make_writer(policy, params, ends, weights)
    for size in cache_sizes(params.max_new_tokens):
        loop = loop._replace(cache=move(loop.cache, policy.init_cache(*loop.done.shape, size)))
        loop = run(writer.step, loop, size, half_of(len(loop.done), params.max_new_tokens, ends))
    return loop


def begin_completions(
    policy: Policy, params: SamplingParams, ends: Ends, variables: Variables, batch: PromptBatch
) -> tuple[Loop, Weights]:
    """Prefill the prompts and choose the first tokens."""
    prompts, prompt_mask, keys, real, pictures = batch
    rows, group, length = len(prompts), params.group_size, params.max_new_tokens
    prefix = policy.prefill(variables, prompts, prompt_mask, *(() if pictures is None else (pictures,)))
    weights = decoding_weights(policy, variables, prefix.hidden.dtype)
    writer = make_writer(policy, params, ends, weights)
    cache = policy.init_cache(rows, group, cache_sizes(length)[0])
    loop = begin(prefix, group_keys(keys, group), ~real, params, ends, cache)
    # All G first tokens come from the prompt's last hidden state: P rows of logits, not P·G.
    return writer.record(loop, jnp.repeat(writer.logits(prefix.hidden), group, axis=1)), weights


def begin(prefix: Prefix, keys: jax.Array, done: jax.Array, params: SamplingParams, ends: Ends, cache: Cache) -> Loop:
    """Return the state before the first token, for keys [P, G]; `done` completions [P] or [P, G] need no step."""
    slab = (*keys.shape, params.max_new_tokens)
    return Loop(
        step=jnp.int32(0),
        prefix=prefix,
        keys=keys,
        done=jnp.broadcast_to(done.reshape(len(done), -1), keys.shape),
        last=jnp.full(keys.shape, ends.pad_id, jnp.int32),
        cache=cache,
        tokens=jnp.full(slab, ends.pad_id, jnp.int32),
        mask=jnp.zeros(slab, bool),
        logprobs=jnp.zeros(slab, jnp.float32),
        sampler_logprobs=jnp.zeros(slab, jnp.float32),
        place=None if ends.stops is None else jnp.full(keys.shape, START, jnp.int32),
        node=None if ends.trie is None else jnp.full(keys.shape, ROOT, jnp.int32),
        kept=jnp.full((*slab, params.top_k), -1, jnp.int32) if params.keep_mask else None,
    )


def group_keys(keys: jax.Array, group: int) -> jax.Array:
    """Derive the completions' keys [P, G] from the prompts' keys [P]."""
    return jax.vmap(lambda key: jax.vmap(lambda g: jax.random.fold_in(key, g))(jnp.arange(group)))(keys)


def unfinished(loop: Loop) -> jax.Array:
    """Return the number of prompts with a completion that continues, int32."""
    return jnp.sum(~jnp.all(loop.done, axis=1))


def unfinished_rows(loop: Loop) -> jax.Array:
    """Return the number of completions that continue, int32."""
    return jnp.sum(~loop.done)


def rows_of(tree: PyTree, order: jax.Array) -> PyTree:
    """Return the rows `order` of each array; scalars stay."""
    return jax.tree.map(lambda x: x[order] if x.ndim else x, tree)


def run(step: Callable[[Loop], Loop], loop: Loop, until: int, half: int) -> Loop:
    """Step until `until` tokens or all ends; only `half` of the prompts once so few continue (0: always all)."""
    loop = run_until(step, loop, until, half)
    if not half:
        return loop
    order = jnp.argsort(jnp.all(loop.done, axis=1), stable=True)[:half]  # prompts that continue come first
    few = run_until(step, rows_of(loop, order), jnp.where(unfinished(loop) > half, 0, until), 0)
    return jax.tree.map(lambda x, part: x.at[order].set(part) if x.ndim else part, loop, few)


def run_until(
    step: Callable[[Loop], Loop],
    loop: Loop,
    until: int | jax.Array,
    above: int,
    remaining: Callable[[Loop], jax.Array] = unfinished,
) -> Loop:
    """Step until `until` tokens, while more than `above` prompts continue, or rows (`unfinished_rows`).

    The carried cache has no axes of size 1 (`write_cache`).
    """

    def slim(loop: Loop) -> Loop:
        return loop._replace(cache=jax.tree.map(jnp.squeeze, loop.cache))

    def whole(carried: Loop) -> Loop:
        return carried._replace(cache=jax.tree.map(lambda x, like: x.reshape(like.shape), carried.cache, loop.cache))

    def goes_on(carried: Loop) -> jax.Array:
        return (carried.step < until) & (remaining(carried) > above)

    return whole(lax.while_loop(goes_on, lambda carried: slim(step(whole(carried))), slim(loop)))


def _end_apart(length: int, ends: Ends) -> bool:
    return (bool(ends.eos_ids) or ends.stops is not None or ends.trie is not None) and length > _HALVING


def half_of(rows: int, length: int, ends: Ends) -> int:
    """Return how many prompts may continue alone; 0 for completions that are short or end together."""
    return rows // 2 if _end_apart(length, ends) else 0


def row_counts(prompts: tuple[int, ...], params: SamplingParams, ends: Ends) -> tuple[int, ...]:
    """Return the numbers of rows to which a batch shrinks as completions end, for prompts of shape (P, L).

    A row then has its own copy of the prompt's keys and values. No count takes more memory than the whole cache.
    """
    (number, longest), length = prompts, params.max_new_tokens
    rows = number * params.group_size if _end_apart(length, ends) else 0
    counts = (rows // share for share in _ROW_SHARES)
    return tuple(few for few in counts if few > 1 and few * (longest + length) <= rows * length)


def cache_sizes(length: int) -> list[int]:
    """Return the cache's sizes up to `length` tokens; attention reads the whole current size.

    >>> cache_sizes(40), cache_sizes(200)
    ([40], [56, 112, 168, 200])
    """
    parts = -(-length // _CACHE_STEP)
    size = -(-length // min(parts, _CACHE_SIZES))
    size = -(-size // 8) * 8
    return [*range(size, length, size), length]


def move(cache: PyTree, larger: PyTree) -> PyTree:
    """Copy a cache to the start of a larger one."""
    return jax.tree.map(lambda part, room: lax.dynamic_update_slice(room, part, (0,) * part.ndim), cache, larger)


class Writer(NamedTuple):
    """Compiled parts of a sampler for one set of variables."""

    step: Callable[[Loop], Loop]  # decodes the last tokens and records the next
    # (loop, logits float32 [V, R]) -> the loop with a token chosen for every row
    record: Callable[[Loop, jax.Array], Loop]
    logits: Callable[[jax.Array], jax.Array]  # float32 [V, R] of hidden states [R, D]


class Weights(NamedTuple):
    """The variables as decoding reads them."""

    head: jax.Array  # [V, D] in the dtype of the hidden states
    unstacked: Variables  # for `decode_step`


def decoding_weights(policy: Policy, variables: Variables, dtype: jax.typing.DTypeLike) -> Weights:
    """Convert and unstack once: in the loop it would be a pass over the weights for every token."""
    return Weights(policy.head(variables).astype(dtype), policy.unstack(variables))


def make_writer(policy: Policy, params: SamplingParams, ends: Ends, weights: Weights) -> Writer:
    """Make a sampler's parts for these weights."""
    head, unstacked = weights
    stops = ends.stops

    def logits_of(hidden: jax.Array) -> jax.Array:
        return policy.logits("vd,rd->vr", head, hidden)

    def record(loop: Loop, logits: jax.Array) -> Loop:
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, loop.step))(loop.keys.reshape(-1))
        allowed = ends.allowed_tokens
        if ends.trie is not None and loop.node is not None:
            allowed = children(ends.trie, loop.node.reshape(-1)).T
        choice = choose_tokens(logits, step_keys, params, allowed)
        choice = jax.tree.map(lambda x: x.reshape(*loop.done.shape, *x.shape[1:]), choice)
        active = ~loop.done
        tokens = jnp.where(active, choice.tokens, ends.pad_id)
        ended = functools.reduce(jnp.logical_or, [tokens == eos for eos in ends.eos_ids], jnp.zeros_like(active))
        if stops is not None and loop.place is not None:
            place = jnp.where(active, stops[loop.place, tokens], loop.place)
            stopped = place == len(stops)
            ended = ended | stopped
            loop = loop._replace(place=jnp.where(stopped, START, place))
        if ends.trie is not None and loop.node is not None:
            node = jnp.where(active, follow(ends.trie, loop.node, tokens), loop.node)
            ended = ended | (ends.trie.text[node] >= 0)
            loop = loop._replace(node=node)
        if loop.kept is not None:
            loop = loop._replace(kept=loop.kept.at[:, :, loop.step].set(jnp.where(active[..., None], choice.kept, -1)))
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

    def step(loop: Loop) -> Loop:
        hidden, cache = policy.decode_step(unstacked, loop.prefix, loop.last, loop.cache)
        return record(loop._replace(cache=cache), logits_of(hidden.reshape(-1, hidden.shape[-1])))

    return Writer(step, record, logits_of)
