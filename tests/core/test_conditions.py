"""Conditioned rewards: an easy objective counts only where the hard one it waits for is reached."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from grpo_jax.core.advantages import Condition, condition_rewards, gdpo_advantages

pytestmark = pytest.mark.usefixtures("strict")

# Multiples of 1/4, so that rewards often lie on a threshold; a few are missing.
steps = st.integers(-8, 8).map(lambda n: np.float32(n / 4))
maybe = st.one_of(steps, steps, steps, st.just(np.float32(np.nan)))


@given(hnp.arrays(np.float32, (2, 3, 3), elements=maybe))
def test_conditions_are_the_loop(rewards):
    """0 waits for 1, which waits for 2."""
    got = condition_rewards(rewards, [Condition(0, 1, 0.5), Condition(1, 2, 0.0)])
    for p, g in np.ndindex(2, 3):
        a, b, c = rewards[p, g]
        a_unmet, b_unmet = (min([0.0, *(r for r in rewards[p, :, n] if not np.isnan(r))]) for n in (0, 1))
        b_expected = np.nan if np.isnan(b) or np.isnan(c) else (b if c >= 0 else b_unmet)
        a_missing = np.isnan(a) or np.isnan(b) or np.isnan(c)
        a_expected = np.nan if a_missing else (a if b >= 0.5 and c >= 0 else a_unmet)
        np.testing.assert_array_equal(got[p, g], np.array([a_expected, b_expected, c], np.float32))


def test_conditions_compare_raw_rewards():
    """b's own condition replaces its 2 by 0; a waits for b, and so for c too."""
    rewards = jnp.array([[[5.0, 2.0, 1.0], [4.0, 2.0, 9.0]]])
    got = condition_rewards(rewards, [Condition(1, 2, 9.0), Condition(0, 1, 1.0)])
    np.testing.assert_array_equal(got, [[[0.0, 0.0, 1.0], [4.0, 2.0, 9.0]]])


def test_an_unmet_condition_never_pays():
    """Two right answers of 5 and 6 tokens, six wrong ones of 3 to 8; brevity counts where the answer is right."""
    right = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    brief = [-5.0, -6.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]
    rewards = jnp.array([[brief, right]]).swapaxes(1, 2)
    got = condition_rewards(rewards, [Condition(0, 1, 1.0)])
    np.testing.assert_array_equal(got[0, :, 0], [-5.0, -6.0, *[-8.0] * 6])
    advantages = gdpo_advantages(got)[0]
    assert advantages[0] > advantages[1] > 0 > advantages[2:].max()


def test_several_conditions_on_one_objective_must_all_hold():
    rewards = jnp.array([[[5.0, 1.0, 0.0], [5.0, 1.0, 1.0]]])
    got = condition_rewards(rewards, [Condition(0, 1, 1.0), Condition(0, 2, 1.0)])
    np.testing.assert_array_equal(got[..., 0], [[0.0, 5.0]])


R2, R3 = np.zeros((2, 3), np.float32), np.zeros((2, 3, 2), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: condition_rewards(R3, [Condition(0, 2, 0.0)]), ValueError, r"indices must be in 0..1, got 0 and 2"),
        (lambda: condition_rewards(R3, [Condition(-1, 0, 0.0)]), ValueError, r"indices must be in 0..1, got -1 and 0"),
        (lambda: condition_rewards(R3, [Condition(0, 0, 0.0)]), ValueError, "cycle, got 0 -> 0"),
        (
            lambda: condition_rewards(R3, [Condition(0, 1, 0.0), Condition(1, 0, 0.0)]),
            ValueError,
            "must not form a cycle, got 0 -> 1 -> 0",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
