"""When a run that gets no rewards is told so, and when it is over (the commands: tests/runs/test_no_reward.py)."""

import numpy as np
import pytest

from grpo_jax.rollout.rewards import join_names, missing_rewards, missing_streaks, no_reward_lately, no_reward_yet

NONE, SOME = np.full((2, 3), np.nan), np.array([[np.nan, 1.0, np.nan]])
BOTH = {"a": 1.0, "b": 0.5}
NEITHER, ONLY_A, ONLY_B = (NONE, NONE), (SOME, NONE), (NONE, SOME)


def after(*iterations, weights=BOTH):
    """The count after iterations, each given as the values of rewards a and b."""
    streaks = {}
    for values in iterations:
        streaks = missing_streaks(streaks, dict(zip("ab", values, strict=True)), weights)
    return streaks


@pytest.mark.parametrize(
    ("iterations", "weights", "streaks"),
    [
        ([NEITHER, ONLY_A], BOTH, {"a": 0, "b": 2}),
        ([ONLY_A, NEITHER], BOTH, {"a": 1, "b": 2}),
        ([NEITHER], {"a": 1.0, "b": 0.0}, {"a": 1}),  # b is not maximised
        ([NEITHER], {"a": 0.0, "b": 0.0}, {"a": 1, "b": 1}),
    ],
)
def test_a_reward_is_absent_if_no_completion_has_it(iterations, weights, streaks):
    assert after(*iterations, weights=weights) == streaks


def test_a_run_stops_where_all_rewards_are_absent_for_long():
    assert no_reward_lately(after(*[NEITHER] * 3), 9) == "no completion got a reward in 3 iterations in a row (a, b)"
    others = [[NEITHER] * 2, [*[NEITHER] * 3, ONLY_A], [ONLY_A] * 9, [ONLY_B, ONLY_A] * 5, []]
    assert not any(no_reward_lately(after(*iterations), 9) for iterations in others)
    assert missing_rewards({"a": NONE, "b": SOME}, {"a": -1.0, "b": 1.0}) == ["a"]


@pytest.mark.parametrize(("iterations", "due"), [(2, 2), (9, 3)])
def test_a_single_reward_that_never_came_is_noted_once(iterations, due):
    notes = [no_reward_yet(after(*[ONLY_A] * n), n, iterations) for n in range(1, iterations + 1)]
    assert notes.pop(due - 1) == f"no completion got the reward b in the first {due} iterations" and not any(notes)
    assert not no_reward_yet(after(*[NEITHER] * due), due, iterations)
    assert join_names(["a"]) == "a" and join_names(list("abcde")) == "a, b, c and 2 more"
