"""Statistics of the benchmarks over seeds, against SciPy's t-tests."""

import math
import sys
from pathlib import Path

import pytest
from scipy import stats

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from seeds import mean_interval, paired_difference

FIRST = {300: 0.91, 301: 0.84, 302: 0.97, 303: 0.88, 304: 0.9}
SECOND = {304: 0.7, 301: 0.81, 302: 0.66, 303: 0.9, 300: 0.55}


def test_the_interval_of_a_mean_is_that_of_the_t_test():
    low, high = stats.ttest_1samp([*FIRST.values()], 0.0).confidence_interval(0.95)
    assert mean_interval([*FIRST.values()]) == pytest.approx((sum(FIRST.values()) / 5, low, high))


def test_differences_are_paired_by_seed():
    """The second arm's seeds come in another order."""
    low, high = stats.ttest_rel([*FIRST.values()], [SECOND[seed] for seed in FIRST]).confidence_interval(0.95)
    assert paired_difference(FIRST, SECOND) == pytest.approx((0.176, low, high))


def test_seeds_of_one_arm_alone_do_not_count():
    shared = {seed: SECOND[seed] for seed in (300, 301, 302)}
    assert paired_difference(FIRST, {**shared, 999: 5.0}) == paired_difference({s: FIRST[s] for s in shared}, shared)
    with pytest.raises(ValueError, match="at least one seed"):
        paired_difference(FIRST, {999: 5.0})


def test_one_seed_has_no_interval():
    one = mean_interval([0.25])
    assert one.mean == 0.25
    assert math.isnan(one.low)
    assert str(one) == "+0.250"
    assert str(mean_interval([1.0, 2.0])) == "+1.500 (-4.853 to +7.853)"
