"""Eval rewards as guards: one that falls while the reward rises is reported, and never makes the best checkpoint."""

import json

import numpy as np
import pytest
import yaml
from support.text_task import DONE, rows, train_values

from grpo_jax.reports.console import result_lines
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.metrics import regressed_measures

JUDGE = f"""{DONE}
def pleased(completions):
    if os.environ["JUDGE"] == f"raise:{{done()}}":
        raise RuntimeError("the reward is away")
    return [done() + len(text) / 1000 for text in completions]

def honest(completions):
    return [1 - done() / 8 + len(text) / 1000 for text in completions]
"""


def test_regressed_measures_need_twice_the_standard_error():
    rng = np.random.default_rng(0)
    start = rng.random(40)
    noise = rng.normal(size=40)
    noise = (noise - noise.mean()) / noise.std(ddof=1) * np.sqrt(40)  # the standard error of its mean is 1
    after = {
        "fell": start - 2.01 + noise, "by_chance": start - 1.99 + noise, "rose": start + 3.0, "same": start,
        "all_alike": start - 0.01, "rounding": start - 1e-9, "missing": np.full(40, np.nan), "new": start - 1,
    }  # fmt: skip
    before = {name: start for name in after if name != "new"}
    assert regressed_measures(before, after) == ["all_alike", "fell"]
    some = np.where(np.arange(40) < 20, np.nan, after["all_alike"])
    assert regressed_measures({"some": start}, {"some": some}) == ["some"]  # over the prompts that have both
    assert regressed_measures({"one": [1.0]}, {"one": [0.0]}) == [] == regressed_measures({}, after)


@pytest.fixture(scope="module")
def config(place, tmp_path_factory):
    folder = tmp_path_factory.mktemp("suspect")
    (folder / "judge.py").write_text(JUDGE)
    values = yaml.safe_load(place.config.read_text())
    values |= {"algorithm": {}, "optimizer": {"learning_rate": 0.01, "warmup_steps": 3}}
    values["training"] = {"prompts_per_batch": 4, "max_steps": 3, "save_every": 0}
    values["evaluation"] = {"every": 1, "samples": 0}
    values["rewards"] = [{"name": f"{folder / 'judge.py'}:pleased"}]
    values["eval_rewards"] = [f"{folder / 'judge.py'}:honest"]
    return values


def train(values, folder, *arguments, judge="work", expected=0):
    train_values(values, folder, *arguments, judge=judge, expected=expected)
    return json.loads((folder / "summary.json").read_text()) if expected == 0 else {}


@pytest.fixture(scope="module")
def gamed(config, tmp_path_factory):
    """A run whose judge is the more pleased the longer it goes on; stopped by it after two iterations."""
    folder = tmp_path_factory.mktemp("gamed") / "run"
    train(config, folder, judge="raise:2", expected=2)
    return folder, train(config, folder, "--resume")


def test_a_run_names_measures_that_fell_while_the_reward_rose(gamed):
    folder, summary = gamed
    assert summary["suspect"] == ["honest"] and summary["improvement"] > 0
    (line,) = [line for line in result_lines(summary) if line.startswith("suspect: ")]
    assert line.startswith("suspect: honest fell from ") and line in (folder / "train.log").read_text()
    assert line in (folder / "report.html").read_text()


def test_no_best_checkpoint_has_regressed_eval_rewards(gamed):
    folder, summary = gamed
    scores = [row["validation/score"] for row in rows(folder)]
    assert scores[0] < scores[1] < scores[2]  # the first is measured before the judge turns
    assert summary["best"] == {"iteration": 1, "validation_score": scores[0]}
    log = (folder / "train.log").read_text()
    assert (
        log.count("honest fell below their initial values; not saved as best") == 2
        and "after iteration 1: honest" not in log
    )


@pytest.fixture(scope="module")
def later(config, tmp_path_factory):
    """A run of two iterations whose completions of one token have no end."""
    folder = tmp_path_factory.mktemp("later") / "run"
    short = config["sampling"] | {"max_new_tokens": 1}
    values = config | {"training": config["training"] | {"max_steps": 2}, "sampling": short}
    return folder, train(values | {"evaluation": {"every": 2, "samples": 0}}, folder)


def test_no_checkpoint_is_best_if_all_regressed(later):
    folder, summary = later
    assert summary["best"] == {"iteration": 0, "validation_score": None}
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        assert "best" not in checkpoints.available()


def test_a_run_warns_if_no_completion_ends(later):
    folder, summary = later
    line = "truncated: every completion of the last 2 iterations reached sampling.max_new_tokens"
    assert line in (folder / "train.log").read_text() and line in (folder / "report.html").read_text()
    assert line in result_lines(summary) and line not in result_lines(summary | {"truncated_iterations": 0})
