"""The trie of a catalogue's texts against dictionaries of dictionaries."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core.logprobs import token_logprobs, tree_logprobs
from grpo_jax.core.trie import NARROW, ROOT, children, follow, make_trie, walk, widest_below

VOCABULARY = 90
END = 0


def nested(texts):
    tree = {}
    for text in texts:
        node = tree
        for token in text:
            node = node.setdefault(token, {})
    return tree


CHILDREN, FOLLOW = jax.jit(children), jax.jit(follow)


def catalogue(seed, count=200):
    """Texts that share beginnings, one node wider than what is listed one by one; all end with one token."""
    random = np.random.default_rng(seed)
    made = {tuple(random.integers(1, 5, random.integers(1, 6)).tolist()) for _ in range(count)}
    made |= {(7, int(token)) for token in range(8, 8 + NARROW + 5)}
    return [(*text, END) for text in made]


def test_children_and_followers_are_those_of_nested_dictionaries():
    texts = catalogue(0)
    trie, tree = make_trie(texts, vocab_size=VOCABULARY), nested(texts)
    assert (np.asarray(trie.row) >= 0).any()
    nodes = np.arange(len(trie.text))
    allowed = np.asarray(CHILDREN(trie, nodes))
    reached = np.asarray(FOLLOW(trie, nodes[:, None], np.arange(VOCABULARY)))
    waiting = [(ROOT, tree)]
    for node, below in waiting:
        assert np.flatnonzero(allowed[node]).tolist() == np.flatnonzero(reached[node] >= 0).tolist() == sorted(below)
        waiting += [(int(reached[node, token]), below[token]) for token in below]
    assert sorted(node for node, _ in waiting) == nodes.tolist()


def test_a_leaf_is_its_text_and_walks_end_there():
    texts = catalogue(3)
    trie = make_trie(texts, vocab_size=VOCABULARY)
    longest = max(map(len, texts))
    padded = np.array([[*text, *[END] * (longest - len(text))] for text in texts])
    nodes = np.asarray(jax.jit(walk)(trie, padded))
    last = np.array([path[len(text) - 1] for text, path in zip(texts, nodes, strict=True)])
    leaves = np.asarray(FOLLOW(trie, last, np.array([text[-1] for text in texts])))
    assert np.asarray(trie.text)[leaves].tolist() == [*range(len(texts))]
    assert not np.asarray(CHILDREN(trie, leaves)).any()
    for text, path in zip(texts, nodes, strict=True):
        assert path[0] == ROOT and (path[: len(text)] >= 0).all() and (path[len(text) + 1 :] == -1).all()


@pytest.mark.parametrize("children_of_a_node", [40, 100])
def test_memory_grows_with_the_edges_not_with_nodes_times_vocabulary(children_of_a_node):
    texts = [(node, 1000 + place, END) for node in range(1, 400) for place in range(children_of_a_node)]
    trie = make_trie(texts, vocab_size=20_000)
    size = sum(np.asarray(part).nbytes for part in trie)
    assert size < 64 * len(trie.text) + 2 * 20_000 < 399 * 20_000


@pytest.mark.parametrize("texts", [[[1, 2], [1, 2]], [[1, 2], [3], [1, 2, 5]]])
def test_catalogues_that_cannot_be_told_apart_are_refused(texts):
    with pytest.raises(ValueError, match="repeat or begin"):
        make_trie(texts, vocab_size=VOCABULARY)


def test_the_program_of_a_step_does_not_grow_with_the_tree():
    """Steps of a search written out one by one took XLA minutes on a catalogue of twelve thousand."""

    def program(items):
        trie = make_trie([[token, END] for token in range(1, items + 1)], vocab_size=items + 1)
        return jax.jit(follow).lower(trie, jnp.zeros(3, jnp.int32), jnp.ones(3, jnp.int32)).as_text()

    assert program(4000).count("\n") == program(40).count("\n")


@pytest.mark.parametrize(("children_of_a_node", "options"), [(1, {}), (3, {"temperature": 0.7, "softcap": 2.0})])
def test_narrow_trees_take_a_shorter_way_to_the_same_numbers(children_of_a_node, options):
    """Values and gradients, of texts, of what is behind their end, and of tokens off the tree."""
    places = range(1, children_of_a_node + 1)
    texts = [[first, place, END] for first in range(10, 60) for place in places] + [[60, END]]
    trie, random = make_trie(texts, vocab_size=VOCABULARY), np.random.default_rng(0)
    assert widest_below(trie) == children_of_a_node
    tokens = np.array([*[texts[i] for i in random.integers(0, 40, 9)], [60, END, END], [3, 1, END], [10, 9, END]])
    tokens = tokens.reshape(4, 3, 3)
    prompts, after = (random.normal(size=shape).astype(np.float32) for shape in [(4, 1, 1, 6), (4, 3, 2, 6)])
    head = random.normal(size=(VOCABULARY, 6)).astype(np.float32)

    def pulled(function, prompts, after, head):
        hidden = jnp.concatenate([jnp.broadcast_to(prompts, (4, 3, 1, 6)), after], axis=2)
        logprobs, entropy = function(hidden, head)
        weights = jnp.cos(jnp.arange(tokens.size)).reshape(tokens.shape)
        total = jnp.where(jnp.isfinite(logprobs), weights * logprobs, 0).sum() + (weights * entropy).sum()
        return total, (logprobs, entropy)

    def shorter(hidden, head):
        return tree_logprobs(hidden, head, tokens, trie, below=children_of_a_node, **options)

    def longer(hidden, head):
        return token_logprobs(hidden, head, tokens, allowed_tokens=(trie, walk(trie, tokens)), **options)

    found, expected = (
        jax.jit(jax.value_and_grad(partial(pulled, f), argnums=(0, 1, 2), has_aux=True))(prompts, after, head)
        for f in (shorter, longer)
    )
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, rtol=1e-4, atol=1e-5), found, expected)
    assert np.isneginf(expected[0][1][0]).any() and np.isfinite(expected[0][1][0]).any()
