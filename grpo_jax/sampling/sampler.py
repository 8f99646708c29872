"""Sample completions of prompts by programs for buckets of shapes, each compiled when first needed.

Axes as in `decoding`: P prompts, G completions of a prompt, L prompt tokens, T completion tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from grpo_jax.core.trie import Trie
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import FSDP
from grpo_jax.models.variables import PyTree, Variables, numbered
from grpo_jax.sampling.decoding import (
    Ends,
    Loop,
    PromptBatch,
    Samples,
    Weights,
    begin_completions,
    cache_sizes,
    make_ends,
    make_writer,
    move,
    row_counts,
    rows_of,
    run_until,
    unfinished_rows,
    write_completions,
)
from grpo_jax.sampling.token_choice import SamplingParams


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
    completion has ended. Each size of the cache, and each of `row_counts`, has a program that is compiled when first
    needed; a mesh has one program. Random numbers of completion g at step t come from
    fold_in(fold_in(keys[p], g), t). They do not depend on the other prompts of the batch.

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
    alike = make_ends(eos_ids, pad_id, allowed_tokens)
    limits = None if stops is None else jnp.asarray(stops), trie  # arguments, not constants in every program
    sizes = cache_sizes(params.max_new_tokens)

    def ends(limits: tuple[jax.Array | None, Trie | None]) -> Ends:
        return alike._replace(stops=limits[0], trie=limits[1])

    def advance(limits, weights: Weights, loop: Loop, until: int, above: int) -> State:
        step = make_writer(policy, params, ends(limits), weights).step
        loop = run_until(step, loop, until, above, unfinished_rows)
        return State(loop.samples, loop, unfinished_rows(loop))

    @jax.jit
    def start(limits, variables: Variables, *prompts: PyTree) -> tuple[State, Weights]:
        batch = PromptBatch(*prompts)
        loop, weights = begin_completions(policy, params, ends(limits), variables, batch)
        counts = row_counts(batch.tokens.shape, params, ends(limits))
        return advance(limits, weights, loop, sizes[0], max(counts, default=0)), weights

    go_on = jax.jit(advance, static_argnames=("until", "above"), donate_argnames="loop")

    @jax.jit
    def write(limits, variables: Variables, *prompts: PyTree) -> Samples:
        return write_completions(policy, params, ends(limits), variables, PromptBatch(*prompts)).samples

    def sample(variables: Variables, *prompts: PyTree) -> Samples:
        counts = row_counts(prompts[0].shape, params, ends(limits))
        # Tracing cannot tell how many completions continue.
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(variables))
        if traced or getattr(policy, "mesh", None) is not None or (len(sizes) == 1 and not counts):
            return write(limits, variables, *prompts)
        state, weights = start(limits, variables, *prompts)
        return decode_on(policy, state, sizes, counts, functools.partial(go_on, limits, weights))

    return over_buckets(sample, policy, alike.pad_id, params.max_new_tokens)


class State(NamedTuple):
    """Result of a program of the decoding loop."""

    samples: Samples
    loop: Loop
    left: jax.Array  # int32, the completions that continue


def decode_on(
    policy: Policy, state: State, sizes: Sequence[int], counts: Sequence[int], go_on: Callable[..., State]
) -> Samples:
    """Decode to the end, in caches of these sizes, and with fewer rows (`row_counts`) as completions end."""
    everyone, index = state.samples, None
    size, *larger = sizes
    while left := int(state.left):
        loop = state.loop
        if rows := min((count for count in counts if count >= left), default=0):
            counts = [count for count in counts if count < rows]
            order = _unfinished_first(loop.done, rows)
            everyone = _merged(everyone, index, state.samples)
            index = order if index is None else index[order]
            cache = _one_by_one(functools.partial(_cache_rows, order=order), loop.cache)
            loop = _loop_rows(loop._replace(cache=()), order)._replace(cache=cache)
        elif larger:
            size = larger.pop(0)
            shapes = jax.eval_shape(functools.partial(policy.init_cache, *loop.done.shape, size))
            loop = loop._replace(cache=_one_by_one(_enlarged, loop.cache, shapes))
        else:
            break
        state = go_on(loop, until=size, above=max(counts, default=0))
    return _merged(everyone, index, state.samples)


def _one_by_one(change: Callable[..., jax.Array], cache: PyTree, *shapes: PyTree) -> PyTree:
    """Change a cache's arrays one after the other and free each, so that two caches are never held."""

    def changed(array: jax.Array, *shape: jax.ShapeDtypeStruct) -> jax.Array:
        if not array.ndim:
            return array
        new = change(array, *shape)
        array.delete()
        return new

    return jax.tree.map(changed, cache, *shapes)


def _take(array: jax.Array, order: jax.Array) -> jax.Array:
    """Return the rows `order` of P · G of an array [P, G, ..], as [R, 1, ..]."""
    return array.reshape(-1, *array.shape[2:])[order][:, None]


@functools.partial(jax.jit, static_argnums=1)
def _unfinished_first(done: jax.Array, rows: int) -> jax.Array:
    return jnp.argsort(done.reshape(-1), stable=True)[:rows]


@jax.jit
def _loop_rows(loop: Loop, order: jax.Array) -> Loop:
    """Return the rows of a loop without its cache; each is a prompt with one completion."""
    taken = jax.tree.map(lambda x: _take(x, order), loop._replace(prefix=(), step=()))
    return taken._replace(prefix=rows_of(loop.prefix, order // loop.done.shape[1]), step=loop.step)


@jax.jit
def _cache_rows(array: jax.Array, order: jax.Array) -> jax.Array:
    """Return the rows of a layer's cache [P, K, G, ..]."""
    return jnp.moveaxis(_take(jnp.moveaxis(array, 2, 1), order), 1, 2)


@jax.jit
def _merged(everyone: Samples, index: jax.Array | None, samples: Samples) -> Samples:
    """Put the samples of rows `index`, or of all, in their places."""
    if index is None:
        return samples
    return jax.tree.map(
        lambda x, few: x.reshape(-1, *x.shape[2:]).at[index].set(few[:, 0]).reshape(x.shape), everyone, samples
    )


_enlarged = jax.jit(lambda array, shape: move(array, jnp.zeros(shape.shape, shape.dtype)), static_argnums=1)


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

    A second call with the same settings and numbers of prompts and tokens compiles only what longer completions need.

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
        return samples if len(padded[0]) == len(tokens) else _first_rows(samples, len(tokens))

    return sample


@functools.partial(jax.jit, static_argnums=1)
def _first_rows(tree: PyTree, rows: int) -> PyTree:
    return jax.tree.map(lambda x: x[:rows], tree)


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
    getattr(policy, "check_room", lambda *_: None)("prompts", mask, length)
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
        keys = pad_rows(keys, rows + more_rows)
    return tokens, mask, keys, np.arange(rows + more_rows) < rows


def pad_rows(tree: PyTree, rows: int) -> PyTree:
    """Repeat the last row of arrays [P, ..] up to `rows` rows; None stays None."""
    return None if tree is None else _pad_rows(tree, rows)


@functools.partial(jax.jit, static_argnums=1)
def _pad_rows(tree: PyTree, rows: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.take(x, np.minimum(np.arange(rows), len(x) - 1), axis=0), tree)
