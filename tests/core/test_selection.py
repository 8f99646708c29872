"""What takes part in an update, against loops and NumPy's quantile."""

import jax
import numpy as np
import pytest

from grpo_jax.core.selection import groups_with_signal, high_entropy_mask

pytestmark = pytest.mark.usefixtures("strict")


def test_of_nothing_nothing_has_high_entropy():
    assert not high_entropy_mask(np.ones((4, 6), np.float32), np.zeros((4, 6), bool), share=0.2).any()
    assert high_entropy_mask(np.zeros((0, 3), np.float32), np.zeros((0, 3), bool), share=0.2).shape == (0, 3)


def test_signal_is_judged_per_objective():
    """Summed rewards of 1 and 1 look dead; GDPO still learns from them."""
    nan = np.nan
    rewards = np.array(
        [[[0, 1], [1, 0]], [[1, 5], [1, 6]], [[1, 5], [1, 5]], [[nan, 5], [1, nan]], [[nan, 5], [1, 6]]], np.float32
    )
    np.testing.assert_array_equal(groups_with_signal(rewards), [True, True, False, False, True])
    np.testing.assert_array_equal(groups_with_signal(rewards[:3].sum(-1)), [False, True, False])
    np.testing.assert_array_equal(groups_with_signal(rewards, weights=(1.0, 0.0)), [True] + [False] * 4)
    np.testing.assert_array_equal(jax.jit(groups_with_signal)(rewards), groups_with_signal(rewards))
    np.testing.assert_array_equal(groups_with_signal(np.full((2, 8), 1000.1, np.float32)), False)
