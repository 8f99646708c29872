"""Which token may follow which: the texts of a catalogue as a tree that lies in flat arrays.

A completion walks from the root; at every node only the tokens of its children exist, so that each finished text is one
of the catalogue's. Nodes are numbered level by level and, within a level, by parent and token: the edges of a node lie
side by side, and the edge i leads to the node i + 1. Axes: n nodes, e = n - 1 edges, V vocabulary, W wide nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

ROOT = 0
NARROW = 32
"""Children up to which a node's are looked up one by one; a wider node has a row of V."""


class Trie(NamedTuple):
    """Texts as a tree of tokens; a pytree of flat arrays, to be handed to compiled functions as an argument.

    Attributes:
        first: int32 [n + 1], the first edge of each node; its edges end where the next node's begin.
        token: int32 [e + NARROW], the token of each edge, rising within a node; what pads the end is V.
        row: int32 [n], the row of a wide node in `wide`; -1 for narrow ones.
        wide: bool [max(W, 1), V], the tokens of the children of wide nodes.
        text: int32 [n], which text ends at a node; -1 where none does.
    """

    first: jax.Array
    token: jax.Array
    row: jax.Array
    wide: jax.Array
    text: jax.Array

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.wide.shape[1]


def make_trie(texts: Sequence[Sequence[int]], *, vocab_size: int) -> Trie:
    """The tree of some texts.

    A text that begins another one must end with a token of its own (an end-of-sequence token), or what follows it
    could not be told from it.

    Args:
        texts: Token ids of each; none empty, no two alike, none the beginning of another.
        vocab_size: V, the policy's.

    Raises:
        ValueError: There is no text, an empty one, two alike, one that begins another, or a token outside [0, V).
    """
    if not texts or not all(len(text) for text in texts):
        raise ValueError("texts must be at least one, each of at least one token")
    order = sorted(range(len(texts)), key=lambda i: tuple(texts[i]))
    length = max(map(len, texts))
    table = np.full((len(texts), length), -1, np.int64)
    for place, i in enumerate(order):
        table[place, : len(texts[i])] = texts[i]
    if table.max() >= vocab_size or min(min(text) for text in texts) < 0:
        raise ValueError(f"texts must hold tokens in [0, {vocab_size}), got {int(table.max())} or one below 0")
    for before, after in itertools.pairwise(table):
        if ((before == after) | (before < 0)).all():
            raise ValueError(f"texts must not repeat or begin one another, got {after[after >= 0].tolist()[:20]}")
    return _levels(table, np.array(order), vocab_size)


def _levels(table: np.ndarray, order: np.ndarray, vocab_size: int) -> Trie:
    """The tree of sorted texts [texts, longest], -1 after the end; `order` is the number of each."""
    parent = np.zeros(len(table), np.int64)  # the node that each text has reached
    tokens, parents, nodes = [], [], 1
    ends: dict[int, int] = {}
    for place in range(table.shape[1]):
        column, here = table[:, place], table[:, place] >= 0
        new = here & np.concatenate([[True], (parent[1:] != parent[:-1]) | (column[1:] != column[:-1])])
        parents.append(parent[new])
        tokens.append(column[new])
        parent = np.where(here, nodes - 1 + np.cumsum(new), -1 - np.arange(len(table)))
        nodes += int(new.sum())
        last = here & (table[:, place + 1] < 0 if place + 1 < table.shape[1] else True)
        ends.update(zip(parent[last].tolist(), order[last].tolist(), strict=True))
    return _laid_flat(np.concatenate(parents), np.concatenate(tokens), ends, nodes, vocab_size)


def _laid_flat(parents, tokens, ends: dict[int, int], nodes: int, vocab_size: int) -> Trie:
    first = np.searchsorted(parents, np.arange(nodes + 1))
    broad = np.flatnonzero(np.diff(first) > NARROW)
    wide = np.zeros((max(len(broad), 1), vocab_size), bool)
    row, text = np.full(nodes, -1), np.full(nodes, -1)
    row[broad] = np.arange(len(broad))
    for index, node in enumerate(broad):
        wide[index, tokens[first[node] : first[node + 1]]] = True
    text[list(ends)] = list(ends.values())
    padded = np.concatenate([tokens, np.full(NARROW, vocab_size)])
    first, token, row, text = (jnp.asarray(x, jnp.int32) for x in (first, padded, row, text))
    return Trie(first, token, row, jnp.asarray(wide), text)


def depth_of(trie: Trie) -> int:
    """The tokens of the longest text."""
    first, depth, low, high = np.asarray(trie.first), 0, 0, 1
    while high > low:  # the nodes low … high - 1 are one level; their edges lead to the next
        low, high, depth = first[low] + 1, first[high] + 1, depth + 1
    return depth - 1


def narrow_children(trie: Trie, nodes: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The first children of some nodes: int [..] → tokens int32 and whether there is one, [.., NARROW]."""
    nodes = jnp.asarray(nodes)
    here = jnp.maximum(nodes, 0)
    edges = trie.first[here][..., None] + jnp.arange(NARROW)
    exists = (edges < trie.first[here + 1][..., None]) & (nodes >= 0)[..., None]
    return jnp.where(exists, trie.token[edges], trie.vocab_size), exists


def children(trie: Trie, nodes: ArrayLike) -> jax.Array:
    """The tokens that may follow at some nodes: int [..] → bool [.., V]; none at a leaf or a node below 0."""
    nodes = jnp.asarray(nodes)
    flat = nodes.reshape(-1)
    listed, _ = narrow_children(trie, flat)
    narrow = jnp.zeros((len(flat), trie.vocab_size), bool)
    narrow = narrow.at[jnp.arange(len(flat))[:, None], listed].set(True, mode="drop")
    row = trie.row[jnp.maximum(flat, 0)]
    found = jnp.where(((row >= 0) & (flat >= 0))[:, None], trie.wide[jnp.maximum(row, 0)], narrow)
    return found.reshape(*nodes.shape, trie.vocab_size)


def follow(trie: Trie, nodes: ArrayLike, tokens: ArrayLike) -> jax.Array:
    """The node that a token leads to: int32 [..], [..] → int32 [..]; -1 where it is no child's, and from -1."""
    nodes, tokens = jnp.asarray(nodes), jnp.asarray(tokens)
    here = jnp.maximum(nodes, 0)
    low, end = trie.first[here], trie.first[here + 1]

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        smaller = (trie.token[middle] < tokens) & (low < high)
        return jnp.where(smaller, middle + 1, low), jnp.where(smaller | (low >= high), high, middle)

    # The first edge whose token is not smaller. A loop, since a chain of so many gathers takes XLA minutes to compile.
    low, _ = jax.lax.fori_loop(0, int(trie.first.shape[0]).bit_length(), halve, (low, end))
    found = (low < end) & (trie.token[low] == tokens) & (nodes >= 0)
    return jnp.where(found, low + 1, -1).astype(jnp.int32)


def walk(trie: Trie, tokens: ArrayLike) -> jax.Array:
    """The node before each token of some texts: int [.., T] → int32 [.., T], from the root; -1 once off the tree."""
    tokens = jnp.asarray(tokens)

    def step(node, token):
        return follow(trie, node, token), node

    start = jnp.full(tokens.shape[:-1], ROOT, jnp.int32)
    return jnp.moveaxis(jax.lax.scan(step, start, jnp.moveaxis(tokens, -1, 0))[1], 0, -1)
