"""The G best texts of a catalogue for each prompt, or G drawn without replacement: beams over the tree of its texts.

A beam is a path from the root; each step extends all of a prompt's and keeps G. The G most likely texts are found if
none of them left the beams on its way. With a Gumbel number for each path that agrees with its parent's, the same
search draws G distinct texts without replacement (Kool, van Hoof & Welling 2019, https://arxiv.org/abs/1903.06059).

Axes: P prompts, G beams that are kept of B, T tokens, V vocabulary, C candidates of a beam.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from grpo_jax.core.trie import (
    NARROW,
    ROOT,
    Trie,
    children,
    depth_of,
    follow,
    narrow_children,
    text_count,
    widest_below,
)
from grpo_jax.models.cache import of_paths
from grpo_jax.models.policy import Policy
from grpo_jax.sampling.sampler import Samples, over_buckets
from grpo_jax.sampling.token_choice import SamplingParams


class Beams(NamedTuple):
    """The paths that are kept, best first."""

    node: jax.Array  # int32 [P, G], where each stands in the tree
    total: jax.Array  # float32 [P, G], its log-probability; -inf for a beam that is not used yet
    rank: jax.Array  # float32 [P, G], what paths are kept by: `total`, or that with its noise
    tokens: jax.Array  # int32 [P, G, T]
    mask: jax.Array  # bool [P, G, T], its tokens
    logprobs: jax.Array  # float32 [P, G, T]


def make_beam_sampler(
    policy: Policy, params: SamplingParams, *, pad_id: int, trie: Trie, without_replacement: bool = False
) -> Callable[..., Samples]:
    """Make the function that writes the G best texts of a tree, in falling order, or draws G distinct ones.

    Of `params` only group size, length (at least the longest text's tokens) and temperature count, which divides the
    logits (0 counts as 1). With `without_replacement` the first text is a sample of the policy, each further one a
    sample of it among the texts not drawn yet, in this order. Log-probabilities are the policy's over the tree,
    `weights` those of `inclusion_weights`.
    """
    check_group(trie, params.group_size)
    length = params.max_new_tokens
    if depth_of(trie) > length:
        raise ValueError(f"max_new_tokens must be at least {depth_of(trie)}, the longest text's tokens, got {length}")
    search = make_search(policy, params, pad_id=pad_id, trie=trie)

    @jax.jit
    def write(trie, variables, prompts, mask, keys, real, pictures) -> Samples:
        beams = search(trie, variables, prompts, mask, keys if without_replacement else None, pictures)
        truncated = trie.text[beams.node] < 0
        # Behind the last step's number, so that these draws are none of the search's.
        apart = jax.vmap(lambda key: jax.random.fold_in(key, length))(keys) if without_replacement else None
        weights = inclusion_weights(beams.total, beams.rank, apart)
        return Samples(beams.tokens, beams.mask, beams.logprobs, beams.logprobs, truncated, weights=weights)

    return over_buckets(functools.partial(write, trie), policy, pad_id, depth_of(trie))


def inclusion_weights(logprobs: jax.Array, rank: jax.Array, keys: jax.Array | None) -> jax.Array:
    """Probability of each text over that of being found, float32 [P, G]: with it sums over a group estimate means.

    Beams (`keys` None) are found for certain: a sum over them lacks the probability of all other texts, and is exact
    where there are none. Of texts that are drawn without replacement, all but the last are those above the last one's
    noisy log-probability κ, each by 1 - exp(-exp(log π - κ)); the last, of weight 0, is spent on κ, and the sum is
    unbiased (Kool, van Hoof & Welling 2019, section 4.1; after Vieira 2017, and Duffield, Lund & Thorup 2007).

    `logprobs` are log π, `rank` the falling values by which texts were found in a search whose root has rank 0, both
    float32 [P, G]; `keys` typed keys [P] that the search has not used.
    """
    probabilities = jnp.exp(logprobs)
    if keys is None:
        return probabilities
    # exp(-κ) is the time of the last of G arrivals at rates π. The root's rank sets that of the first to 1, where it is
    # exponential and knows nothing of what comes when after it.
    first = jax.vmap(lambda key: jax.random.exponential(key, (1,)))(keys)
    expected = probabilities * (jnp.expm1(-rank[:, -1:]) + first)
    weights = jnp.where(expected > 0, probabilities / -jnp.expm1(-expected), 0)
    return weights.at[:, -1].set(0)


def check_group(trie: Trie, group: int) -> None:
    """Raise ValueError for a group that is larger than the tree."""
    if text_count(trie) < group:
        raise ValueError(f"group_size must be at most {text_count(trie)}, the texts of the tree, got {group}")


def make_search(policy: Policy, params: SamplingParams, *, pad_id: int, trie: Trie) -> Callable[..., Beams]:
    """search(trie, variables, prompts, mask, keys or None, pictures) → `Beams`, inside of a compiled function."""
    depth = depth_of(trie)
    group = params.group_size
    temperature = params.temperature or 1.0
    wide = widest_below(trie) > NARROW

    def search(trie, variables, prompts, mask, keys, pictures) -> Beams:
        prefix = policy.prefill(variables, prompts, mask, *(() if pictures is None else (pictures,)))
        head = policy.head(variables).astype(prefix.hidden.dtype)
        unstacked = policy.unstack(variables)
        if head.shape[0] != trie.vocab_size:
            raise ValueError(f"trie must be of the policy's vocabulary of {head.shape[0]}, got {trie.vocab_size}")

        def extend(index: jax.Array, beams: Beams, hidden: jax.Array, wide: bool) -> tuple[Beams, jax.Array]:
            candidates_of = every_token if wide else listed_children
            candidates = candidates_of(policy.logits, trie, beams.node, hidden, head)
            candidates = candidates._replace(logits=candidates.logits / temperature)
            step_keys = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, index))(keys)
            return extend_beams(trie, beams, candidates, index, step_keys, group=group, pad_id=pad_id)

        def step(carry):
            index, beams, cache = carry
            last = lax.dynamic_index_in_dim(beams.tokens, index - 1, axis=2, keepdims=False)
            hidden, cache = policy.decode_step(unstacked, prefix, last, cache)
            beams, parents = extend(index, beams, hidden, wide)
            return index + 1, beams, of_paths(cache, parents)

        def unfinished(carry):
            index, beams, _ = carry
            return (index < depth) & (trie.text[beams.node] < 0).any()

        root = _root(len(prompts), pad_id, params.max_new_tokens)
        beams, _ = extend(jnp.int32(0), root, prefix.hidden[:, None], True)
        cache = policy.init_cache(len(prompts), group, max(depth - 1, 1))
        return lax.while_loop(unfinished, step, (jnp.int32(1), _widened(beams, group), cache))[1]

    return search


class Candidates(NamedTuple):
    """Tokens int32 that may follow each beam, logits float32, and the mask of those that exist, each [P, B, C]."""

    tokens: jax.Array
    logits: jax.Array
    exists: jax.Array


def every_token(
    logits_of: Callable[..., jax.Array], trie: Trie, nodes: jax.Array, hidden: jax.Array, head: jax.Array
) -> Candidates:
    """The whole vocabulary, C = V, for nodes [P, B] and states [P, B, D]."""
    logits = logits_of("vd,rd->vr", head, hidden.reshape(-1, hidden.shape[-1])).T.reshape(*nodes.shape, -1)
    tokens = jnp.broadcast_to(jnp.arange(trie.vocab_size, dtype=jnp.int32), logits.shape)
    return Candidates(tokens, logits, children(trie, nodes))


def listed_children(
    logits_of: Callable[..., jax.Array], trie: Trie, nodes: jax.Array, hidden: jax.Array, head: jax.Array
) -> Candidates:
    """The children of narrow nodes alone, C = `NARROW`: the head's other rows are not read."""
    tokens, exists = narrow_children(trie, nodes)
    rows = head[jnp.where(exists, tokens, 0)]
    return Candidates(tokens, logits_of("pbd,pbcd->pbc", hidden, rows), exists)


def extend_beams(
    trie: Trie,
    beams: Beams,
    candidates: Candidates,
    index: jax.Array,
    keys: jax.Array | None,
    *,
    group: int,
    pad_id: int,
) -> tuple[Beams, jax.Array]:
    """Extend by a token: the best `group` paths, and the beam that each came from, int32 [P, group].

    Whole texts stay as they are and go on with `pad_id`; there are fewer paths where there are fewer extensions. With
    typed `keys` [P] paths are drawn without replacement; with None they are the most likely ones. `index` is the
    place of the next token.
    """
    whole = trie.text[beams.node] >= 0
    exists, size = candidates.exists, candidates.exists.shape[-1]
    logits = jnp.where(exists, candidates.logits.astype(jnp.float32), -jnp.inf)
    steps = logits - jnp.where(exists.any(-1), jax.nn.logsumexp(logits, axis=-1), 0)[..., None]
    stays = jnp.where(jnp.arange(size) == 0, 0.0, -jnp.inf)  # a whole text's only extension is itself
    steps = jnp.where(whole[..., None], stays, steps)
    total = beams.total[..., None] + steps
    rank = total if keys is None else _with_noise(total, beams.rank, keys)

    some = min(group, size)
    best, picks = lax.top_k(rank, some)
    rank, place = lax.top_k(best.reshape(len(best), -1), min(group, best.shape[1] * some))
    parents = (place // some).astype(jnp.int32)
    picks = jnp.take_along_axis(picks.reshape(len(picks), -1), place, axis=1)

    def of_parent(values: jax.Array) -> jax.Array:
        return jax.vmap(lambda rows, chosen: rows[chosen])(values, parents)

    def picked(values: jax.Array) -> jax.Array:
        return jax.vmap(lambda rows, chosen, at: rows[chosen, at])(values, parents, picks)

    whole = of_parent(whole)
    node = of_parent(beams.node)
    tokens = picked(candidates.tokens)
    at = (..., index)
    best_beams = Beams(
        node=jnp.where(whole, node, follow(trie, node, tokens)),
        total=picked(total),
        rank=rank,
        tokens=of_parent(beams.tokens).at[at].set(jnp.where(whole, pad_id, tokens)),
        mask=of_parent(beams.mask).at[at].set(~whole),
        logprobs=of_parent(beams.logprobs).at[at].set(jnp.where(whole, 0.0, picked(steps))),
    )
    return best_beams, parents


def _root(prompts: int, pad_id: int, length: int) -> Beams:
    one, slab = jnp.zeros((prompts, 1), jnp.float32), (prompts, 1, length)
    node = jnp.full((prompts, 1), ROOT, jnp.int32)
    return Beams(node, one, one, jnp.full(slab, pad_id, jnp.int32), jnp.zeros(slab, bool), jnp.zeros(slab, jnp.float32))


def _widened(beams: Beams, group: int) -> Beams:
    """Fill up to `group` with unused beams after the first step, where the root has fewer children."""
    more = group - beams.total.shape[1]
    grown = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)), mode="edge"), beams)
    unused = jnp.arange(group) >= group - more
    return grown._replace(total=jnp.where(unused, -jnp.inf, grown.total), rank=jnp.where(unused, -jnp.inf, grown.rank))


def _with_noise(total: jax.Array, rank: jax.Array, keys: jax.Array) -> jax.Array:
    """Gumbel numbers of all extensions [P, B, V]; the largest of a beam is its own (Kool et al., appendix B)."""
    drawn = total + jax.vmap(lambda key: jax.random.gumbel(key, total.shape[1:]))(keys)
    exists = jnp.isfinite(total)
    drawn = jnp.where(exists, drawn, -jnp.inf)
    largest = jnp.max(drawn, axis=-1, keepdims=True)
    below = jnp.where(exists, drawn - jnp.where(jnp.isfinite(largest), largest, 0), -1.0)
    rank = jnp.where(jnp.isfinite(rank), rank, 0)[..., None]
    excess = rank - jnp.where(exists, drawn, 0) + jnp.log(-jnp.expm1(below))
    return jnp.where(exists, rank - jnp.maximum(excess, 0) - jnp.log1p(jnp.exp(-jnp.abs(excess))), -jnp.inf)
