"""Measures of a rank and baselines against slow loops, ranx and hand-made examples; the table."""

import os
from collections import Counter
from unittest import mock

import numpy as np
import pytest

from bridges.retrieval.ranking import Ranks
from grpo_jax.core.pass_at_k import mean_interval
from grpo_jax.rollout.rewards import collect_rewards
from grpo_jax.tasks.recommendation import baselines, rewards
from grpo_jax.tasks.recommendation import report as table
from grpo_jax.tasks.recommendation.catalogue import Catalogue, UserSequence
from grpo_jax.tasks.recommendation.dataset import last_split, split_examples
from grpo_jax.tasks.recommendation.task import Recommendation

ITEMS = 25


def random_users():
    rng = np.random.default_rng(0)
    popular = 1 / np.arange(1, ITEMS + 1)
    chosen = [
        rng.choice(ITEMS, rng.integers(4, 10), replace=False, p=popular / popular.sum()).tolist() for _ in range(40)
    ]
    return [UserSequence(f"u{u}", tuple(items)) for u, items in enumerate(chosen)]


USERS = random_users()
CATALOGUE = Catalogue(tuple(f"i{i}" for i in range(ITEMS)), tuple(f"word{i % 5} thing{i % 7}" for i in range(ITEMS)))
KNOWN = last_split(USERS).known
ROWS = split_examples(last_split(USERS), CATALOGUE, Recommendation()).test


class WordRetriever:
    """Cosine of word counts, in NumPy."""

    def score_ranks(self, texts, targets, exclude):
        scores = (
            np.stack([self._vector(text) for text in texts])
            @ np.stack([self._vector(title) for title in CATALOGUE.titles]).T
        )
        rank = baselines.target_ranks(scores, np.array(targets), exclude, tolerance=1e-9)
        return Ranks(rank, np.zeros(len(rank)))

    def _vector(self, text):
        counts = Counter(text.split())
        names = [f"word{i}" for i in range(5)] + [f"thing{i}" for i in range(7)]
        vector = np.array([counts[name] for name in names], float)
        return vector / max(np.linalg.norm(vector), 1e-12)


def slow_ranks(score):
    """Ranks from score(history, item), one item at a time; ties against the target."""
    ranks = []
    for row in ROWS:
        history, target = row.columns["history"], row.columns["target_row"]
        own = score(history, target)
        others = [item for item in range(ITEMS) if item not in history and item != target]
        ranks.append(1 + sum(score(history, item) >= own - 1e-9 for item in others))
    return ranks


def ranked(score):
    return baselines.rank_all(score, ROWS, items=ITEMS)


@pytest.mark.parametrize("block", [7, 512])
def test_popularity_counts_users_in_training(block, monkeypatch):
    monkeypatch.setattr(baselines, "_MOST_USERS", block)
    counts = Counter(item for user in USERS for item in user.items[:-2])
    ranks = ranked(baselines.popularity(KNOWN, ITEMS))
    assert ranks.tolist() == slow_ranks(lambda history, item: counts[item])


@pytest.mark.parametrize("decay", [1.0, 0.7, 0.0])
def test_item_knn_sums_cosines_over_the_history(decay):
    takers = {item: {user.user for user in USERS if item in user.items[:-2]} for item in range(ITEMS)}

    def cosine(a, b):
        both = len(takers[a] & takers[b])
        return both / (len(takers[a]) * len(takers[b])) ** 0.5 if both and a != b else 0.0

    def score(history, item):
        return sum(decay**age * cosine(old, item) for age, old in enumerate(reversed(history)))

    similarity = baselines.item_similarity(KNOWN, ITEMS)
    ranks = ranked(baselines.item_knn(similarity, ROWS, decay=decay))
    assert ranks.tolist() == slow_ranks(score)


def test_markov_counts_steps_and_falls_back_on_popularity():
    steps = Counter(pair for user in USERS for pair in zip(user.items[:-2], user.items[1:-2], strict=False))
    counts = Counter(item for user in USERS for item in user.items[:-2])

    def score(history, item):
        return steps[history[-1], item] + counts[item] / 1000

    ranks = ranked(baselines.markov(KNOWN, ITEMS, ROWS))
    assert ranks.tolist() == slow_ranks(score)


def test_title_baselines_ask_with_the_last_title_and_the_own_title():
    retriever = WordRetriever()
    ranks = baselines.title_baselines(retriever.score_ranks, ROWS)
    vectors = [retriever._vector(title) for title in CATALOGUE.titles]
    assert list(ranks) == ["last title", "oracle: own title"]
    assert ranks["last title"].tolist() == slow_ranks(lambda history, item: vectors[history[-1]] @ vectors[item])
    best = [1 + sum(CATALOGUE.titles[i] == row.columns["target_title"] for i in range(ITEMS) if i not in
            (*row.columns["history"], row.columns["target_row"])) for row in ROWS]  # fmt: skip
    assert ranks["oracle: own title"].tolist() == best


def test_a_table_holds_every_method_and_measure():
    ranks = {name: ranked(score) for name, score in baselines.count_baselines(KNOWN, ITEMS, ROWS).items()}
    ranks |= baselines.title_baselines(WordRetriever().score_ranks, ROWS)
    row, *others = table.make_table(ranks)
    assert [row.method, *(other.method for other in others)] == list(ranks)
    chosen = ranks["popularity"]
    assert row.users == len(chosen)
    gains = {"HR": np.ones_like(chosen), "NDCG": 1 / np.log2(1 + chosen), "MRR": 1 / chosen}
    expected = {f"{name}@{k}": (gain * (chosen <= k)).mean() for name, gain in gains.items() for k in table.CUTOFFS}
    means = {name: interval.mean for name, interval in row.measures.items()}
    assert means == pytest.approx(expected | {"MRR": (1 / chosen).mean()}, rel=1e-12)
    assert all(interval.low <= interval.mean <= interval.high for interval in row.measures.values())


def test_paired_differences_are_those_of_the_same_users():
    """A small gain of a quarter of them is clear of zero, though the two methods' own intervals overlap."""
    worse, better = np.array([1.0, 3.0, 3.0, 50.0] * 10), np.array([1.0, 2.0, 3.0, 50.0] * 10)
    first, same = table.paired_table({"after": better, "before": worse}, [("after", "before"), ("after", "after")])
    assert (first.method, first.users) == ("after − before", 40)
    gain = np.array([0.0, 1 / np.log2(3) - 1 / 2, 0.0, 0.0] * 10)
    assert first.measures["NDCG@10"].mean == pytest.approx(gain.mean(), rel=1e-12)
    drawn = mean_interval(gain)
    assert first.measures["NDCG@10"] == pytest.approx(drawn, rel=1e-12) and drawn.low > 0
    assert set(same.measures["MRR"]) == {0.0}
    before, after = (row.measures["NDCG@10"] for row in table.make_table({"b": worse, "a": better}))
    assert after.low < before.high
    line = table.format_table([first], signed=True).splitlines()[1]
    assert line.startswith("after − before") and f"{gain.mean():+.4f} [" in line and line.count("*") == 3  # not in HR
    assert "+0.0000 [+0.0000, +0.0000]" in table.format_table([same], signed=True)


@pytest.mark.parametrize(
    ("scores", "target", "history", "tolerance", "expected"),
    [
        (np.zeros(7), 3, [0, 1], 0.0, (0, 4)),  # a query that says nothing is last
        ([0.1, 0.9, 0.5], 2, [1, 2, 2], 0.0, (0, 0)),  # the target is ranked although the history holds it
        ([0.3, 0.1 + 0.2, 0.3 - 1e-12, 0.2], 0, [], 0.0, (1, 0)),
        ([0.3, 0.1 + 0.2, 0.3 - 1e-12, 0.2], 0, [], 1e-9, (0, 2)),  # a tolerance makes ties of roundings
    ],
)
def test_items_before_and_level_with_the_target_by_hand(scores, target, history, tolerance, expected):
    rank = baselines.target_ranks(np.array([scores]), np.array([target]), [history], tolerance=tolerance)
    assert rank.tolist() == [1 + sum(expected)]  # items before the target, and level with it


MEASURES = {
    "ndcg": lambda rank: baselines.gain("ndcg", rank),
    "ndcg@5": lambda rank: baselines.gain("ndcg", rank, k=5),
    "ndcg@10": lambda rank: baselines.gain("ndcg", rank, k=10),
    "hit_rate@5": lambda rank: baselines.gain("hit", rank, k=5),
    "hit_rate@10": lambda rank: baselines.gain("hit", rank, k=10),
    "mrr": lambda rank: baselines.gain("mrr", rank),
    "mrr@10": lambda rank: baselines.gain("mrr", rank, k=10),
}


@pytest.mark.filterwarnings("ignore")
def test_measures_agree_with_ranx():
    with mock.patch.dict(os.environ, NUMBA_DISABLE_JIT="1"):  # compiling its loops takes half a minute
        ranx = pytest.importorskip("ranx")
    rng = np.random.default_rng(0)
    scores = rng.permuted(np.tile(np.arange(40.0), (25, 1)), axis=1)  # no two alike: ranx knows no rule for ties
    targets = rng.integers(0, 40, 25)
    ranks = baselines.target_ranks(scores, targets, [[]] * 25)
    qrels = ranx.Qrels({f"u{u}": {f"i{target}": 1} for u, target in enumerate(targets)})
    run = ranx.Run({f"u{u}": {f"i{i}": score for i, score in enumerate(row)} for u, row in enumerate(scores)})
    ranx.evaluate(qrels, run, list(MEASURES))
    for name, measure in MEASURES.items():
        theirs = [run.scores[name][f"u{u}"] for u in range(25)]
        np.testing.assert_allclose(measure(ranks), theirs, rtol=0, atol=1e-12, err_msg=name)


def test_a_hit_without_k_is_the_share_of_items_behind():
    np.testing.assert_allclose(baselines.gain("hit", np.array([1.0, 2.0, 11.0]), items=20), [1, 0.95, 0.5])


def test_rewards_are_measures_of_the_rank_or_the_probability():
    rank, probability = np.array([1.0, 2.0, 7.0, 12.0]), [0.5, 0.25, 0.125, 0.0625]
    functions = {"mrr": rewards.RankReward("mrr", 1000, k=10), "soft": rewards.soft}
    values = collect_rewards(functions, ["p"] * 4, ["c"] * 4, {"rank": rank, "probability": probability}, 2)
    np.testing.assert_allclose(values.reshape(4, 2).T, [[1, 0.5, 1 / 7, 0], probability], rtol=1e-6)
