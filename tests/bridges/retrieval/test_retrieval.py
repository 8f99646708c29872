"""Retrieval in process: exact ranks, exclusions, histories, cache, and calls that fail."""

import numpy as np
import pytest

from bridges import retrieval
from bridges.retrieval import Retriever, encoders, ranking
from bridges.retrieval.encoders import Fingerprint, Index
from bridges.retrieval.ranking import History, LocalBackend
from grpo_jax.config.sections import RetrievalSection
from grpo_jax.errors import StopRun, UserError
from grpo_jax.rollout.rewards import collect_rewards

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


def dense_world(items, width, queries, *, duplicates=0):
    """A retriever's parts over random vectors, and the vectors of catalogue and queries."""
    rng = np.random.default_rng(0)
    vectors = unit(rng.normal(size=(items, width)))
    if duplicates:
        vectors[rng.choice(items, duplicates, replace=False)] = vectors[rng.choice(items, duplicates)]
    texts = [f"q{i}" for i in range(queries)]
    wanted = unit(rng.normal(size=(queries, width)))
    encoder = GivenVectors(dict(zip(texts, wanted, strict=True)))
    return Index(vectors, Fingerprint("given", "given"), None), encoder, texts, wanted


def slow_ranks(scores, targets, exclude):
    """One query and one item at a time, in float64; ties count against the target."""
    temperature = ranking.TEMPERATURE
    ranks, probabilities = [], []
    for row, target, out in zip(scores.astype(np.float64), targets, exclude, strict=True):
        before = 0
        total = np.exp(row[target] / temperature)
        for item, score in enumerate(row):
            if item == target or item in out:
                continue
            before += score >= row[target] - ranking.TOLERANCE
            total += np.exp(score / temperature)
        ranks.append(1 + before)
        probabilities.append(np.exp(row[target] / temperature) / total)
    return np.array(ranks), np.array(probabilities)


def tfidf(*, cache=None):
    return retrieval.open_retriever(TITLES, RetrievalSection(cache=cache and str(cache)))


@pytest.mark.parametrize("block", [65536, 64])
def test_dense_ranks_are_those_of_a_loop(block):
    index, encoder, texts, wanted = dense_world(2000, 8, 70, duplicates=200)  # two batches of queries
    rng = np.random.default_rng(1)
    targets = rng.integers(0, 2000, 70)
    exclude = [rng.integers(0, 2000, rng.integers(0, 20)).tolist() for _ in texts]
    exclude[0].append(int(targets[0]))  # the target is ranked all the same
    found = Retriever(LocalBackend(encoder, index, block=block)).score_ranks(texts, targets, exclude)
    out = [set(row) - {int(target)} for row, target in zip(exclude, targets, strict=True)]
    rank, probability = slow_ranks(wanted @ index.vectors.T, targets, out)
    np.testing.assert_array_equal(found.rank, rank)
    np.testing.assert_allclose(found.probability, probability, rtol=2e-5)
    assert found.rank.dtype == np.float64 and found.probability.dtype == np.float32


def test_equal_items_tie_wherever_they_lie():
    """A product of matrices may round equal rows differently at the edge of a block; a tie must not see it."""
    index, encoder, _, _ = dense_world(4099, 384, 3)
    index.vectors[[0, 17, 4095, 4096, 4098]] = encoder.vectors["q0"]
    retriever = Retriever(LocalBackend(encoder, index, block=3))
    assert retriever.score_ranks(["q0"] * 5, [0, 17, 4095, 4096, 4098], [[]] * 5).rank.tolist() == [5] * 5


def test_the_cache_gives_the_same_ranks(tmp_path, monkeypatch):
    first = tfidf(cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("tfidf-")
    monkeypatch.setattr(encoders, "encode_titles", lambda *_: pytest.fail("the catalogue was encoded again"))
    second = tfidf(cache=tmp_path)
    for retriever in (first, second):
        assert retriever.score_ranks(["rose cream"], [6], [[]]).rank == [2]
    assert first.fingerprint == second.fingerprint
    assert encoders.load_index(folder).titles == TITLES


def test_a_damaged_cache_is_named(tmp_path):
    tfidf(cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "vectors.npz").write_bytes(b"broken")
    with pytest.raises(UserError, match="delete it"):
        tfidf(cache=tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cache of the retrieval"):
        tfidf(cache=tmp_path / "file" / "below")


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of NaN
def test_a_catalogue_of_nan_ends_the_run():
    vectors = dict.fromkeys(TITLES, np.ones(2, np.float32)) | {"rose hand cream": np.full(2, np.nan, np.float32)}
    encoder = GivenVectors(vectors)
    backend = LocalBackend(encoder, encoders.open_index(TITLES, encoder, None))
    with pytest.raises(StopRun, match="RetrievalError: 1 of 1 scores are not finite"):
        Retriever(backend, wait=lambda _: None).score_ranks([TITLES[0]], [0], [[]])


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
def test_a_history_is_a_part_of_the_query_for_ranks_and_for_the_nearest(kind):
    rng = np.random.default_rng(4)
    if kind == "sparse":
        words = [f"word{i}" for i in range(40) for _ in range(1 + 40 // (i + 1))]  # some are rare
        titles = [" ".join(rng.choice(words, 4)) for _ in range(300)]
        texts = ["", "   ", "xqzzv vvkq", *(" ".join(rng.choice(words, 3)) for _ in range(67))]  # three say nothing
        encoder = encoders.TfidfEncoder(titles)
        index = encoders.open_index(titles, encoder, None)
        vectors, wanted = (found.toarray().astype(np.float64) for found in (index.vectors, encoder.encode(texts)))
        emphasis = 1 + np.log(301 / (1 + (vectors > 0).sum(0)))
    else:
        index, encoder, texts, wanted = dense_world(1000, 8, 70)
        vectors, emphasis = index.vectors.astype(np.float64), np.ones(8)
    items = len(vectors)
    targets = rng.integers(0, items, 70)
    taken = [rng.integers(0, items, rng.integers(0, 6)).tolist() for _ in texts]
    history = History(taken, 0.7, 0.5)
    backend = LocalBackend(encoder, index, block=64)
    retriever = Retriever(backend)
    scores = by_hand(vectors, wanted, history, emphasis)
    out = [set(rows) - {int(target)} for rows, target in zip(taken, targets, strict=True)]
    for given, expected in ((None, wanted @ vectors.T), (history, scores)):
        rank, probability = slow_ranks(expected, targets, out)
        found = retriever.score_ranks(texts, targets, taken, given)
        np.testing.assert_array_equal(found.rank, rank)
        np.testing.assert_allclose(found.probability, probability, rtol=1e-4)
    listed = backend.nearest(texts, 5, taken, history)
    for pairs, own, rows in zip(listed, scores, taken, strict=True):
        left = [item for item in np.argsort(-own, kind="stable") if item not in rows][:5]
        np.testing.assert_allclose([score for _, score in pairs], own[left], atol=1e-6)
        np.testing.assert_allclose([own[row] for row, _ in pairs], own[left], atol=1e-6)
        assert len({row for row, _ in pairs} - set(rows)) == 5
    none = retriever.score_ranks(texts, targets, taken, history._replace(weight=0.0))
    np.testing.assert_array_equal(none.rank, retriever.score_ranks(texts, targets, taken).rank)


def test_the_targets_title_beats_a_light_history():
    targets, taken = [6, 8, 4], [[2, 0], [1], [7, 8]]
    light = History(taken, 1e-3, 0.7)
    assert tfidf().score_ranks([TITLES[row] for row in targets], targets, taken, light).rank.tolist() == [1, 1, 1]


def test_the_nearest_are_fewer_where_nothing_is_left_and_the_first_of_equal_ones():
    found = ranking.local_backend(TITLES).nearest(["red nail polish", "soap"], 3, [[], range(9)])
    assert [row for row, _ in found[0]] == [0, 3, 1] and found[0][0][1] == pytest.approx(1)
    assert found[1] == [(9, 0.0)]


class Faulty:
    """A backend that fails as it is told, call by call; None lets a call through, a function changes its counts."""

    def __init__(self, *faults):
        self.inner = ranking.local_backend(TITLES)
        self.fingerprint = self.inner.fingerprint
        self.faults = list(faults)

    def count(self, parts):
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        counts = self.inner.count(parts)
        return [fault(one) for one in counts] if fault else counts


def ask(retriever):
    return retriever.score_ranks(["night rose"], [6], [[]])


def test_a_failure_is_tried_again_after_longer_pauses():
    faults = [retrieval.RetrievalError("it died"), retrieval.RetrievalError("nan")]
    pauses = []
    assert ask(Retriever(Faulty(*faults), wait=pauses.append)).rank == [1]
    assert pauses == [1, 2]
    with pytest.raises(ZeroDivisionError):  # a bug is none
        ask(Retriever(Faulty(ZeroDivisionError("a bug")), wait=pytest.fail))


@pytest.mark.parametrize("column", ["score", "log_sum"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_a_failure(column, value, caplog):
    def spoil(counts):
        return counts._replace(**{column: np.full(1, value)})

    retriever = Retriever(Faulty(spoil), wait=lambda _: None)
    with caplog.at_level("WARNING"):
        assert ask(retriever).rank == [1]  # at the second attempt
    assert "a call failed: 1 of 1 scores are not finite" in caplog.text


def test_a_call_that_keeps_failing_ends_the_run_and_is_no_missing_reward():
    retriever = Retriever(Faulty(*[retrieval.RetrievalError("it died")] * 3), wait=lambda _: None)

    def reward(prompts, completions):
        return list(ask(retriever).rank)

    with pytest.raises(StopRun, match="the retrieval failed 3 times: RetrievalError: it died"):
        collect_rewards({"r": reward}, ["p"], ["c"], {}, 1, on_error="missing")
    assert collect_rewards({"r": reward}, ["p"], ["c"], {}, 1).item() == 1
