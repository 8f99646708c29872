"""Completions: prefill each prompt once, then decode its G completions against that shared prefix.

A step of decoding costs a pass over the weights (`Policy.unstack` lays them apart once), the prompts' keys and values
once for their group, the filled part of the cache, and one draw. A policy is known by its functions (`prefill`,
`unstack`, `decode_step`, `init_cache`, `head`, `logits`): anything that offers them can be sampled.

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

# A step is compiled once more for each size of the cache and for half of the prompts: only where that pays.
_CACHE_STEP = 64  # tokens that are worth another size
_CACHE_SIZES = 4  # sizes at most
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
            what was said to it in between. None if the policy wrote all of it.
        turn: int32 [P, G, T] of an episode, the turn of each token from 0, or the one that it answers; or None.
        kept: int32 [P, G, T, top_k], the tokens each was drawn among (`Choice.kept`), -1 after the end; or None.
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
    """Allowed tokens and ends of a completion, as `make_sampler` takes them."""

    eos_ids: tuple[int, ...]
    pad_id: int
    allowed_tokens: np.ndarray | None = None
    stops: Array | None = None
    trie: Trie | None = None


class Loop(NamedTuple):
    """State of the decoding loop; every array begins with the axis of prompts."""

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
    place: jax.Array | None = None  # int32 [P, G], state among the stop strings; None without any
    node: jax.Array | None = None  # int32 [P, G], node in the tree of texts; None without
    kept: jax.Array | None = None  # int32 [P, G, T, top_k], the tokens that each was drawn among; None unless asked for

    @property
    def samples(self) -> Samples:
        """The completions so far."""
        ended = {"truncated": ~self.done, "kept": self.kept}
        return Samples(self.tokens, self.mask, self.logprobs, self.sampler_logprobs, **ended)


class PromptBatch(NamedTuple):
    """A bucket of prompts."""

    tokens: jax.Array  # int32 [P, L], padded on the left
    mask: jax.Array  # bool [P, L]
    keys: jax.Array  # typed PRNG keys [P]
    real: jax.Array  # bool [P], false for rows added as padding
    pictures: PictureStates | None  # what the vision tower made of the prompts' pictures


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
    """Make the function that writes completions.

    It is compiled once per bucket of shapes (P and L are rounded up by `bucket_size`, T is fixed) and stops as soon
    as every completion has ended. Random numbers of completion g at step t come from fold_in(fold_in(keys[p], g), t):
    they do not depend on the other prompts of the batch.

    Args:
        policy: Of `load_policy` or `Policy`, or anything with its functions.
        params: Group size, length and distribution.
        eos_ids: Tokens that end a completion; may be empty.
        pad_id: Token that fills prompts on the left and completions after their end.
        allowed_tokens: bool [V], the tokens that may be written at all; None for every token.
        stops: Stop strings as int32 [S, V] of `samplers.stop_table`, which end a completion with the token that
            completes one of them; None for none.
        trie: The texts of which each completion is one, in place of `allowed_tokens` and `stops`: at every token the
            policy's distribution is that over the children of its node (`core.trie`). None for any text.

    Returns:
        `sample(variables, prompt_tokens, prompt_mask, keys, pictures=None) -> Samples` with int [P, L], bool [P, L]
        (left-padded; on the host, or they are fetched), typed PRNG keys [P], one per prompt, and `PictureStates`
        [P, I, ..] of the prompts' pictures. It raises ValueError for prompts that are empty, not left-padded or too
        long for the policy's positions, and for keys of another kind.
    """
    ends = make_ends(eos_ids, pad_id, allowed_tokens)
    table = None if stops is None else jnp.asarray(stops)  # an argument: as a constant it would be in every program

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
    """Write completions of prompts as texts, by the policy's chat template if there is one.

    A second call with the same settings and numbers of prompts and tokens compiles nothing.

    Args:
        prompts: P texts.
        completions: G of each.
        max_new_tokens: Tokens after which a completion is cut.
        temperature: Divides the logits; 0 takes the most likely token.
        seed: Of the random numbers; those of a completion depend on it and on its prompt's place alone.
        **params: Other fields of `SamplingParams`, such as top_p.

    Returns:
        Texts `[P][G]`, special tokens left out.

    Raises:
        TypeError: There is no such field.
        ValueError: `prompts` is one text, there are none, or a field is out of range.
        UserError: A prompt cannot be encoded.
    """
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"prompts: expected a list of at least one text, got {prompts[:40]!r}")
    settings = SamplingParams(completions, max_new_tokens, temperature, **params)
    sample = _cached_sampler(policy, settings, eos_ids=tuple(policy.eos_ids), pad_id=policy.pad_id)
    tokens, mask = policy.encode(prompts)
    return policy.decode(sample(policy.variables, tokens, mask, jax.random.split(jax.random.key(seed), len(prompts))))


def bucket_size(n: int, smallest: int = 1) -> int:
    """Round n up to a multiple of `smallest`, a power of two, with never more than four sizes per doubling.

    A size depends on n alone, never on earlier calls, so that a resumed run computes in the same shapes.

    >>> [bucket_size(n) for n in (3, 8, 9, 17)], bucket_size(70, smallest=8)
    ([3, 8, 10, 20], 80)
    """
    multiple = max(smallest, 1 << max((n - 1).bit_length() - 3, 0))
    return -(-n // multiple) * multiple


def shares_of(policy: Policy) -> int:
    """Return the number of parts that prompts are shared out in."""
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
    """Prompts and their mask on the host, int32 and bool [P, L]; ValueError as of `make_sampler`."""
    tokens = np.asarray(prompt_tokens, np.int32)
    mask = np.asarray(prompt_mask, bool)
    # Other generators than threefry draw numbers that depend on the other rows.
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
    """Left-pad L and repeat the last prompt until both are bucket sizes, and P a multiple of `shares`.

    Also give the mask of real rows.
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
    """Repeat the last row of arrays [P, ..] until there are so many; None stays None."""
    return jax.tree.map(lambda x: jnp.take(x, np.minimum(np.arange(rows), len(x) - 1), axis=0), tree)


def make_ends(eos_ids: tuple[int, ...], pad_id: int, allowed_tokens: ArrayLike | None) -> Ends:
    """Ends of any text, with the allowed tokens as bool [V] on the host."""
    allowed = None if allowed_tokens is None else np.asarray(allowed_tokens)
    return Ends(tuple(int(i) for i in eos_ids), int(pad_id), allowed)


def write_completions(
    policy: Policy,
    params: SamplingParams,
    ends: Ends,
    variables: Variables,
    batch: PromptBatch,
) -> Loop:
    """The compiled part, once per bucket of shapes."""
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
    # The first token of all G completions comes from the prompt's last state: P rows of logits, not P·G.
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
    """The state before the first token, for keys [P, G]; completions that are `done`, [P] or [P, G], cost no step."""
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
    """Keys [P, G] of completions from the prompts' keys [P]."""
    return jax.vmap(lambda key: jax.vmap(lambda g: jax.random.fold_in(key, g))(jnp.arange(group)))(keys)


def _unfinished(loop: Loop) -> jax.Array:
    return jnp.sum(~jnp.all(loop.done, axis=1))


def run(step: Callable[[Loop], Loop], loop: Loop, until: int, halve: bool) -> Loop:
    """Step until so many tokens are written or all have ended; `halve` leaves out half of the prompts once it has."""
    if not halve:
        return _run(step, loop, until, 0)
    half = loop.done.shape[0] // 2
    loop = _run(step, loop, until, half)
    order = jnp.argsort(jnp.all(loop.done, axis=1), stable=True)[:half]
    few = jax.tree.map(lambda x: x[order] if x.ndim else x, loop)
    few = _run(step, few, jnp.where(_unfinished(loop) > half, 0, until), 0)
    return jax.tree.map(lambda x, part: x.at[order].set(part) if x.ndim else part, loop, few)


def _run(step: Callable[[Loop], Loop], loop: Loop, until: int | jax.Array, more_than: int) -> Loop:
    """Step while more than so many prompts go on; what is carried of the cache has no axes of one (`write_cache`)."""

    def slim(loop: Loop) -> Loop:
        return loop._replace(cache=jax.tree.map(jnp.squeeze, loop.cache))

    def whole(carried: Loop) -> Loop:
        return carried._replace(cache=jax.tree.map(lambda x, like: x.reshape(like.shape), carried.cache, loop.cache))

    def goes_on(carried: Loop) -> jax.Array:
        return (carried.step < until) & (_unfinished(carried) > more_than)

    return whole(lax.while_loop(goes_on, lambda carried: slim(step(whole(carried))), slim(loop)))


def halves(rows: int, length: int, ends: Ends) -> bool:
    """Whether half of the prompts may go on alone."""
    return (bool(ends.eos_ids) or ends.stops is not None or ends.trie is not None) and rows > 1 and length > _HALVING


def cache_sizes(length: int) -> list[int]:
    """Sizes the cache grows through until it holds `length` tokens; attention reads all of the current one.

    >>> cache_sizes(40), cache_sizes(200)
    ([40], [56, 112, 168, 200])
    """
    parts = -(-length // _CACHE_STEP)
    size = -(-length // min(parts, _CACHE_SIZES))
    size = -(-size // 8) * 8
    return [*range(size, length, size), length]


def move(cache: PyTree, larger: PyTree) -> PyTree:
    """Copy a cache to the beginning of a larger one."""
    return jax.tree.map(lambda part, room: lax.dynamic_update_slice(room, part, (0,) * part.ndim), cache, larger)


class Writer(NamedTuple):
    """Compiled parts of a sampler for one set of variables."""

    step: Callable[[Loop], Loop]  # decodes the last tokens and records the next
    # (loop, logits float32 [V, R]) -> the loop with a token chosen for every row
    record: Callable[[Loop, jax.Array], Loop]
    logits: Callable[[jax.Array], jax.Array]  # float32 [V, R] of states [R, D]
    unstacked: Variables  # the variables as `decode_step` takes them


def make_writer(
    policy: Policy, params: SamplingParams, ends: Ends, variables: Variables, dtype: jax.typing.DTypeLike
) -> Writer:
    """A sampler's parts for these variables; `dtype` is that of the states."""
    # Converted and unstacked here, not in the loop, where it would cost a pass over the weights for every token.
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
