"""`algorithm.standardise_rewards` through the command: the deviation of all batches, kept by a checkpoint."""

import numpy as np
import pytest
import yaml
from support.text_task import completions, rows, train_values

from grpo_jax.config.command_line import make_config
from grpo_jax.core.advantages import group_advantages
from grpo_jax.errors import UserError

SCALED = """
def scaled(completions):
    return [1000 * (len(text) - text.count(" ")) for text in completions]

def spaces(completions, trainer_state):
    if os.environ["JUDGE"] == f"raise:{trainer_state.global_step}":
        raise RuntimeError("the reward is away")
    return [text.count(" ") / 100 for text in completions]
"""


@pytest.fixture(scope="module")
def config(place, tmp_path_factory):
    judge = tmp_path_factory.mktemp("standardised") / "judge.py"
    judge.write_text(f"import os\n{SCALED}")
    values = yaml.safe_load(place.config.read_text())
    values["algorithm"] = {"advantage": "grpo", "standardise_rewards": True}
    values["evaluation"] = {"every": 0, "samples": 0}
    values["data"]["held_out"] = 0
    values["training"] = {"prompts_per_batch": 4, "max_steps": 3, "save_every": 1}
    values["rewards"] = [{"name": f"{judge}:scaled"}, {"name": f"{judge}:spaces", "weight": 2.0}]
    return values


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("standardised") / "run"
    train_values(config, folder)
    return folder


def test_advantages_are_those_of_rewards_over_the_deviation_of_all_batches(run):
    """A plain loop over the batches so far, this one included."""
    seen = [], []
    for step in (1, 2, 3):
        table = completions(run, step)
        rewards = [np.array(table[f"reward/{name}"], np.float64) for name in ("scaled", "spaces")]
        total = np.zeros(16)
        for values, past, weight in zip(rewards, seen, (1.0, 2.0), strict=True):
            past.extend(values)
            total += weight * values / (np.std(past, ddof=1) + 1e-4)
        advantages = np.array(table["advantage"])
        expected = group_advantages(total.reshape(4, 4).astype(np.float32))
        np.testing.assert_allclose(advantages.reshape(4, 4), expected, atol=1e-4)


def test_a_run_that_stopped_continues_with_the_moments(config, run, tmp_path):
    folder = tmp_path / "run"
    train_values(config, folder, judge="raise:2", expected=2)
    train_values(config, folder, "--resume")
    assert rows(folder) == rows(run)


@pytest.mark.parametrize("advantage", ["gdpo", "maxrl"])
def test_estimators_that_standardise_themselves_refuse_it(advantage):
    with pytest.raises(UserError, match="standardise_rewards: expected false with advantage"):
        make_config(task="text", algorithm={"advantage": advantage, "standardise_rewards": True})
