"""Rank a catalogue's texts for each prompt by the policy's exact log-probabilities.

Each node of the trie is decoded once, not each text. The trie must fit into a KV cache: its widest level holds keys and
values of P · n whole paths. Once only one text remains, its further tokens are certain and are not decoded.

Axes: P prompts, K texts, I text indices, n inner nodes of a level, e edges below them. A stage has S levels, padded to
N nodes and E edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from grpo_jax.core.trie import Trie, depth_of
from grpo_jax.models.attention import Cache, of_paths
from grpo_jax.models.policy import Policy
from grpo_jax.sampling.decoding import Array, move
from grpo_jax.sampling.sampler import checked_prompts, over_buckets

# Limits of the numbers, and of the prompts, that a ranking holds at once.
_MOST_NUMBERS = 2**25
_MOST_PROMPTS = 256


class Ranking(NamedTuple):
    """All texts for each prompt, best first."""

    texts: Array  # int32 [P, K], indices of the trie's texts
    scores: Array  # float32 [P, K], their log-probabilities


def make_ranker(policy: Policy, *, pad_id: int, trie: Trie, temperature: float = 1.0) -> Callable[..., Ranking]:
    """Make rank(variables, prompt_tokens, prompt_mask, pictures=None) -> Ranking, in parts of bounded memory."""
    levels, count = levels_of(trie), int((np.asarray(trie.text) >= 0).sum())
    score = make_scores(policy, levels, temperature)

    @jax.jit
    def rank_bucket(variables, prompts, mask, keys, real, pictures) -> Ranking:
        scores = score(variables, prompts, mask, pictures)
        order = jnp.argsort(-scores, axis=1, stable=True)[:, :count]  # unused indices come last
        return Ranking(order.astype(jnp.int32), jnp.take_along_axis(scores, order, axis=1))

    rank_some = over_buckets(rank_bucket, policy, pad_id, depth_of(trie))
    most = max(1, min(_MOST_PROMPTS, _MOST_NUMBERS // numbers_of(policy, levels)))

    def rank(variables, prompt_tokens, prompt_mask, pictures=None) -> Ranking:
        keys = jax.random.split(jax.random.key(0), len(prompt_tokens))  # unused: ranking samples nothing
        tokens, mask = checked_prompts(policy, prompt_tokens, prompt_mask, keys, depth_of(trie))
        parts = []
        for start in range(0, len(keys), most):
            part = slice(start, start + most)
            some_pictures = jax.tree.map(lambda x, part=part: x[part], pictures)
            parts.append(rank_some(variables, tokens[part], mask[part], keys[part], some_pictures))
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    return rank


class Level(NamedTuple):
    """The edges between two levels of a trie, on the host."""

    parent: np.ndarray  # int [e], index of each edge's start among the level's n nodes
    token: np.ndarray  # int [e]
    texts: np.ndarray  # int [e], the only text below an edge; -1 if there are several
    inner: np.ndarray  # int [n'], the edges with several texts below: the nodes of the next level


def levels_of(trie: Trie) -> list[Level]:
    """Return the levels of a trie from the root, each branch until only one text remains."""
    first, token, text = (np.asarray(x) for x in (trie.first, trie.token, trie.text))
    only = _only_texts(first, text)
    nodes = np.zeros(1, int)
    levels = []
    while len(nodes):
        counts = first[nodes + 1] - first[nodes]
        edges = np.concatenate([np.arange(int(first[node]), int(first[node + 1])) for node in nodes])
        texts = only[edges + 1]
        inner = np.flatnonzero(texts < 0)
        levels.append(Level(np.repeat(np.arange(len(nodes)), counts), token[edges], texts, inner))
        nodes = edges[inner] + 1
    return levels


def _only_texts(first: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Return the only text at or below each node, int [n]; -1 if there are several."""
    only = text.copy()
    for node in reversed(np.flatnonzero(np.diff(first) == 1).tolist()):  # children have higher numbers than parents
        only[node] = only[first[node] + 1]
    return only


class Stage(NamedTuple):
    """Levels of similar width after the first, padded to one shape so that a loop can run over them."""

    origin: np.ndarray  # int [S, N], each node's parent among the nodes of the previous level
    written: np.ndarray  # int [S, N], the token that leads to the node
    parent: np.ndarray  # int [S, E], the node that an edge starts from; N for padding
    token: np.ndarray  # int [S, E]
    # int [S, E], the text that an edge leads to; the number of texts for inner edges and padding
    texts: np.ndarray
    inner: np.ndarray  # int [S, N], the inner edges
    depth: int  # tokens of a path after the last level

    @property
    def nodes(self) -> int:
        """Return N."""
        return self.origin.shape[1]


def stages_of(levels: list[Level], numbers: int) -> list[Stage]:
    """Group the levels after the first into few stages: one program per level would compile for minutes."""
    stages, start = [], 1
    while start < len(levels):
        end = next((d for d in range(start, len(levels)) if _width(levels[d]) != _width(levels[start])), len(levels))
        stages.append(_stage(levels, start, end, numbers))
        start = end
    return stages


def _width(level: Level) -> int:
    """Return the group of a level, whose widths are within a factor of four; 0 for all narrow levels."""
    return max(len(level.token).bit_length() // 2 - 3, 0)


def _stage(levels: list[Level], start: int, end: int, numbers: int) -> Stage:
    here, before = levels[start:end], levels[start - 1 : end - 1]
    # Include the nodes of the level before, so that the first level finds its paths.
    nodes = max(len(level.inner) for level in levels[max(start - 2, 0) : end])
    edges = max(len(level.token) for level in here)

    def filled(rows: list[np.ndarray], width: int, value: int) -> np.ndarray:
        return np.stack([np.pad(row, (0, width - len(row)), constant_values=value) for row in rows]).astype(np.int32)

    return Stage(
        filled([level.parent[level.inner] for level in before], nodes, 0),
        filled([level.token[level.inner] for level in before], nodes, 0),
        filled([level.parent for level in here], edges, nodes),
        filled([level.token for level in here], edges, 0),
        filled([np.where(level.texts < 0, numbers, level.texts) for level in here], edges, numbers),
        filled([level.inner for level in here], nodes, 0),
        end - 1,
    )


def numbers_of(policy: Policy, levels: list[Level]) -> int:
    """Return the numbers that `make_scores` holds per prompt: first logits, or the widest stage's keys and values."""

    def of_paths(stage: Stage) -> int:
        cache = jax.eval_shape(lambda: policy.init_cache(1, stage.nodes, stage.depth))
        return sum(part.size for part in jax.tree.leaves(cache))

    return max(len(levels[0].token), *map(of_paths, stages_of(levels, 0)), 1)


def make_scores(policy: Policy, levels: list[Level], temperature: float) -> Callable[..., jax.Array]:
    """Make score(variables, prompts, mask, pictures) -> float32 [P, I], to call inside a compiled function.

        score(text) = Σ_t log p(token_t | prompt, previous tokens), p = softmax(logits / temperature)

    The softmax is over the children of the trie's node. The exponentials of a prompt's scores sum to 1; an index
    without a text has -inf.
    """
    numbers = 1 + max(int(level.texts.max()) for level in levels)
    root = levels[0]
    stages = stages_of(levels, numbers)

    def score(variables, prompts, mask, pictures) -> jax.Array:
        prefix = policy.prefill(variables, prompts, mask, *(() if pictures is None else (pictures,)))
        head = policy.head(variables).astype(prefix.hidden.dtype)
        unstacked = policy.unstack(variables)

        def descend(carry, level: Stage):
            scores, total, cache = carry
            tokens = jnp.broadcast_to(level.written, total.shape)
            hidden, cache = policy.decode_step(unstacked, prefix, tokens, of_paths(cache, level.origin))
            logits = policy.logits("ped,ed->pe", hidden[:, level.parent], head[level.token]) / temperature
            logs = _of_node(logits, level.parent, total.shape[1])
            logs = total[:, level.parent] + logs
            return (scores.at[:, level.texts].set(logs, mode="drop"), logs[:, level.inner], cache), None

        logits = policy.logits("pd,ed->pe", prefix.hidden, head[root.token])
        logs = jax.nn.log_softmax(logits / temperature)
        scores = jnp.full((len(prompts), numbers), -jnp.inf, jnp.float32)
        scores = scores.at[:, np.where(root.texts < 0, numbers, root.texts)].set(logs, mode="drop")
        total = logs[:, root.inner]
        cache = policy.init_cache(len(prompts), 1, 1)
        for stage in stages:
            total = _fitted(total, stage.nodes, axis=1)
            cache = _moved(policy, cache, len(prompts), stage)
            (scores, total, cache), _ = lax.scan(descend, (scores, total, cache), stage._replace(depth=None))
        return scores

    return score


def _of_node(logits: jax.Array, parent: Array, nodes: int) -> jax.Array:
    """Return the log-probabilities of edges [P, E], normalised within their node."""
    rows = logits.T
    largest = jax.ops.segment_max(rows, parent, nodes)
    mass = jax.ops.segment_sum(jnp.exp(rows - largest[parent]), parent, nodes)
    return (rows - (largest + jnp.log(mass))[parent]).T


def _fitted(values: jax.Array, size: int, *, axis: int) -> jax.Array:
    part = lax.slice_in_dim(values, 0, min(size, values.shape[axis]), axis=axis)
    pads = [(0, size - part.shape[i]) if i == axis else (0, 0) for i in range(values.ndim)]
    return jnp.pad(part, pads)


def _moved(policy: Policy, cache: Cache, prompts: int, stage: Stage) -> Cache:
    parts = cache.keys, cache.values
    keys, values = jax.tree.map(lambda part: _fitted(part, stage.nodes, axis=part.ndim - 3), parts)
    return move(cache._replace(keys=keys, values=values), policy.init_cache(prompts, stage.nodes, stage.depth))
