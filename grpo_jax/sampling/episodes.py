"""Multi-turn completions: each observation is prefilled into the completion's own cache, and decoding continues.

The group shares the prompt's keys and values in all turns. A turn's first token needs one forward pass over the whole
observation (`Policy.extend`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from grpo_jax.models.attention import Cache, Prefix, RowState
from grpo_jax.models.policy import Policy
from grpo_jax.models.variables import PyTree, Variables, numbered
from grpo_jax.sampling.decoding import (
    Loop,
    PromptBatch,
    Samples,
    begin,
    decoding_weights,
    group_keys,
    half_of,
    make_ends,
    make_writer,
    move,
    run,
    write_completions,
)
from grpo_jax.sampling.sampler import bucket_size, checked_prompts, pad_rows, pad_to_bucket, shares_of
from grpo_jax.sampling.token_choice import SamplingParams


class Carried(NamedTuple):
    """State that one turn carries to the next, on the device; P may include padding rows."""

    prefix: Prefix  # the prompts
    cache: Cache  # KV cache of each completion without its last token
    last: jax.Array  # i32 [P, G], that token
    spoke: jax.Array  # bool [P, G], false if a completion has no token in this turn


class EpisodeSampler(NamedTuple):
    """The functions that sample completions turn by turn."""

    # the first turn, (variables, prompt_tokens [P, L], prompt_mask, keys [P], pictures=None) -> (Samples, Carried);
    # arguments as for `sampler.make_sampler`
    begin: Callable[..., tuple[Samples, Carried]]
    # the next turn, (variables, carried, tokens i32 [P, G, A], mask bool [P, G, A], keys [P], active bool [P, G],
    # pictures=None) -> (Samples, Carried), with new keys. `tokens` are the right-padded observations, and `pictures`
    # their `PictureStates` [P, G, I, ..], if any. Inactive completions get no tokens, and never become active again
    go_on: Callable[..., tuple[Samples, Carried]]


def make_episode_sampler(
    policy: Policy,
    params: SamplingParams,
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
    allowed_tokens: ArrayLike | None = None,
    stops: np.ndarray | None = None,
) -> EpisodeSampler:
    """Make the functions that sample episodes.

    Arguments are those of `make_sampler`; `max_new_tokens` is the length of a turn, which `eos_ids` and `stops` end.
    """
    alike = make_ends(eos_ids, pad_id, allowed_tokens)
    table = None if stops is None else jnp.asarray(stops)

    @jax.jit
    def first(stops: jax.Array | None, variables: Variables, *prompts: PyTree) -> tuple[Samples, Carried]:
        loop = write_completions(policy, params, alike._replace(stops=stops), variables, PromptBatch(*prompts))
        advance = jnp.repeat(loop.prefix.advance[:, None], params.group_size, 1)
        return loop.samples, _carried(loop, RowState(jnp.zeros((*loop.done.shape, 0), bool), advance))

    @jax.jit
    def further(stops, variables, carried, tokens, mask, keys, active, pictures) -> tuple[Samples, Carried]:
        ends = alike._replace(stops=stops)
        count, group = carried.last.shape
        length = params.max_new_tokens
        prefix = carried.prefix
        active = active & carried.spoke
        weights = decoding_weights(policy, variables, prefix.hidden.dtype)
        writer = make_writer(policy, params, ends, weights)
        tokens = jnp.concatenate([carried.last[..., None], tokens], axis=-1)
        mask = jnp.concatenate([active[..., None], mask & active[..., None]], axis=-1)
        size = carried.cache.keys[0].shape[-1] + tokens.shape[-1] + length
        cache = _grown(carried.cache, policy.init_cache(count, group, size))
        hidden, cache = policy.extend(weights.unstacked, prefix, tokens, mask, cache, pictures)
        assert cache.rows is not None
        rows = cache.rows
        loop = begin(prefix, group_keys(keys, group), ~active, params, ends, cache)
        loop = writer.record(loop, writer.logits(hidden.reshape(count * group, -1)))
        loop = run(writer.step, loop, length, half_of(count, length, ends))
        return loop.samples, _carried(loop, RowState(rows.mask[..., : size - length], rows.advance))

    def start(variables, prompt_tokens, prompt_mask, keys, pictures=None) -> tuple[Samples, Carried]:
        tokens, mask = checked_prompts(policy, prompt_tokens, prompt_mask, keys, params.max_new_tokens)
        padded = pad_to_bucket(tokens, mask, keys, alike.pad_id, shares=shares_of(policy))
        samples, carried = first(table, numbered(variables), *padded, pad_rows(pictures, len(padded[0])))
        return jax.tree.map(lambda x: x[: len(tokens)], samples), carried

    def go_on(variables, carried, tokens, mask, keys, active, pictures=None) -> tuple[Samples, Carried]:
        tokens, mask, active = np.asarray(tokens, np.int32), np.asarray(mask, bool), np.asarray(active, bool)
        more = carried.last.shape[0] - len(tokens)
        longer = bucket_size(tokens.shape[-1], smallest=8) - tokens.shape[-1]
        padded = [np.pad(array, ((0, more), (0, 0), (0, longer))) for array in (tokens, mask)]
        keys, pictures = (pad_rows(tree, len(tokens) + more) for tree in (keys, pictures))
        active = np.pad(active, ((0, more), (0, 0)))
        samples, carried = further(table, numbered(variables), carried, *padded, keys, active, pictures)
        return jax.tree.map(lambda x: x[: len(tokens)], samples), carried

    return EpisodeSampler(start, go_on)


def _carried(loop: Loop, rows: RowState) -> Carried:
    written = loop.mask.sum(-1, dtype=jnp.int32)
    read = jnp.maximum(written - 1, 0)
    read_mask = jnp.arange(loop.mask.shape[-1]) < read[..., None]
    rows = RowState(jnp.concatenate([rows.mask, read_mask], axis=-1), rows.advance + read)
    last = jnp.take_along_axis(loop.tokens, read[..., None], axis=-1)[..., 0]
    size = jnp.int32(rows.mask.shape[-1])
    return Carried(loop.prefix, loop.cache._replace(length=size, rows=rows), last, written > 0)


def _grown(cache: Cache, larger: Cache) -> Cache:
    assert cache.rows is not None
    rows = cache.rows
    keys, values = move((cache.keys, cache.values), (larger.keys, larger.values))
    room = jnp.zeros((*rows.mask.shape[:2], keys[0].shape[-1]), bool)
    return Cache(keys, values, cache.length, RowState(move(rows.mask, room), rows.advance))
