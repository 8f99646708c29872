"""An environment in a process of its own, which may crash, hang or answer nonsense; a reward that reads episodes."""

import sys

import numpy as np
import pytest

from grpo_jax.errors import StopRun, UserError
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.environment import collect_answers
from grpo_jax.rollout.episodes import Answer, AnswerError, Episode, Turn
from grpo_jax.rollout.isolated import isolate, isolate_environment
from grpo_jax.rollout.rewards import collect_rewards

ENVIRONMENT = """
import os, sys, time
from grpo_jax import Answer, Episode
from grpo_jax.errors import StopRun

def respond(rows, episodes):
    assert "jax" not in sys.modules and "torch" not in sys.modules
    kind = episodes[0].last.text
    if kind == "die":
        os._exit(3)
    if kind == "hang":
        time.sleep(600)
    if kind == "raise":
        raise KeyError("no such tool")
    if kind == "over":
        raise StopRun("the licence is over")
    special = {"number": 7, "picture": Answer("x", (1,)), "done": None}
    assert all(isinstance(episode, Episode) and episode.last.image is None for episode in episodes)
    said = [f"{row.prompt} {row.columns['n']} {episode.last.rewards['r']}" for row, episode in zip(rows, episodes)]
    return [special[kind] if kind in special else said[0], *said[1:]]

def turns(completions, episodes):
    return [len(episode.turns) if episode.last.image is None else -1.0 for episode in episodes]
"""
ROWS = [Row(1, "a", {"n": 1}), Row(2, "b", {"n": 2})]


def episodes(kind):
    image = np.ones((3, 2, 2))
    return [Episode((Turn(text, rewards={"r": 0.5}, image=image),)) for text in (kind, "other")]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "mine.py"
    path.write_text(ENVIRONMENT)
    return path


@pytest.fixture(scope="module")
def respond(file):
    return isolate_environment(f"{file}:respond", 5.0)


def asked(respond, kind, on_error="raise"):
    return collect_answers(respond, ROWS, episodes(kind), on_error=on_error)


def test_it_answers_as_it_would_here(respond):
    assert asked(respond, "plain") == [Answer("a 1 0.5"), Answer("b 2 0.5")]
    assert asked(respond, "done")[0] == Answer(done=True)


@pytest.mark.parametrize(
    ("kind", "message", "others"),
    [
        ("die", "the environment: its process ended with exit code 3", False),
        ("raise", "the environment: it raised KeyError: 'no such tool'", False),
        ("number", "it answered 7, not an Answer, a text or None to completion 0", True),
        ("picture", "it answered with a picture, which an isolated environment cannot to completion 0", True),
    ],
)
def test_what_fails_is_named_and_the_next_call_has_a_fresh_process(respond, kind, message, others):
    with pytest.raises(AnswerError, match=message):
        asked(respond, kind)
    missing = asked(respond, kind, "missing")
    assert missing == ([None, Answer("b 2 0.5")] if others else [None, None])
    assert asked(respond, "plain")[0] == Answer("a 1 0.5")


def test_one_that_hangs_is_killed_after_its_time(file):
    respond = isolate_environment(f"{file}:respond", 0.5)
    with pytest.raises(AnswerError, match=r"the environment: no result after 0.5 s"):
        asked(respond, "hang")
    assert asked(respond, "plain")[0] == Answer("a 1 0.5")


def test_a_run_that_is_to_stop_stops(respond):
    for on_error in ("raise", "missing"):
        with pytest.raises(StopRun, match="the licence is over"):
            asked(respond, "over", on_error)


def test_an_isolated_reward_reads_episodes_without_pictures(file):
    reward = isolate(f"{file}:turns", 5.0)
    columns = {"episodes": episodes("plain")}
    values = collect_rewards({"turns": reward}, ["a", "b"], ["plain", "other"], columns, 1)
    np.testing.assert_array_equal(values[..., 0], [[1], [1]])


def test_what_cannot_be_imported_is_said(tmp_path, file):
    with pytest.raises(UserError, match=r"mine.py has no nothing"):
        isolate_environment(f"{file}:nothing", None)
    (tmp_path / "dying.py").write_text("import os\nos._exit(4)\n")
    with pytest.raises(UserError, match=r"environment .*: importing dying.py: its process ended with exit code 4"):
        isolate_environment(f"{tmp_path}/dying.py:respond", None)


def test_here_it_is_not_imported(file):
    assert str(file) not in {getattr(module, "__file__", None) for module in list(sys.modules.values())}
