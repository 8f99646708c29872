"""The log-probability of every text of a catalogue, exactly: each node of the tree is decoded once, not each text.

For catalogues whose tree fits into a cache: the widest level holds keys and values of P · n whole paths. Where it does
not, `beams` finds the best texts alone. Where only one text is left to go on with, its further tokens are certain, and
nothing is decoded for them. Axes: P prompts, I numbers of texts, n nodes of a level that go on, e edges below them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core.logprobs import capped
from grpo_jax.core.trie import Trie
from grpo_jax.models.cache import Cache


class Level(NamedTuple):
    """What lies between two levels of a tree, on the host.

    Attributes:
        parent: int [e], which of the level's n nodes an edge starts from.
        token: int [e].
        texts: int [e], the only text below an edge; -1 where there are several and it goes on.
        inner: int [n'], the edges that go on: the nodes of the next level.
    """

    parent: np.ndarray
    token: np.ndarray
    texts: np.ndarray
    inner: np.ndarray


def levels_of(trie: Trie) -> list[Level]:
    """A tree from the root down, each branch as far as its texts differ."""
    first, token, text = (np.asarray(x) for x in (trie.first, trie.token, trie.text))
    only = _only_texts(first, text)
    nodes, levels = np.zeros(1, int), []
    while len(nodes):
        counts = first[nodes + 1] - first[nodes]
        edges = np.concatenate([np.arange(int(first[node]), int(first[node + 1])) for node in nodes])
        texts = only[edges + 1]
        inner = np.flatnonzero(texts < 0)
        levels.append(Level(np.repeat(np.arange(len(nodes)), counts), token[edges], texts, inner))
        nodes = edges[inner] + 1
    return levels


def _only_texts(first: np.ndarray, text: np.ndarray) -> np.ndarray:
    """The one text at or below each node, int [n]; -1 where there are several."""
    only, counts = text.copy(), np.diff(first)
    for node in reversed(np.flatnonzero(counts == 1).tolist()):  # children are numbered behind their parents
        only[node] = only[first[node] + 1]
    return only


def numbers_of(policy, levels: list[Level]) -> int:
    """How many numbers `make_scores` holds for one prompt: its first logits, or keys and values of the widest level."""
    cache = jax.eval_shape(lambda: policy.init_cache(1, 1, max(len(levels) - 1, 1)))
    below = max((len(level.token) for level in levels[1:]), default=0)
    return max(len(levels[0].token), below * sum(part.size for part in jax.tree.leaves(cache)))


def make_scores(policy, levels: list[Level], *, temperature: float = 1.0) -> Callable[..., jax.Array]:
    """Make the function that scores every text after every prompt, to be called inside of a compiled one.

        score(text) = Σ_t log p(token_t | prompt, tokens before it), p over the tokens that may follow in the tree

    The scores' exponentials sum to 1 for each prompt.

    Args:
        policy: Has `prefill`, `unstack`, `decode`, `init_cache` and `head`; see `grpo_jax.models.decoder.Policy`.
        levels: The tree of the texts.
        temperature: Divides the logits; 0 counts as 1.

    Returns:
        `score(variables, prompts, mask, pictures) -> float32 [P, I]`; -inf for a number that is no text of the tree.
    """
    numbers, scale = 1 + max(int(level.texts.max()) for level in levels), temperature or 1.0
    softcap = getattr(policy, "softcap", None)

    def score(variables, prompts, mask, pictures) -> jax.Array:
        prefix = policy.prefill(variables, prompts, mask, *(() if pictures is None else (pictures,)))
        head, unstacked = policy.head(variables).astype(prefix.hidden.dtype), policy.unstack(variables)
        hidden, total = prefix.hidden[:, None], jnp.zeros((len(prompts), 1), jnp.float32)
        found = jnp.full((len(prompts), numbers), -jnp.inf, jnp.float32)
        cache = policy.init_cache(len(prompts), 1, max(len(levels) - 1, 1))
        for depth, level in enumerate(levels):
            logs = total[:, level.parent] + _edge_logprobs(hidden, head, level, scale, softcap)
            ended = np.flatnonzero(level.texts >= 0)
            found = found.at[:, level.texts[ended]].set(logs[:, ended])
            if depth + 1 < len(levels):
                total, tokens = logs[:, level.inner], jnp.asarray(level.token[level.inner], jnp.int32)
                cache = _of_parents(cache, level.parent[level.inner])
                hidden, cache = policy.decode(unstacked, prefix, jnp.broadcast_to(tokens, total.shape), cache)
        return found

    return score


def _edge_logprobs(hidden: jax.Array, head: jax.Array, level: Level, scale: float, softcap: float | None) -> jax.Array:
    """Of each edge given its node, float32 [P, e], from the nodes' states [P, n, D]."""
    nodes = hidden.shape[1]
    if nodes == 1:
        logits = jnp.einsum("pd,ed->pe", hidden[:, 0], head[level.token], preferred_element_type=jnp.float32)
    else:
        states = hidden[:, level.parent]
        logits = jnp.einsum("ped,ed->pe", states, head[level.token], preferred_element_type=jnp.float32)
    logits = (capped(logits, softcap) / scale).T
    largest = jax.ops.segment_max(logits, level.parent, nodes)
    mass = jax.ops.segment_sum(jnp.exp(logits - largest[level.parent]), level.parent, nodes)
    return (logits - (largest + jnp.log(mass))[level.parent]).T


def _of_parents(cache: Cache, parents: np.ndarray) -> Cache:
    """A place for each node of the next level, with what its parent's path holds: [P, K, n, ..] to [P, K, n', ..]."""
    keys, values = (tuple(part[:, :, parents] for part in parts) for parts in (cache.keys, cache.values))
    return cache._replace(keys=keys, values=values)
