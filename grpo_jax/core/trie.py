"""Trie (prefix tree) in flat arrays, which constrains decoding to the token sequences of a catalogue.

A completion walks from the root. At each node only the children's tokens are allowed, so each finished completion is in
the catalogue. Nodes are numbered by level, then parent, then token. The edges of a node are thus adjacent, and edge i
leads to node i + 1. A narrow node lists its children edge by edge, a wide node stores them as bits, so memory grows
only with the edges. Axes: n nodes, e = n - 1 edges, V vocabulary, W wide nodes, C listed children.
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
"""Largest number of children that are looked up one by one rather than over the vocabulary."""
_SHARE = 256
"""A node with more children than this share of V stores them as bits, at most 32 bytes for each child."""


class Trie(NamedTuple):
    """Trie of token sequences; a pytree of flat arrays, passed to compiled functions as an argument."""

    first: jax.Array  # int32 [n + 1], the first edge of each node; its edges end at the next node's first edge
    # int32 [e + C], the token of each edge, ascending within a node, padded with V. C is NARROW, or more in a large
    # vocabulary
    token: jax.Array
    row: jax.Array  # int32 [n], the row in `wide` of a node with more than C children; -1 for others and for the root
    root: jax.Array  # bool [V], the tokens of the root's children
    wide: jax.Array  # uint8 [W, V / 8], the tokens of wide nodes' children, packed by `numpy.packbits`
    text: jax.Array  # int32 [n], index of the sequence that ends at a node; -1 if none does

    @property
    def vocab_size(self) -> int:
        """Return V."""
        return len(self.root)


def make_trie(texts: Sequence[Sequence[int]], *, vocab_size: int) -> Trie:
    """Make the trie of some token sequences.

    No sequence may be a prefix of another one: end each with an EOS token.

    Args:
        texts: Token ids of each sequence; none empty, no two equal, none a prefix of another.
        vocab_size: V, the policy's.

    Raises:
        ValueError: Two sequences are equal, or one is a prefix of another.
    """
    order = sorted(range(len(texts)), key=lambda i: tuple(texts[i]))
    lengths = np.array([len(texts[i]) for i in order])
    tokens = np.fromiter(itertools.chain.from_iterable(texts[i] for i in order), np.int64, lengths.sum())
    for before, after in itertools.pairwise(tuple(texts[i]) for i in order):
        if after[: len(before)] == before:
            raise ValueError(f"texts must not repeat or begin one another, got {list(after)[:20]}")
    return _levels(tokens, lengths, np.array(order), vocab_size)


def _levels(tokens: np.ndarray, lengths: np.ndarray, order: np.ndarray, vocab_size: int) -> Trie:
    """Make the trie of sorted, concatenated sequences; `order` holds their original indices."""
    starts = np.cumsum(lengths) - lengths
    parent = np.zeros(len(lengths), np.int64)  # the node that each sequence has reached
    written, parents, nodes = [], [], 1
    here = np.arange(len(lengths))  # sequences with a token at this position
    for place in range(int(lengths.max())):
        here = here[lengths[here] > place]
        column, reached = tokens[starts[here] + place], parent[here]
        new = np.concatenate([[True], (reached[1:] != reached[:-1]) | (column[1:] != column[:-1])])
        parents.append(reached[new])
        written.append(column[new])
        parent[here] = nodes - 1 + np.cumsum(new)
        nodes += int(new.sum())
    text = np.full(nodes, -1)
    text[parent] = order
    return _laid_flat(np.concatenate(parents), np.concatenate(written), text, vocab_size)


def _laid_flat(parents: np.ndarray, tokens: np.ndarray, text: np.ndarray, vocab_size: int) -> Trie:
    first = np.searchsorted(parents, np.arange(len(text) + 1))
    counts, window = np.diff(first), max(NARROW, -(-vocab_size // _SHARE))
    broad = np.flatnonzero(counts > window)
    broad = broad[broad != ROOT]
    row, root = np.full(len(text), -1), np.zeros(vocab_size, bool)
    row[broad] = np.arange(len(broad))
    root[tokens[first[ROOT] : first[ROOT + 1]]] = True
    wide = np.zeros((len(broad), -(-vocab_size // 8)), np.uint8)
    for index, node in enumerate(broad):
        present = np.zeros(vocab_size, bool)
        present[tokens[first[node] : first[node + 1]]] = True
        wide[index] = np.packbits(present)
    padded = np.concatenate([tokens, np.full(window, vocab_size)])
    first, token, row, text = (jnp.asarray(x, jnp.int32) for x in (first, padded, row, text))
    return Trie(first, token, row, jnp.asarray(root), jnp.asarray(wide), text)


def depth_of(trie: Trie) -> int:
    """Return the number of tokens of the longest sequence."""
    first, depth, low, high = np.asarray(trie.first), 0, 0, 1
    while high > low:  # nodes low … high - 1 are one level; their edges lead to the next level
        low, high, depth = first[low] + 1, first[high] + 1, depth + 1
    return depth - 1


def widest_below(trie: Trie) -> int:
    """Return the largest number of children of a node below the root, at least 1; on the host."""
    return max(1, int(np.diff(np.asarray(trie.first))[ROOT + 1 :].max()))


def first_children(trie: Trie, nodes: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the nodes' first children: int [..] → tokens int32 and existence bool, both [.., count]."""
    here = jnp.maximum(nodes, 0)
    edges = trie.first[here][..., None] + jnp.arange(count)
    exists = (edges < trie.first[here + 1][..., None]) & (nodes >= 0)[..., None]
    return jnp.where(exists, trie.token[edges], trie.vocab_size), exists


def children(trie: Trie, nodes: ArrayLike) -> jax.Array:
    """Return the tokens allowed at nodes: int [..] → bool [.., V]; none at a leaf or a negative node."""
    nodes = jnp.asarray(nodes)
    flat = nodes.reshape(-1)
    edges = len(trie.first) - 2
    listed, _ = first_children(trie, flat, len(trie.token) - edges)
    mask = jnp.zeros((len(flat), trie.vocab_size), bool)
    mask = mask.at[jnp.arange(len(flat))[:, None], listed].set(True, mode="drop")
    if len(trie.wide):
        row = trie.row[jnp.maximum(flat, 0)]
        bits = jnp.unpackbits(trie.wide[jnp.maximum(row, 0)], axis=-1, count=trie.vocab_size).astype(bool)
        mask = jnp.where(((row >= 0) & (flat >= 0))[:, None], bits, mask)
    mask = jnp.where((flat == ROOT)[:, None], trie.root, mask)
    return mask.reshape(*nodes.shape, trie.vocab_size)


def follow(trie: Trie, nodes: ArrayLike, tokens: ArrayLike) -> jax.Array:
    """Return the node that a token leads to: int32 [..], [..] → int32 [..]; -1 without such a child, or from -1."""
    nodes, tokens = jnp.broadcast_arrays(nodes, tokens)
    here = jnp.maximum(nodes, 0)
    start, end = trie.first[here], trie.first[here + 1]

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        smaller = (trie.token[middle] < tokens) & (low < high)
        return jnp.where(smaller, middle + 1, low), jnp.where(smaller | (low >= high), high, middle)

    # Find the first edge whose token is not smaller. XLA would compile the unrolled loop for minutes.
    steps = int(trie.first.shape[0]).bit_length()
    low, _ = jax.lax.fori_loop(0, steps, halve, (start, end))
    is_child = (low < end) & (trie.token[low] == tokens) & (nodes >= 0)
    return jnp.where(is_child, low + 1, -1).astype(jnp.int32)


def walk(trie: Trie, tokens: ArrayLike) -> jax.Array:
    """Return the node before each token: int [.., T] → int32 [.., T], from the root; -1 once outside the trie."""
    tokens = jnp.moveaxis(jnp.asarray(tokens), -1, 0)
    start = jnp.full(tokens.shape[1:], ROOT, jnp.int32)
    nodes = jax.lax.scan(lambda node, token: (follow(trie, node, token), node), start, tokens)[1]
    return jnp.moveaxis(nodes, 0, -1)
