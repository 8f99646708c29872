"""Retrieval in process: exact ranks, ties, exclusions, mixtures, encoders, cache, self-test."""

import numpy as np
import pytest
from scipy import sparse

from bridges import retrieval
from bridges.retrieval import encoders, local, ranking
from bridges.retrieval import index as catalogue
from bridges.retrieval.queries import History, make_queries
from bridges.retrieval.retriever import Retriever
from grpo_jax.errors import UserError

TITLES = [
    "red nail polish",
    "blue nail polish",
    "rose hand cream",
    "red nail polish",  # a second item of the same title
    "lavender soap bar",
    "",
    "night face cream with rose",
    "shaving brush",
    "red lipstick",
    "blue eye shadow palette",
]


class GivenVectors:
    """An encoder that knows a vector for each text."""

    identity = "given-0"
    emphasis = None

    def __init__(self, vectors):
        self.vectors = vectors

    def encode(self, texts):
        return np.stack([self.vectors[text] for text in texts])


def unit(vectors):
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def dense_world(items, width, queries, *, seed=0, duplicates=0):
    """A retriever's parts over random vectors, and the vectors of catalogue and queries."""
    rng = np.random.default_rng(seed)
    vectors = unit(rng.normal(size=(items, width)))
    if duplicates:
        vectors[rng.choice(items, duplicates, replace=False)] = vectors[rng.choice(items, duplicates)]
    texts = [f"q{i}" for i in range(queries)]
    wanted = unit(rng.normal(size=(queries, width)))
    encoder = GivenVectors(dict(zip(texts, wanted, strict=True)))
    fingerprint = catalogue.Fingerprint("given", "given")
    return catalogue.Index(vectors, fingerprint, None), encoder, texts, wanted


def slow_ranks(scores, targets, exclude, ties, tolerance, temperature):
    """One query and one item at a time, in float64."""
    ranks, probabilities = [], []
    for row, target, out in zip(scores.astype(np.float64), targets, exclude, strict=True):
        better = level = 0
        total = np.exp(row[target] / temperature)
        for item, score in enumerate(row):
            if item == target or item in out:
                continue
            better += score > row[target] + tolerance
            level += abs(score - row[target]) <= tolerance
            total += np.exp(score / temperature)
        ranks.append(1 + better + {"against": 1, "average": 0.5, "favour": 0}[ties] * level)
        probabilities.append(np.exp(row[target] / temperature) / total)
    return np.array(ranks), np.array(probabilities)


def tfidf(titles=TITLES, *, cache=None, **options):
    section = retrieval.RetrievalSection(cache=cache and str(cache), **options)
    return retrieval.open_retriever(titles, section, self_test=0.5)[0]


@pytest.mark.parametrize("ties", ["against", "average", "favour"])
@pytest.mark.parametrize("block", [65536, 64])
def test_dense_ranks_are_those_of_a_loop(ties, block):
    index, encoder, texts, wanted = dense_world(5000, 8, 70, duplicates=400)  # two blocks, two batches of queries
    rng = np.random.default_rng(1)
    targets = rng.integers(0, 5000, 70)
    exclude = [rng.integers(0, 5000, rng.integers(0, 20)).tolist() for _ in texts]
    exclude[0].append(int(targets[0]))  # the target is ranked all the same
    section = retrieval.RetrievalSection(ties=ties, temperature=0.1)
    retriever = Retriever(local.LocalBackend(local.Space(encoder, index), block=block), section)
    found = retriever.score_ranks(texts, targets, exclude)
    out = [set(row) - {int(target)} for row, target in zip(exclude, targets, strict=True)]
    rank, probability = slow_ranks(wanted @ index.vectors.T, targets, out, ties, ranking.Scale().tolerance, 0.1)
    np.testing.assert_array_equal(found.rank, rank)
    np.testing.assert_allclose(found.probability, probability, rtol=2e-5)
    assert found.rank.dtype == np.float64 and found.probability.dtype == np.float32


@pytest.mark.parametrize("block", [65536, 7])
def test_sparse_ranks_are_those_of_a_loop(block):
    rng = np.random.default_rng(2)
    words = [f"word{i}" for i in range(30)]
    titles = [" ".join(rng.choice(words, 3)) for _ in range(300)]
    queries = [" ".join(rng.choice(words, 2)) for _ in range(80)]
    encoder = encoders.TfidfEncoder(titles)
    backend = local.LocalBackend(local.Space(encoder, catalogue.open_index(titles, encoder, None)), block=block)
    targets = rng.integers(0, 300, 80)
    exclude = [rng.integers(0, 300, 5).tolist() for _ in queries]
    found = Retriever(backend).score_ranks(queries, targets, exclude)
    scores = (encoder.encode(queries) @ encoder.encode(titles).T).toarray()
    out = [set(row) - {int(target)} for row, target in zip(exclude, targets, strict=True)]
    rank, probability = slow_ranks(scores, targets, out, "against", 1e-6, 0.05)
    np.testing.assert_array_equal(found.rank, rank)
    np.testing.assert_allclose(found.probability, probability, rtol=2e-5)


def test_equal_titles_tie_by_the_rule():
    for ties, rank in (("against", 2), ("average", 1.5), ("favour", 1)):
        assert tfidf(ties=ties).score_ranks(["red nail polish"], [0], [[]]).rank == [rank]
    assert tfidf().score_ranks(["red nail polish"], [0], [[3]]).rank == [1]  # the twin is in the history


def test_equal_items_tie_wherever_they_lie():
    """A product of matrices may round equal rows differently at the edge of a block; a tie must not see it."""
    index, encoder, _, _ = dense_world(4099, 384, 3)
    index.vectors[[0, 17, 4095, 4096, 4098]] = encoder.vectors["q0"]
    retriever = Retriever(local.LocalBackend(local.Space(encoder, index), block=3))
    assert retriever.score_ranks(["q0"] * 5, [0, 17, 4095, 4096, 4098], [[]] * 5).rank.tolist() == [5] * 5


@pytest.mark.parametrize("ties", ["against", "average", "favour"])
@pytest.mark.parametrize("text", ["", "   ", "xqzzv vvkq"])
def test_a_text_that_says_nothing_ranks_its_target_last(text, ties):
    ranks = tfidf(ties=ties).score_ranks([text], [4], [[0, 1, 4]])
    assert ranks.rank == [len(TITLES) - 2]
    np.testing.assert_allclose(ranks.probability, 1 / (len(TITLES) - 2), rtol=1e-6)


def test_a_target_without_a_title_is_last():
    assert tfidf().score_ranks(["red"], [5], [[]]).rank == [len(TITLES)]


def test_all_items_but_the_target_excluded():
    ranks = tfidf().score_ranks(["soap"], [2], [range(len(TITLES))])
    assert ranks.rank == [1] and ranks.probability == [1]
    index, encoder, texts, _ = dense_world(7, 4, 1)
    ranks = Retriever(local.LocalBackend(local.Space(encoder, index), block=3)).score_ranks(texts, [2], [range(7)])
    assert ranks.rank == [1] and ranks.probability == [1]


def test_a_mixture_is_the_direction_of_the_weighted_sum():
    index, encoder, texts, wanted = dense_world(500, 16, 4)
    retriever = Retriever(local.LocalBackend(local.Space(encoder, index)))
    weights = [[1.0, 0.5, 0.25], [2.0], [1.0, 1.0]]
    rows = [[0, 1, 2], [3], [1, 1]]
    found = retriever.score_mixed_ranks([[texts[i] for i in row] for row in rows], weights, [3, 4, 5], [[], [7], []])
    sums = np.stack([np.array(w) @ wanted[row] for w, row in zip(weights, rows, strict=True)])
    rank, probability = slow_ranks(unit(sums) @ index.vectors.T, [3, 4, 5], [[], [7], []], "against", 1e-6, 0.05)
    np.testing.assert_array_equal(found.rank, rank)
    np.testing.assert_allclose(found.probability, probability, rtol=2e-5)


def test_a_mixture_of_sparse_vectors():
    retriever = tfidf()
    alone = retriever.score_ranks(["rose cream"], [2], [[]])
    scaled = retriever.score_mixed_ranks([["rose cream"]], [[3.0]], [2], [[]])
    np.testing.assert_array_equal(alone.rank, scaled.rank)
    np.testing.assert_allclose(alone.probability, scaled.probability, rtol=1e-6)
    nothing = retriever.score_mixed_ranks([["rose", "rose"], []], [[1.0, -1.0], []], [2, 2], [[], []])
    assert nothing.rank.tolist() == [len(TITLES)] * 2
    assert retriever.score_mixed_ranks([[]], [[]], [2], [[]]).rank == [len(TITLES)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": [10]}, r"rows of the catalogue \(0 to 10, excluded\), got 10"),
        ({"targets": [-1]}, "got -1"),
        ({"exclude": [[99]]}, "got 99"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"texts": [["a"]], "weights": [[1.0]], "targets": [0], "exclude": [[]]} | change
    with pytest.raises(ValueError, match=message):
        make_queries(**arguments, items=10)


def test_bad_settings_are_named():
    for options, message in (
        ({"backend": "cloud"}, "backend: expected"),
        ({"ties": "random"}, "ties: expected .*average"),
        ({"temperature": 0.0}, "temperature: expected a number > 0"),
        ({"attempts": 0}, "attempts: expected"),
        ({"budget": -1}, "budget: expected"),
        ({"window": 5}, "window: expected more than budget"),
        ({"dense": "a/model"}, "dense_weight: expected a weight above 0"),
    ):
        with pytest.raises(UserError, match=message):
            retrieval.RetrievalSection(**options)


def test_the_cache_gives_the_same_ranks(tmp_path, monkeypatch):
    first = tfidf(cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("tfidf-")
    monkeypatch.setattr(catalogue, "encode_titles", lambda *_: pytest.fail("the catalogue was encoded again"))
    second = tfidf(cache=tmp_path)
    for retriever in (first, second):
        assert retriever.score_ranks(["rose cream"], [6], [[]]).rank == [2]
    assert first.fingerprint == second.fingerprint
    assert catalogue.load_titles(folder) == TITLES


def test_the_cache_keeps_dense_vectors(tmp_path):
    rng = np.random.default_rng(3)
    encoder = GivenVectors(dict(zip(TITLES, unit(rng.normal(size=(10, 6))), strict=True)))
    made = catalogue.open_index(TITLES, encoder, tmp_path)
    again = catalogue.open_index(TITLES, GivenVectors({}), tmp_path)
    assert isinstance(again.vectors, np.memmap)
    np.testing.assert_array_equal(made.vectors, again.vectors)
    np.testing.assert_array_equal(made.vectors, encoder.encode(TITLES))


def test_a_damaged_cache_is_named(tmp_path):
    tfidf(cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "data.npy").write_bytes(b"broken")
    with pytest.raises(UserError, match="delete it"):
        tfidf(cache=tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cache of the retrieval"):
        tfidf(cache=tmp_path / "file" / "below")


def test_the_fingerprint_knows_the_titles():
    now = tfidf().fingerprint
    assert tfidf(list(TITLES)).fingerprint == now
    assert tfidf(TITLES[::-1]).fingerprint.catalogue != now.catalogue


@pytest.mark.parametrize(("ties", "found"), [("against", 8 / 10), ("average", 8 / 10), ("favour", 1.0)])
def test_the_self_test_says_what_titles_earn_that_ask_for_themselves(ties, found):
    titles = [*(f"soap no {n}" for n in range(8)), "Rose Cream", "rose cream!", "soap", "soap"]
    retriever, _ = retrieval.open_retriever(titles, retrieval.RetrievalSection(ties=ties), self_test=0)
    share = retriever.self_test(titles, required=0, samples=12)
    first = retriever.score_ranks(titles[:10], range(10), [()] * 10).rank == 1
    assert first.mean() == pytest.approx(found)
    assert share == pytest.approx((10 * found + 2) / 12)  # two of the very same title are not told apart, nor counted


def test_the_self_test_reports_and_refuses():
    _, share = retrieval.open_retriever(TITLES)
    assert share == 1.0  # twins do not outrank each other, blank titles are not asked for
    same = GivenVectors(dict.fromkeys(TITLES, unit(np.ones(4))))
    index = catalogue.open_index(TITLES, same, None)
    shuffled = index._replace(vectors=unit(np.random.default_rng(0).normal(size=(10, 4))))
    with pytest.raises(UserError, match=r"self-test: .* of 9 titles retrieve themselves, at least 90%"):
        Retriever(local.LocalBackend(local.Space(same, shuffled))).self_test(TITLES)
    with pytest.raises(UserError, match="no title that is not blank"):
        Retriever(local.LocalBackend(local.Space(same, index))).self_test([""] * 10)


def test_a_catalogue_of_nan_is_refused():
    with pytest.raises(retrieval.NonFiniteScores, match="vector of 'rose hand cream'"):
        vectors = dict.fromkeys(TITLES, np.ones(2, np.float32)) | {"rose hand cream": np.full(2, np.nan, np.float32)}
        catalogue.open_index(TITLES, GivenVectors(vectors), None)
    index, encoder, _, _ = dense_world(9, 4, 1)
    index.vectors[3] = np.inf
    with pytest.raises(retrieval.NonFiniteScores, match="in row 3 is not finite"):
        local.LocalBackend(local.Space(encoder, index))
    with pytest.raises(retrieval.NonFiniteScores, match="'b'"):
        encoders.check_finite(sparse.csr_matrix(np.array([[0, 1], [np.nan, 0]], np.float32)), ["a", "b"])


def by_hand(vectors, texts, history, emphasis):
    """q = unit(unit(text) + a · unit(e ⊙ Σ decay^age v)), one query at a time, in float64."""
    asked = []
    for text, rows in zip(texts, history.rows, strict=True):
        taken = sum((history.decay**age * vectors[row] for age, row in enumerate(reversed(rows))), np.zeros(len(text)))
        parts = [part / max(np.linalg.norm(part), 1e-12) for part in (text, emphasis * taken)]
        whole = parts[0] + history.weight * parts[1]
        asked.append(whole / max(np.linalg.norm(whole), 1e-12))
    return np.stack(asked) @ vectors.T


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("block", [65536, 64])
def test_a_history_is_a_part_of_the_query_for_ranks_and_for_the_nearest(kind, block):
    rng = np.random.default_rng(4)
    if kind == "sparse":
        words = [f"word{i}" for i in range(40) for _ in range(1 + 40 // (i + 1))]  # some are rare
        titles = [" ".join(rng.choice(words, 4)) for _ in range(300)]
        texts = ["", *(" ".join(rng.choice(words, 3)) for _ in range(69))]
        encoder = encoders.TfidfEncoder(titles)
        index = catalogue.open_index(titles, encoder, None)
        vectors, wanted = (found.toarray().astype(np.float64) for found in (index.vectors, encoder.encode(texts)))
        emphasis = 1 + np.log(301 / (1 + (vectors > 0).sum(0)))
    else:
        index, encoder, texts, wanted = dense_world(5000, 8, 70)
        vectors, emphasis = index.vectors.astype(np.float64), np.ones(8)
    items = len(vectors)
    targets = rng.integers(0, items, 70)
    taken = [rng.integers(0, items, rng.integers(0, 6)).tolist() for _ in texts]
    history = History(taken, 0.7, 0.5)
    retriever = Retriever(local.LocalBackend(local.Space(encoder, index), block=block))
    scores = by_hand(vectors, wanted, history, emphasis)
    out = [set(rows) - {int(target)} for rows, target in zip(taken, targets, strict=True)]
    rank, probability = slow_ranks(scores, targets, out, "against", 1e-6, 0.05)
    found = retriever.score_ranks(texts, targets, taken, history)
    np.testing.assert_array_equal(found.rank, rank)
    np.testing.assert_allclose(found.probability, probability, rtol=1e-4)
    listed = retriever.nearest(texts, 5, taken, history)
    for pairs, own, rows in zip(listed, scores, taken, strict=True):
        left = [item for item in np.argsort(-own, kind="stable") if item not in rows][:5]
        np.testing.assert_allclose([score for _, score in pairs], own[left], atol=1e-6)
        np.testing.assert_allclose([own[row] for row, _ in pairs], own[left], atol=1e-6)
        assert len({row for row, _ in pairs} - set(rows)) == 5
    none = retriever.score_ranks(texts, targets, taken, history._replace(weight=0.0))
    np.testing.assert_array_equal(none.rank, retriever.score_ranks(texts, targets, taken).rank)


def test_a_text_that_says_nothing_asks_with_the_history_and_the_targets_title_beats_a_light_one():
    targets, taken = [6, 8, 4], [[2, 0], [1], [7, 8]]
    light = History(taken, 1e-3, 0.7)
    assert tfidf().score_ranks([TITLES[row] for row in targets], targets, taken, light).rank.tolist() == [1, 1, 1]
    silent = tfidf().score_ranks(["", " ", "xqzzv"], [6] * 3, [[2]] * 3, History([[2]] * 3, 1e-3, 0.7))
    assert silent.rank.tolist() == [1, 1, 1]  # one rose cream after another


def test_the_nearest_are_fewer_where_nothing_is_left_and_the_first_of_equal_ones():
    found = tfidf().nearest(["red nail polish", "soap"], 3, [[], range(9)])
    assert [row for row, _ in found[0]] == [0, 3, 1] and found[0][0][1] == pytest.approx(1)
    assert found[1] == [(9, 0.0)]


def test_a_bad_history_is_named():
    message = r"history.rows: expected rows of the catalogue \(0 to 10, excluded\), got 10"
    with pytest.raises(ValueError, match=message):
        tfidf().score_ranks(["soap"], [4], [[]], History([[10]], 1.0, 0.5))
