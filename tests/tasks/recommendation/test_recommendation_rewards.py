"""Rewards of the recommendation task: values, options, missing ranks, and the way through `collect_rewards`."""

import math

import numpy as np
import pytest

from grpo_jax.rollout.rewards import collect_rewards
from grpo_jax.tasks.recommendation import baselines, rewards

RANK = np.array([1.0, 2.0, 7.0, np.nan, 12.0, 1000.0])
PROBABILITY = np.array([0.5, 0.25, 0.125, np.nan, 0.0625, 0.0], np.float32)


def call(reward, rank=RANK, probability=PROBABILITY):
    columns = rewards.reward_columns(rank, probability)
    return reward(prompts=["p"] * len(rank), completions=["c"] * len(rank), user=["u"] * len(rank), **columns)


@pytest.mark.parametrize(
    ("name", "options", "measure"),
    [
        ("ndcg", {}, baselines.ndcg),
        ("ndcg", {"k": 10.0}, lambda rank: baselines.ndcg(rank, k=10)),
        ("mrr", {"k": 0.0}, baselines.mrr),
        ("mrr", {"k": 2}, lambda rank: baselines.mrr(rank, k=2)),
        ("hit", {"k": 10}, lambda rank: baselines.hit(rank, k=10)),
        ("hit", {}, lambda rank: baselines.hit(rank, items=1000)),
    ],
)
def test_a_reward_is_its_measure_and_a_missing_rank_a_missing_reward(name, options, measure):
    values = call(rewards.make_reward(name, 1000, **options))
    assert values[3] is call(rewards.soft)[3] is None and call(rewards.soft)[1] == 0.25
    expected = measure(RANK)
    assert all(type(value) is float for i, value in enumerate(values) if i != 3)
    np.testing.assert_allclose([math.nan if v is None else v for v in values], expected, rtol=1e-12)


def test_a_reward_of_the_users_own_never_sees_a_missing_rank():
    seen = []

    def own(rank, target_title):
        seen.append((list(rank), list(target_title)))
        return np.array([1 / r for r in rank])

    columns = {"target_title": list("abcdef"), **rewards.reward_columns(RANK, PROBABILITY)}
    wrapped = rewards.where_ranked(own)
    assert wrapped.__name__ == "own"
    values = collect_rewards({"own": wrapped}, ["p"] * 6, ["c"] * 6, columns, 2)
    assert seen == [([1.0, 2.0, 7.0, 12.0, 1000.0], ["a", "b", "c", "e", "f"])]
    np.testing.assert_allclose(values[:, :, 0], [[1, 0.5], [1 / 7, math.nan], [1 / 12, 1e-3]], rtol=1e-6)
    nothing = columns | rewards.reward_columns(np.full(6, math.nan), PROBABILITY)
    assert np.isnan(collect_rewards({"own": wrapped}, ["p"] * 6, ["c"] * 6, nothing, 2)).all()
    assert len(seen) == 1
