"""Measures of a rank against slow loops, ranx and hand-made examples."""

import math
import os
from unittest import mock

import numpy as np
import pytest

from grpo_jax.rollout.rewards import collect_rewards
from grpo_jax.tasks.recommendation import baselines, rewards


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
    "ndcg": baselines.ndcg,
    "ndcg@5": lambda rank: baselines.ndcg(rank, k=5),
    "ndcg@10": lambda rank: baselines.ndcg(rank, k=10),
    "hit_rate@5": lambda rank: baselines.hit(rank, k=5),
    "hit_rate@10": lambda rank: baselines.hit(rank, k=10),
    "mrr": baselines.mrr,
    "mrr@10": lambda rank: baselines.mrr(rank, k=10),
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


def test_measures_by_hand():
    rank = np.array([1.0, 2.0, 3.0, 10.0, 11.0])
    np.testing.assert_allclose(baselines.ndcg(rank, k=10), [1, 1 / math.log2(3), 0.5, 1 / math.log2(11), 0])
    np.testing.assert_allclose(baselines.ndcg(rank)[4], 1 / math.log2(12))
    np.testing.assert_allclose(baselines.mrr(rank, k=3), [1, 1 / 2, 1 / 3, 0, 0])
    np.testing.assert_allclose(baselines.hit(rank, k=2), [1, 1, 0, 0, 0])
    np.testing.assert_allclose(baselines.hit(rank, items=20), [1, 0.95, 0.9, 0.55, 0.5])


def test_rewards_are_measures_of_the_rank_or_the_probability():
    rank, probability = np.array([1.0, 2.0, 7.0, 12.0]), [0.5, 0.25, 0.125, 0.0625]
    functions = {"mrr": rewards.make_reward("mrr", 1000, k=10), "soft": rewards.soft}
    values = collect_rewards(functions, ["p"] * 4, ["c"] * 4, rewards.reward_columns(rank, probability), 2)
    np.testing.assert_allclose(values.reshape(4, 2).T, [[1, 0.5, 1 / 7, 0], probability], rtol=1e-6)
