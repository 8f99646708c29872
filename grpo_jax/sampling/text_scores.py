"""The log-probability of every text of a catalogue, exactly: each node of the tree is decoded once, not each text.

For catalogues whose tree fits into a cache: the widest level holds keys and values of P · n whole paths. Where it does
not, `beams` finds the best texts alone. Axes: P prompts, I texts, n nodes of a level that go on, e edges below them.
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
from grpo_jax.sampling.sampler import check_prompts, check_room, pad_rows, pad_to_bucket


class Level(NamedTuple):
    """What lies between two levels of a tree, on the host.

    Attributes:
        parent: int [e], which of the level's n nodes an edge starts from.
        token: int [e].
        texts: int [e], the text that ends below an edge; -1 where it goes on.
        inner: int [n'], the edges that go on: the nodes of the next level.
    """

    parent: np.ndarray
    token: np.ndarray
    texts: np.ndarray
    inner: np.ndarray


def levels_of(trie: Trie) -> list[Level]:
    """A tree from the root down."""
    first, token, text = (np.asarray(x) for x in (trie.first, trie.token, trie.text))
    nodes, levels = np.zeros(1, int), []
    while len(nodes):
        counts = first[nodes + 1] - first[nodes]
        edges = np.concatenate([np.arange(int(first[node]), int(first[node + 1])) for node in nodes])
        texts = text[edges + 1]
        inner = np.flatnonzero(texts < 0)
        levels.append(Level(np.repeat(np.arange(len(nodes)), counts), token[edges], texts, inner))
        nodes = edges[inner] + 1
    return levels


def make_scorer(policy, trie: Trie, *, pad_id: int, temperature: float = 1.0) -> Callable[..., jax.Array]:
    """Make the function that scores every text after every prompt.

        score(text) = Σ_t log p(token_t | prompt, tokens before it), p over the tokens that may follow in the tree

    The scores' exponentials sum to 1 for each prompt.

    Args:
        policy: Has `prefill`, `unstack`, `decode`, `init_cache` and `head`; see `grpo_jax.models.decoder.Policy`.
        trie: The texts.
        pad_id: Token that fills prompts up.
        temperature: Divides the logits; 0 counts as 1.

    Returns:
        `score(variables, prompt_tokens, prompt_mask, pictures=None) -> float32 [P, I]`, arguments as of `make_sampler`;
        compiled once for each bucket of shapes.
    """
    levels, texts, scale = levels_of(trie), int(np.asarray(trie.text).max()) + 1, temperature or 1.0
    softcap = getattr(policy, "softcap", None)

    @jax.jit
    def score(variables, prompts, mask, pictures):
        prefix = policy.prefill(variables, prompts, mask, *(() if pictures is None else (pictures,)))
        head, unstacked = policy.head(variables).astype(prefix.hidden.dtype), policy.unstack(variables)
        hidden, total = prefix.hidden[:, None], jnp.zeros((len(prompts), 1), jnp.float32)
        found = jnp.zeros((len(prompts), texts), jnp.float32)
        cache = policy.init_cache(len(prompts), 1, max(len(levels) - 1, 1))
        for depth, level in enumerate(levels):
            logs = total[:, level.parent] + _edge_logprobs(hidden, head, level, scale, softcap)
            ended = np.flatnonzero(level.texts >= 0)
            found = found.at[:, level.texts[ended]].set(logs[:, ended])
            if depth + 1 == len(levels):
                return found
            total, tokens = logs[:, level.inner], jnp.asarray(level.token[level.inner], jnp.int32)
            cache = _of_parents(cache, level.parent[level.inner])
            hidden, cache = policy.decode(unstacked, prefix, jnp.broadcast_to(tokens, total.shape), cache)
        return found

    def scored(variables, prompt_tokens, prompt_mask, pictures=None):
        tokens, mask = np.asarray(prompt_tokens, np.int32), np.asarray(prompt_mask, bool)
        keys = jax.random.split(jax.random.key(0), len(tokens))  # not drawn from
        check_prompts(tokens, mask, keys)
        check_room(getattr(policy, "max_positions", None), mask, len(levels))
        padded, shown, _, real = pad_to_bucket(tokens, mask, keys, pad_id)
        return score(variables, padded, shown, pad_rows(pictures, len(real)))[: len(tokens)]

    return scored


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
