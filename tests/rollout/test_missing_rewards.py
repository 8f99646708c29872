"""When a run that gets no rewards is told so, and when it is over."""

import numpy as np
import pytest

from grpo_jax.rollout.rewards import (
    MISSING_ITERATIONS,
    join_names,
    missing_rewards,
    missing_streaks,
    no_reward_lately,
    no_reward_yet,
)

NONE, SOME = np.full((2, 3), np.nan), np.array([[np.nan, 1.0, np.nan]])


def after(*iterations, weights=None):
    """The count after iterations, each given as the values of rewards a and b."""
    weights, absent = weights or {"a": 1.0, "b": 0.5}, {}
    for values in iterations:
        absent = missing_streaks(absent, dict(zip("ab", values, strict=True)), weights)
    return absent


def test_a_reward_is_absent_if_no_completion_has_it():
    assert after((NONE, NONE), (SOME, NONE)) == {"a": 0, "b": 2}
    assert after((SOME, NONE), (NONE, NONE)) == {"a": 1, "b": 2}
    assert after((NONE, NONE), weights={"a": 1.0, "b": 0.0}) == {"a": 1}  # b is not maximised
    assert after((NONE, NONE), weights={"a": 0.0, "b": 0.0}) == {"a": 1, "b": 1}
    assert missing_rewards({"a": NONE, "b": SOME}, {"a": -1.0, "b": 1.0}) == ["a"]


def test_a_run_stops_where_all_rewards_are_absent_for_long():
    silence = [(NONE, NONE)] * MISSING_ITERATIONS
    assert no_reward_lately(after(*silence), 9) == "no completion got a reward in 3 iterations in a row (a, b)"
    assert not no_reward_lately(after(*silence[:-1]), 9)
    assert not no_reward_lately(after(*silence, (SOME, NONE)), 9)
    assert not no_reward_lately(after(*[(SOME, NONE)] * 9), 9)  # b may apply to none of these prompts
    assert not no_reward_lately(after(*[(NONE, SOME), (SOME, NONE)] * 5), 10)
    assert not no_reward_lately({}, 9) and not no_reward_lately({}, 0)


@pytest.mark.parametrize("iterations", [2, 9])
def test_a_single_reward_that_never_came_is_noted_once(iterations):
    notes = [no_reward_yet(after(*[(SOME, NONE)] * n), n, iterations) for n in range(1, iterations + 1)]
    due = min(MISSING_ITERATIONS, iterations)
    assert notes[due - 1] == f"no completion got the reward b in the first {due} iterations"
    assert not any(notes[: due - 1] + notes[due:])
    assert not no_reward_yet(after(*[(NONE, NONE)] * due), due, iterations)
    assert not no_reward_yet(after((SOME, SOME), *[(SOME, NONE)] * 5), 6, 9)


def test_long_lists_are_cut():
    assert join_names(["a"]) == "a" and join_names(list("abcde")) == "a, b, c and 2 more"
