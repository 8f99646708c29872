"""The tree of a catalogue's texts against dictionaries of dictionaries."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.core.trie import NARROW, ROOT, children, follow, make_trie, walk

VOCABULARY = 90
END = 0


def nested(texts):
    tree = {}
    for text in texts:
        node = tree
        for token in text:
            node = node.setdefault(token, {})
    return tree


def catalogue(seed, count=200):
    """Texts that share beginnings, one node wider than what is listed one by one; all end with one token."""
    random = np.random.default_rng(seed)
    made = {tuple(random.integers(1, 5, random.integers(1, 6)).tolist()) for _ in range(count)}
    made |= {(7, int(token)) for token in range(8, 8 + NARROW + 5)}
    return [(*text, END) for text in made]


@settings(max_examples=5)
@given(seed=st.integers(0, 30))
def test_children_and_followers_are_those_of_nested_dictionaries(seed):
    texts = catalogue(seed)
    trie, tree = make_trie(texts, vocab_size=VOCABULARY), nested(texts)
    assert (np.asarray(trie.row) >= 0).any()
    nodes = np.arange(len(trie.text))
    allowed = np.asarray(children(trie, nodes))
    reached = np.asarray(follow(trie, nodes[:, None], np.arange(VOCABULARY)))
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
    for number, (text, path) in enumerate(zip(texts, nodes, strict=True)):
        leaf = int(follow(trie, path[len(text) - 1], text[-1]))
        assert trie.text[leaf] == number and not np.asarray(children(trie, leaf)).any()
        assert path[0] == ROOT and (path[: len(text)] >= 0).all() and (path[len(text) + 1 :] == -1).all()


def test_off_the_tree_nothing_may_follow():
    trie = make_trie(catalogue(1), vocab_size=VOCABULARY)
    assert np.asarray(walk(trie, np.array([6, 1, 1]))).tolist() == [ROOT, -1, -1]
    assert not np.asarray(children(trie, np.array([-1]))).any()


@pytest.mark.parametrize(
    ("texts", "wrong"),
    [
        ([], "at least one"),
        ([[1, 2], []], "at least one token"),
        ([[1, 2], [1, 2]], "repeat or begin"),
        ([[1, 2], [3], [1, 2, 5]], "repeat or begin"),
        ([[1, VOCABULARY]], r"in \[0, 90\)"),
        ([[1, -2], [3]], r"in \[0, 90\)"),
    ],
)
def test_catalogues_that_cannot_be_told_apart_are_refused(texts, wrong):
    with pytest.raises(ValueError, match=wrong):
        make_trie(texts, vocab_size=VOCABULARY)


def test_a_tree_is_an_argument_of_a_compiled_function():
    one, other = ([[token, END] for token in range(1, 9)], [[token, END] for token in range(2, 10)])
    compiled = jax.jit(children)
    for texts in (one, other):
        trie = make_trie(texts, vocab_size=VOCABULARY)
        assert np.flatnonzero(np.asarray(compiled(trie, ROOT))).tolist() == [text[0] for text in texts]
    assert compiled._cache_size() == 1
