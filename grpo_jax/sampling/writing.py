"""Writing completions: the loop that chooses a token, decodes it and chooses the next, inside one compiled program.

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

from grpo_jax.core.trie import ROOT, Trie, children, follow
from grpo_jax.sampling.stopping import START
from grpo_jax.sampling.token_choice import choose_tokens

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
        truncated: bool [P, G], true where neither an end-of-sequence token nor a stop string came within T tokens.
        present: bool [P, G, T] of an episode, true for what stands there at all: what the policy wrote (`mask`), and
            what was said to it in between. None where the policy wrote all of it.
        turn: int32 [P, G, T] of an episode, the turn of each token from 0, or the one that it answers; or None.
        weights: float32 [P, G] of completions that are not drawn independently: what each counts in a sum over its
            group that estimates a mean over the policy's completions, which is its probability over that of standing
            in the group. None for independent ones, which count 1/G each.
    """

    tokens: Array
    mask: Array
    logprobs: Array
    sampler_logprobs: Array
    truncated: Array
    present: Array | None = None
    turn: Array | None = None
    weights: Array | None = None


class Ends(NamedTuple):
    """What a completion may hold, and what ends it.

    Attributes:
        eos_ids: Tokens that end it; may be empty.
        pad_id: Token that fills up.
        allowed_tokens: bool [V], the tokens that may be written at all; None for every token.
        trie: The texts that may be written, in place of single tokens; a completion ends where one of them does.
        stops: Stop strings, int32 [S, V] of `stopping.stop_table`; None for none.
    """

    eos_ids: tuple[int, ...]
    pad_id: int
    allowed_tokens: np.ndarray | None = None
    stops: Array | None = None
    trie: Trie | None = None


class Loop(NamedTuple):
    """What one decoding step hands to the next; every array begins with the axis of prompts.

    `place` int32 [P, G] is where a text stands among the stop strings, `node` int32 [P, G] where in the tree of what
    may be written, `seen` bool [P, G, V] what prompt and completion hold; None where that is not asked for.
    """

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
    place: jax.Array | None = None
    seen: jax.Array | None = None
    node: jax.Array | None = None


def begin(
    prefix: Any, keys: jax.Array, done: jax.Array, length: int, ends: Ends, cache: Any, seen: jax.Array | None = None
) -> Loop:
    """The state before the first token, for keys [P, G]; what is done [P] or [P, G] already costs no step."""
    slab = (*keys.shape, length)
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
        seen=seen,
        node=None if ends.trie is None else jnp.full(keys.shape, ROOT, jnp.int32),
    )


def tokens_in(tokens: jax.Array, mask: jax.Array, vocabulary: int) -> jax.Array:
    """Which tokens stand in texts [.., L]: bool [.., V]."""
    rows = tokens.reshape(-1, tokens.shape[-1]), mask.reshape(-1, mask.shape[-1])
    found = jax.vmap(lambda row, there: jnp.zeros(vocabulary, bool).at[row].max(there))(*rows)
    return found.reshape(*tokens.shape[:-1], vocabulary)


def _unfinished(loop: Loop) -> jax.Array:
    """Prompts with a completion that goes on, i32 scalar."""
    return jnp.sum(~jnp.all(loop.done, axis=1))


def run(step: Callable[[Loop], Loop], loop: Loop, until: int, halve: bool) -> Loop:
    """Step until so many tokens are written, or nothing is left to write; perhaps the second half at half the cost."""
    if not halve:
        return _run(step, loop, until, 0)
    return _run_half(step, _run(step, loop, until, loop.done.shape[0] // 2), until)


def _run(step: Callable[[Loop], Loop], loop: Loop, until: int | jax.Array, more_than: int) -> Loop:
    """Step until so many tokens are written or no more prompts than that are unfinished."""
    return lax.while_loop(lambda loop: (loop.step < until) & (_unfinished(loop) > more_than), step, loop)


def _run_half(step: Callable[[Loop], Loop], loop: Loop, until: int) -> Loop:
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


def move(cache: Any, larger: Any) -> Any:
    """What a cache holds, at the beginning of a larger one."""
    return jax.tree.map(lambda part, room: lax.dynamic_update_slice(room, part, (0,) * part.ndim), cache, larger)


class Writer(NamedTuple):
    """One sampler's compiled parts for one set of variables: what a step is, and how the first token is chosen.

    `logits` are float32 [V, rows] of states [rows, D].
    """

    step: Callable[[Loop], Loop]
    record: Callable[[Loop, jax.Array], Loop]
    logits: Callable[[jax.Array], jax.Array]
    vocabulary: int
    unstacked: Any


def make_writer(policy, params, ends: Ends, variables, dtype) -> Writer:
    """A sampler's parts for these variables; `dtype` is that of the states."""
    # Converted and unstacked here, not in the loop, where it would cost a pass over the weights for every token.
    head, unstacked = policy.head(variables).astype(dtype), policy.unstack(variables)
    _check_vocabulary(head.shape[0], ends, params)
    stops = ends.stops

    def logits_of(hidden: jax.Array) -> jax.Array:
        """float32 [V, rows] of states [rows, D]."""
        return policy.logits("vd,rd->vr", head, hidden)

    def record(loop: Loop, logits) -> Loop:
        """Choose the token of this step for every row from logits [V, P·G] and write it down."""
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, loop.step))(loop.keys.reshape(-1))
        seen = None if loop.seen is None else loop.seen.reshape(-1, loop.seen.shape[-1])
        barred = _barred(logits.shape[0], loop.step, params, ends)
        allowed = ends.allowed_tokens
        if ends.trie is not None and loop.node is not None:
            allowed = children(ends.trie, loop.node.reshape(-1)).T
        choice = choose_tokens(logits, step_keys, params, allowed, seen=seen, barred=barred)
        choice = jax.tree.map(lambda x: x.reshape(loop.done.shape), choice)
        active = ~loop.done
        tokens = jnp.where(active, choice.tokens, ends.pad_id)
        ended = functools.reduce(jnp.logical_or, [tokens == eos for eos in ends.eos_ids], jnp.zeros_like(active))
        if stops is not None and loop.place is not None:
            place = jnp.where(active, stops[loop.place, tokens], loop.place)
            stopped = place == len(stops)
            ended, loop = ended | stopped, loop._replace(place=jnp.where(stopped, START, place))
        if ends.trie is not None and loop.node is not None:
            node = jnp.where(active, follow(ends.trie, loop.node, tokens), loop.node)
            ended, loop = ended | (ends.trie.text[node] >= 0), loop._replace(node=node)
        if loop.seen is not None:
            p, g = jnp.indices(tokens.shape)
            loop = loop._replace(seen=loop.seen.at[p, g, tokens].max(active))
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

    return Writer(step, record, logits_of, head.shape[0], unstacked)


def group_keys(keys: jax.Array, group: int) -> jax.Array:
    """[P, G] of the prompts' keys [P]."""
    return jax.vmap(lambda key: jax.vmap(lambda g: jax.random.fold_in(key, g))(jnp.arange(group)))(keys)


def _barred(vocabulary: int, step: jax.Array, params, ends: Ends) -> jax.Array | None:
    """bool [V], the ends that come too early at this step; None where none does."""
    if params.min_new_tokens == 0 or not ends.eos_ids:
        return None
    return jnp.zeros(vocabulary, bool).at[jnp.array(ends.eos_ids)].set(step < params.min_new_tokens)


def generate(policy, params, ends: Ends, variables, prompts, prompt_mask, keys, real, pictures) -> Loop:
    """The compiled part, once per bucket of shapes. `real` bool [P] is false for rows added as padding."""
    (rows, _), group, length = prompts.shape, params.group_size, params.max_new_tokens
    shown = () if pictures is None else (pictures,)
    prefix = policy.prefill(variables, prompts, prompt_mask, *shown)
    writer = make_writer(policy, params, ends, variables, prefix.hidden.dtype)
    sizes = cache_sizes(length)
    keys = group_keys(keys, group)
    seen = None
    if params.penalises:
        seen = jnp.repeat(tokens_in(prompts, prompt_mask, writer.vocabulary)[:, None], group, axis=1)
    loop = begin(prefix, keys, ~real, length, ends, policy.init_cache(rows, group, sizes[0]), seen)
    # The first token of all G completions comes from the prompt's last state: P rows of logits, not P·G.
    loop = writer.record(loop, jnp.repeat(writer.logits(prefix.hidden), group, axis=1))
    halve = halves(rows, length, ends)
    for size in sizes:
        loop = loop._replace(cache=move(loop.cache, policy.init_cache(rows, group, size)))
        loop = run(writer.step, loop, size, halve)
    return loop


def halves(rows: int, length: int, ends: Ends) -> bool:
    """Whether half of the prompts may go on alone."""
    return (bool(ends.eos_ids) or ends.stops is not None or ends.trie is not None) and rows > 1 and length > _HALVING


def samples_of(loop: Loop) -> Samples:
    """What has been written."""
    return Samples(loop.tokens, loop.mask, loop.logprobs, loop.sampler_logprobs, truncated=~loop.done)


def _check_vocabulary(size: int, ends: Ends, params) -> None:
    allowed, stops = ends.allowed_tokens, ends.stops
    if allowed is not None and allowed.shape != (size,):
        raise ValueError(f"allowed_tokens must have the shape ({size},) of the vocabulary, got {allowed.shape}")
    if stops is not None and stops.shape[1:] != (size,):
        raise ValueError(f"stops must have the shape [S, {size}] of the vocabulary, got {stops.shape}")
    if ends.trie is not None and ends.trie.vocab_size != size:
        raise ValueError(f"trie must be of the policy's vocabulary of {size}, got one of {ends.trie.vocab_size}")
    if ends.trie is not None and (params.min_new_tokens or allowed is not None or stops is not None):
        raise ValueError("trie says what is written and where it ends: leave out allowed_tokens, stops, min_new_tokens")
    for name, ids in (("eos_ids", ends.eos_ids), ("pad_id", (ends.pad_id,))):
        if any(not 0 <= i < size for i in ids):
            raise ValueError(f"{name} must lie in [0, {size}), the vocabulary of the policy, got {ids}")
    may_go_on = np.ones(size, bool) if allowed is None else allowed.copy()
    may_go_on[list(ends.eos_ids)] = False
    if params.min_new_tokens and not may_go_on.any():
        raise ValueError("min_new_tokens must be 0 where only tokens of eos_ids are allowed")
