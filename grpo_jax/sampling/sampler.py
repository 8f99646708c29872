"""Sampling: prefill each prompt once, then decode its G completions with that shared prefix.

A decoding step reads the weights, each prompt's keys and values once per group, and the filled part of the cache. Then
it draws one token. `Policy.unstack` separates the layers once. Any object with the policy's functions (`prefill`,
`unstack`, `decode_step`, `init_cache`, `head`, `logits`) can be sampled.

Axes: P prompts, G completions of a prompt, L prompt tokens, T completion tokens, D model width, V vocabulary; R is a
row, one (prompt, completion) pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from grpo_jax.core.trie import ROOT, Trie, children, follow
from grpo_jax.models.attention import Cache, Prefix
from grpo_jax.models.jitted import Jitted
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import FSDP
from grpo_jax.models.variables import PyTree, Variables, numbered
from grpo_jax.models.vision.pictures import PictureStates
from grpo_jax.sampling.token_choice import SamplingParams, choose_tokens

Array = jax.Array | np.ndarray

START = 0
"""The state of a text without a token among stop strings; tokenizers may write a text's first token otherwise."""

# Each cache size, and half of the prompts, needs another compilation of the step, so only long completions use them.
_CACHE_STEP = 64  # tokens per cache size
_CACHE_SIZES = 4  # maximum number of sizes
_HALVING = 32  # tokens above which the lengths of completions differ enough


class Samples(NamedTuple):
    """Completions of P prompts, on a device or fetched from it.

    Attributes:
        tokens: int32 [P, G, T], `pad_id` after the end.
        mask: bool [P, G, T], true for tokens of the completion, including EOS.
        logprobs: float32 [P, G, T] under the policy; 0 after the end.
        sampler_logprobs: float32 [P, G, T] under the sampling distribution; 0 after the end.
        truncated: bool [P, G], true if neither EOS nor a stop string came within T tokens.
        present: bool [P, G, T] of an episode, true for the policy's tokens (`mask`) and for observations. None if all
            tokens are the policy's.
        turn: int32 [P, G, T] of an episode, the turn of each token from 0; an observation has the turn before it. Or
            None.
        kept: int32 [P, G, T, top_k], the candidates of each draw (`Choice.kept`), -1 after the end; or None.
    """

    tokens: Array
    mask: Array
    logprobs: Array
    sampler_logprobs: Array
    truncated: Array
    present: Array | None = None
    turn: Array | None = None
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
        ended = {"truncated": ~self.done, "kept": self.kept}
        return Samples(self.tokens, self.mask, self.logprobs, self.sampler_logprobs, **ended)


class PromptBatch(NamedTuple):
    """A bucket of prompts."""

    tokens: jax.Array  # int32 [P, L], left-padded
    mask: jax.Array  # bool [P, L]
    keys: jax.Array  # typed PRNG keys [P]
    real: jax.Array  # bool [P], false for padding rows
    pictures: PictureStates | None  # the vision tower's output for the prompts' pictures


def make_sampler(
    policy: Policy,
    params: SamplingParams,
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
    allowed_tokens: ArrayLike | None = None,
    stops: np.ndarray | None = None,
    trie: Trie | None = None,
) -> Callable[..., Samples]:
    """Make the function that samples completions.

    It is compiled once per bucket of shapes: `bucket_size` rounds P and L up, T is fixed. It stops as soon as every
    completion has ended. Random numbers of completion g at step t come from fold_in(fold_in(keys[p], g), t). They do
    not depend on the other prompts of the batch.

    Args:
        policy: A `Policy`, for example from `load_policy`, or any object with its functions.
        params: Group size, length and distribution.
        eos_ids: Tokens that end a completion; may be empty.
        pad_id: Token that pads prompts on the left and completions after their end.
        allowed_tokens: bool [V], the tokens that may be generated; None for every token.
        stops: Stop strings as int32 [S, V] of `samplers.stop_table`, which end a completion with the token that
            completes one of them; None for none.
        trie: Constrains each completion to one of its texts, in place of `allowed_tokens` and `stops`. The policy's
            distribution at each token is then over the children of its node (`core.trie`). None for no constraint.

    Returns:
        `sample(variables, prompt_tokens, prompt_mask, keys, pictures=None) -> Samples` with int [P, L], bool [P, L]
        (left-padded, preferably on the host), typed PRNG keys [P], one per prompt, and `PictureStates` [P, I, ..] of
        the prompts' pictures. It raises ValueError for prompts that are empty, not left-padded or too long for the
        policy's positions, and for keys of another type.
    """
    ends = make_ends(eos_ids, pad_id, allowed_tokens)
    table = None if stops is None else jnp.asarray(stops)  # an argument, not a constant in every program

    @Jitted
    def write(stops: jax.Array | None, trie: Trie | None, variables: Variables, *prompts: PyTree) -> Samples:
        batch = PromptBatch(*prompts)
        return write_completions(policy, params, ends._replace(stops=stops, trie=trie), variables, batch).samples

    return over_buckets(functools.partial(write, table, trie), policy, ends.pad_id, params.max_new_tokens)


_cached_sampler = functools.lru_cache(maxsize=8)(make_sampler)


def generate(
    policy: Policy,
    prompts: Sequence[str],
    *,
    completions: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    **params: Any,
) -> list[list[str]]:
    """Generate completions of prompts as strings, with the policy's chat template if there is one.

    A second call with the same settings and numbers of prompts and tokens compiles nothing.

    Args:
        prompts: P strings.
        completions: G, completions per prompt.
        max_new_tokens: Maximum tokens of a completion.
        temperature: Divides the logits; 0 takes the most likely token.
        seed: Seed of the random numbers; a completion's depend only on it and on the prompt's position.
        **params: Other fields of `SamplingParams`, such as top_p.

    Returns:
        Strings `[P][G]` without special tokens.

    Raises:
        TypeError: There is no such field.
        ValueError: `prompts` is a single string, there are none, or a field is out of range.
        UserError: A prompt cannot be encoded.
    """
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"prompts: expected a list of at least one text, got {prompts[:40]!r}")
    settings = SamplingParams(completions, max_new_tokens, temperature, **params)
    sample = _cached_sampler(policy, settings, eos_ids=tuple(policy.eos_ids), pad_id=policy.pad_id)
    tokens, mask = policy.encode(prompts)
    return policy.decode(sample(policy.variables, tokens, mask, jax.random.split(jax.random.key(seed), len(prompts))))


def bucket_size(n: int, smallest: int = 1) -> int:
    """Round n up to a multiple of `smallest`, a power of two, with at most four sizes per doubling.

    A size depends only on n, never on earlier calls, so a resumed run computes in the same shapes.

    >>> [bucket_size(n) for n in (3, 8, 9, 17)], bucket_size(70, smallest=8)
    ([3, 8, 10, 20], 80)
    """
    multiple = max(smallest, 1 << max((n - 1).bit_length() - 3, 0))
    return -(-n // multiple) * multiple


def shares_of(policy: Policy) -> int:
    """Return the number of shards of the prompts."""
    mesh = getattr(policy, "mesh", None)
    return 1 if mesh is None else mesh.shape[FSDP]


Written = TypeVar("Written")


def over_buckets(write: Callable[..., Written], policy: Policy, pad_id: int, length: int) -> Callable[..., Written]:
    """Make `sample` of `make_sampler` from the compiled write(variables, tokens, mask, keys, real, pictures)."""

    def sample(variables, prompt_tokens, prompt_mask, keys, pictures=None) -> Written:
        tokens, mask = checked_prompts(policy, prompt_tokens, prompt_mask, keys, length)
        padded = pad_to_bucket(tokens, mask, keys, pad_id, shares=shares_of(policy))
        samples = write(numbered(variables), *padded, pad_rows(pictures, len(padded[0])))
        return samples if len(padded[0]) == len(tokens) else jax.tree.map(lambda x: x[: len(tokens)], samples)

    return sample


def checked_prompts(
    policy: Policy, prompt_tokens: ArrayLike, prompt_mask: ArrayLike, keys: jax.Array, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts and their mask on the host, int32 and bool [P, L]; ValueError as in `make_sampler`."""
    tokens = np.asarray(prompt_tokens, np.int32)
    mask = np.asarray(prompt_mask, bool)
    # With generators other than threefry, a row's numbers depend on the other rows.
    padded_left = mask.shape == tokens.shape and mask[:, -1].all() and not (mask[:, :-1] & ~mask[:, 1:]).any()
    if not padded_left or "fry" not in str(keys.dtype) or keys.shape != tokens.shape[:1]:
        raise ValueError(
            "prompts and their mask must be [P, L], padded on the left, with a token and a typed threefry key each; "
            f"got {tokens.shape}, {mask.shape} and {keys.dtype} {keys.shape}"
        )
    limit = getattr(policy, "max_positions", None)
    longest = int(mask.sum(axis=1).max())
    if limit is not None and longest + length > limit:
        raise ValueError(
            f"prompt and completion must have at most {limit} tokens together, the policy's max_positions; "
            f"got a prompt of {longest} tokens and max_new_tokens = {length}"
        )
    return tokens, mask


def pad_to_bucket(
    tokens: np.ndarray, mask: np.ndarray, keys: jax.Array, pad_id: int, *, shares: int = 1
) -> tuple[np.ndarray, np.ndarray, jax.Array, np.ndarray]:
    """Left-pad L and repeat the last prompt until both are bucket sizes, and P is a multiple of `shares`.

    The last result is the mask of real rows.
    """
    rows, length = tokens.shape
    more_rows = -(-bucket_size(rows) // shares) * shares - rows
    more_tokens = bucket_size(length, smallest=8) - length
    tokens = np.pad(tokens, ((0, 0), (more_tokens, 0)), constant_values=pad_id)
    mask = np.pad(mask, ((0, 0), (more_tokens, 0)))
    if more_rows:
        tokens, mask = (np.pad(x, ((0, more_rows), (0, 0)), mode="edge") for x in (tokens, mask))
        keys = keys[np.minimum(np.arange(rows + more_rows), rows - 1)]
    return tokens, mask, keys, np.arange(rows + more_rows) < rows


def pad_rows(tree: PyTree, rows: int) -> PyTree:
    """Repeat the last row of arrays [P, ..] up to `rows` rows; None stays None."""
    return jax.tree.map(lambda x: jnp.take(x, np.minimum(np.arange(rows), len(x) - 1), axis=0), tree)


def make_ends(eos_ids: tuple[int, ...], pad_id: int, allowed_tokens: ArrayLike | None) -> Ends:
    """Make the ends of free-form completions, with the allowed tokens as bool [V] on the host."""
    allowed = None if allowed_tokens is None else np.asarray(allowed_tokens)
    return Ends(tuple(int(i) for i in eos_ids), int(pad_id), allowed)


def write_completions(
    policy: Policy,
    params: SamplingParams,
    ends: Ends,
    variables: Variables,
    batch: PromptBatch,
) -> Loop:
    """Run the compiled part of sampling, once per bucket of shapes."""
    prompts, prompt_mask, keys, real, pictures = batch
    rows = len(prompts)
    group = params.group_size
    length = params.max_new_tokens
    prefix = policy.prefill(variables, prompts, prompt_mask, *(() if pictures is None else (pictures,)))
    writer = make_writer(policy, params, ends, variables, prefix.hidden.dtype)
    sizes = cache_sizes(length)
    cache = policy.init_cache(rows, group, sizes[0])
    loop = begin(prefix, group_keys(keys, group), ~real, length, ends, cache)
    if params.keep_mask:
        loop = loop._replace(kept=jnp.full((rows, group, length, params.top_k), -1, jnp.int32))
    # All G first tokens come from the prompt's last hidden state: P rows of logits, not P·G.
    loop = writer.record(loop, jnp.repeat(writer.logits(prefix.hidden), group, axis=1))
    for size in sizes:
        loop = loop._replace(cache=move(loop.cache, policy.init_cache(rows, group, size)))
        loop = run(writer.step, loop, size, halves(rows, length, ends))
    return loop


def begin(
    prefix: Prefix,
    keys: jax.Array,
    done: jax.Array,
    length: int,
    ends: Ends,
    cache: Cache,
) -> Loop:
    """Return the state before the first token, for keys [P, G]; `done` completions [P] or [P, G] need no step."""
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
        node=None if ends.trie is None else jnp.full(keys.shape, ROOT, jnp.int32),
    )


def group_keys(keys: jax.Array, group: int) -> jax.Array:
    """Derive the completions' keys [P, G] from the prompts' keys [P]."""
    return jax.vmap(lambda key: jax.vmap(lambda g: jax.random.fold_in(key, g))(jnp.arange(group)))(keys)


def _unfinished(loop: Loop) -> jax.Array:
    return jnp.sum(~jnp.all(loop.done, axis=1))


def run(step: Callable[[Loop], Loop], loop: Loop, until: int, halve: bool) -> Loop:
    """Step until `until` tokens or all ends; with `halve`, drop half of the prompts once half have ended."""
    if not halve:
        return _run(step, loop, until, 0)
    half = loop.done.shape[0] // 2
    loop = _run(step, loop, until, half)
    order = jnp.argsort(jnp.all(loop.done, axis=1), stable=True)[:half]
    few = jax.tree.map(lambda x: x[order] if x.ndim else x, loop)
    few = _run(step, few, jnp.where(_unfinished(loop) > half, 0, until), 0)
    return jax.tree.map(lambda x, part: x.at[order].set(part) if x.ndim else part, loop, few)


def _run(step: Callable[[Loop], Loop], loop: Loop, until: int | jax.Array, more_than: int) -> Loop:
    """Step while more than `more_than` prompts continue; the carried cache has no axes of size 1 (`write_cache`)."""

    def slim(loop: Loop) -> Loop:
        return loop._replace(cache=jax.tree.map(jnp.squeeze, loop.cache))

    def whole(carried: Loop) -> Loop:
        return carried._replace(cache=jax.tree.map(lambda x, like: x.reshape(like.shape), carried.cache, loop.cache))

    def goes_on(carried: Loop) -> jax.Array:
        return (carried.step < until) & (_unfinished(carried) > more_than)

    return whole(lax.while_loop(goes_on, lambda carried: slim(step(whole(carried))), slim(loop)))


def halves(rows: int, length: int, ends: Ends) -> bool:
    """Return whether half of the prompts may continue alone."""
    return (bool(ends.eos_ids) or ends.stops is not None or ends.trie is not None) and rows > 1 and length > _HALVING


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
    unstacked: Variables  # the variables for `decode_step`


def make_writer(
    policy: Policy, params: SamplingParams, ends: Ends, variables: Variables, dtype: jax.typing.DTypeLike
) -> Writer:
    """Make a sampler's parts for these variables; `dtype` is that of the hidden states."""
    # Convert and unstack here: in the loop it would be a pass over the weights for every token.
    head = policy.head(variables).astype(dtype)
    unstacked = policy.unstack(variables)
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

    return Writer(step, record, logits_of, unstacked)
