"""A run in which no completion gets a reward: it stops with a message, and resumes once there are rewards."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from support.rollouts import rollout_of
from support.text_task import rows, train_values

from grpo_jax.config.run import make_config
from grpo_jax.rollout.env import Episode, Turn
from grpo_jax.rollout.tools import Toolbox
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.endings import rewards_missing_reason
from grpo_jax.runs.loading import load
from grpo_jax.runs.metrics import reward_streaks, streak_warnings
from grpo_jax.runs.session import Notes, Progress

JUDGE = """
import os

def rare(completions, **columns):
    return [{"on": 1.0, "half": 0.5}.get(os.environ["JUDGE"])] * len(completions)

def never(completions, **columns):
    return [None] * len(completions)
"""


@pytest.fixture
def values(place, tmp_path):
    """The tiny text task with a reward that may come and one that never does."""
    (tmp_path / "judge.py").write_text(JUDGE)
    values = yaml.safe_load(place.config.read_text())
    values["rewards"] = [{"name": f"{tmp_path / 'judge.py'}:{name}"} for name in ("rare", "never")]
    values["optimizer"]["schedule"] = "constant"
    values["training"] |= {"inner_epochs": 1, "minibatches": 1, "save_every": 1, "max_steps": 4}
    return values | {"algorithm": {}, "evaluation": {"every": 0, "prompts": 2, "samples": 0}}


def streaks(run):
    """Return the streaks in the last checkpoint."""
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.read_meta("latest")["progress"]["notes"]["streaks"]


def test_a_run_without_rewards_stops_and_resumes(values, tmp_path, capsys):
    run = tmp_path / "run"
    train_values(values, run, judge="off", expected=2)
    out, error = capsys.readouterr()
    assert "warning: no held-out completion got the reward rare, never" in out
    assert error.startswith("error: no completion got a reward in 3 iterations in a row (rare, never). Saved after")
    assert f"continue with --resume --run_dir {run}" in error and error.count("\n") == 1
    assert len(rows(run)) == 3 and streaks(run) == {"rare": 3, "never": 3}
    train_values(values, run, "--resume", judge="on")
    assert [row["missing/rare"] for row in rows(run)] == [1, 1, 1, 0]
    assert streaks(run) == {"rare": 0, "never": 4}


def test_maxrl_refuses_rewards_other_than_0_and_1(values, tmp_path, capsys):
    train_values(values, tmp_path / "run", "--algorithm.advantage=maxrl", judge="half", expected=2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "algorithm.advantage 'maxrl' needs a sum of rewards of 0 or 1, got 0.5: return 0 or 1, or take" in error


def test_a_short_run_without_rewards_has_a_reason_to_end(tmp_path):
    progress = Progress(1, 1, None, 0, {}, {}, Notes(streaks={"rare": 1, "never": 1}))
    told = rewards_missing_reason(progress, str(tmp_path))
    assert told.startswith("no completion got a reward in 1 iterations in a row (rare, never). Saved after iteration 1")
    assert told.endswith("and start again") and not rewards_missing_reason(
        progress._replace(iterations=4), str(tmp_path)
    )


@pytest.mark.parametrize(("advantage", "streak", "constant"), [("return", 0, {"rare": [2.0, 1]}), ("last", 1, {})])
def test_a_reward_of_an_earlier_turn_counts_where_it_trains(values, advantage, streak, constant):
    """With "return" each turn is judged, with "last" the end of an episode alone."""
    algorithm = make_config(values).algorithm.replace(turn_advantage=advantage)
    rewards = np.array([[[[2.0], [np.nan]]] * 2], np.float32)  # [P, G, U, N]
    rollout = SimpleNamespace(rewards=rewards, final_rewards=rewards[:, :, -1], samples=None)
    ctx = SimpleNamespace(
        config=SimpleNamespace(algorithm=algorithm, data=make_config(values).data),
        fns=SimpleNamespace(reward_names=("rare",)),
        rewards=SimpleNamespace(weights={"rare": 1.0}),
    )
    notes = reward_streaks(ctx, rollout, Notes())
    assert notes.streaks == {"rare": streak} and notes.constant == constant


def root(a: int) -> float:
    """
    Returns the square root.

    Args:
        a: A number.
    """
    return math.sqrt(a)  # noqa: F821  # the user's mistake


def test_tools_that_only_fail_give_a_warning(values):
    """Such as a tool with a mistake in it, whose error the policy alone would read."""
    config = make_config(values | {"data": {"tools": ["tools.py:root"]}, "sampling": {"turns": 2}})
    ctx = SimpleNamespace(
        config=config,
        fns=SimpleNamespace(reward_names=("one",)),
        rewards=SimpleNamespace(weights={"one": 1.0}, maximised=()),
        iterations=9,
    )
    toolbox, notes, lines = Toolbox(["root"], [root]), Notes(), []
    call = Turn('<tool_call>{"name": "root", "arguments": {"a": 1}}</tool_call>')
    (observation,) = toolbox.step([], [Episode((call,))])
    episode = Episode((replace(call, observation=observation), Turn("2")), final=True)
    for done in range(1, 8):
        rollout = rollout_of(np.random.default_rng(done).random((1, 2, 2, 1)), np.zeros((1, 2, 2, 0)))
        notes = reward_streaks(ctx, rollout._replace(episodes=[[episode] * 2]), notes)
        lines += streak_warnings(ctx, notes, done)
    failed = "every tool result of the last 5 iterations was an error, such as \"error: name 'math' is not defined"
    assert len(lines) == 1 and lines[0].startswith(failed)
    ended = Episode((replace(call, observation=replace(observation, messages=("2",))), Turn("2")), final=True)
    notes = reward_streaks(ctx, rollout._replace(episodes=[[episode, ended]]), notes)
    assert notes.failing_tools == {}


def test_a_chat_policy_without_a_template_gives_a_warning(place, tmp_path):
    policy = shutil.copytree(place.policy, tmp_path / "policy")
    (policy / "chat_template.jinja").unlink()
    values = yaml.safe_load(place.config.read_text()) | {"policy": {"path": str(policy)}}
    said = []
    load(make_config(values), lambda *line: said.append(line[-1]))
    assert any(f"{policy} has no chat template, though its tokenizer has <|im_start|>" in line for line in said)
