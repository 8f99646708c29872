"""The benchmark of the time to a reward: when it is reached, its table, and what a text's digits are worth."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import reward_work  # noqa: E402
import time_to_reward  # noqa: E402


def run(*rewards: float, slowness: float = 1.0) -> dict:
    steps = [
        {"reward": reward, "cpu": slowness * place, "wall": 2 * slowness * place, "peak_mib": 50 * slowness}
        for place, reward in enumerate(rewards, start=1)
    ]
    return {"steps": steps, "process": {"peak_mib": 100 * slowness}}


def test_a_reward_is_reached_by_a_trailing_mean():
    steps = run(0.9, 0.0, 0.3, 0.6, 0.6)["steps"]
    assert time_to_reward.reached(steps, 0.5, window=3) == {"step": 5, "cpu": 5, "wall": 10}
    assert time_to_reward.reached(steps, 0.4, window=3) == {"step": 3, "cpu": 3, "wall": 6}
    assert time_to_reward.reached(steps, 0.8, window=3) is None


def test_the_table_tells_medians_seeds_and_ratios():
    rewards = (0.5, 0.5, 0.5, 0.5, 0.5, 0.9)
    quick, slow = run(*rewards), run(*rewards, slowness=4)
    rows = {"ours": time_to_reward.summary([quick, quick]), "trl": time_to_reward.summary([slow, slow])}
    ratios = time_to_reward.ratios(rows)
    assert ratios["cpu to 0.5"] == ratios["peak MiB, process"] == ratios["cpu of a later step"] == 0.25
    assert ratios["step to 0.5"] == 1 and "cpu to 0.8" not in ratios
    lines = time_to_reward.table(rows).splitlines()
    assert "| cpu to 0.5 | 5.0 (5.0, 5.0) | 20.0 (20.0, 20.0) | 0.25 |" in lines
    assert "| cpu to 0.8 | never (never, never) | never (never, never) | – |" in lines


@pytest.mark.parametrize(("text", "worth"), [("70", 1), ("34 + 36 = 70.", 1), ("71", 0.5), ("700", 2 / 3), ("so", 0)])
def test_the_last_number_is_worth_its_right_digits(text, worth):
    message = [{"role": "assistant", "content": text}]
    assert reward_work.digits([""] * 2, [text, message], ["70"] * 2) == pytest.approx([worth] * 2)


def test_both_libraries_get_the_same_prompts():
    first, again = time_to_reward.drawn(0, 2), time_to_reward.drawn(0, 2)
    assert first == again and len(first) == 2 * reward_work.PROMPTS
    assert first != time_to_reward.drawn(1, 2)
