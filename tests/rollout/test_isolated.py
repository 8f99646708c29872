"""A reward in a process of its own: what reaches it, what is refused, and that it ends with the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import StopRun, UserError
from grpo_jax.rollout.binding import TaskRewards, bind, resolve_rewards
from grpo_jax.rollout.isolated import isolate
from grpo_jax.rollout.pipeline import Stage, run_pipeline
from grpo_jax.rollout.rewards import RewardError, collect_rewards

REWARDS = """
import os, sys, time
from grpo_jax.errors import StopRun

def process(completions):
    assert "jax" not in sys.modules and "torch" not in sys.modules
    assert sys.argv[1:] == [] and os.getsid(0) == os.getpid()
    return [os.getpid()] * len(completions)

def options(completions, wish, *, size=1, table=None):
    return [len(text) * size + table[w] for text, w in zip(completions, wish)]

def columns(completions, **columns):
    return [len(columns)] * len(completions)

def gone(completions):
    raise StopRun("the licence is over")

def pictures(images):
    return []

def widths(images):
    return [row[0].width for row in images]

def asks(completions, renderer):
    return []

def slow(completions):
    time.sleep(1.5)
    return [1.0] * len(completions)

def hang(completions):
    import ctypes
    print(os.getpid(), file=open("pid", "w"), flush=True)
    ctypes.PyDLL(None).sleep(600)
"""
TEXTS = ["a", "bb", "ccc", "dddd"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(REWARDS)
    return path


def find(name, *, judges=(), functions=None, source=None, drawn=False, **section):
    given = RewardSection(str(name), isolated=True, **section)
    source = source or TaskRewards()
    (found,) = resolve_rewards([given], [], source, judges, functions or {}, drawn=drawn).maximised
    return bind(found, {})


def call(reward, **columns):
    return collect_rewards({"mine": reward}, TEXTS, TEXTS, columns, 2).ravel()


def test_it_lives_in_one_process_of_its_own_session(file):
    reward = find(f"{file}:process")
    (first,), (again,) = set(call(reward)), set(call(reward))
    assert first == again != os.getpid()


def test_columns_and_options_reach_it_and_pictures_do_not(file):
    reward = find(f"{file}:options", options={"size": 10, "table": {"x": 1, "y": 2}})
    np.testing.assert_array_equal(call(reward, wish=["x", "x", "y", "y"], other=[1] * 4), [11, 21, 32, 42])
    columns = {"wish": ["x"] * 4, "array": np.zeros(4), "images": np.zeros(4), "baseline_images": np.zeros(4)}
    np.testing.assert_array_equal(call(find(f"{file}:columns"), **columns), [3] * 4)  # prompts, wish, array
    with pytest.raises(UserError, match=r"expected arguments of the reward \(wish, size, table\), got 'siz'"):
        find(f"{file}:options", options={"siz": 10})
    with pytest.raises(RewardError, match="a column cannot be sent"):
        call(find(f"{file}:columns"), wish=[lambda: 0] * 4)
    image = pytest.importorskip("PIL.Image")
    rows = [[image.new("RGB", (side, 3))] for side in (1, 2, 3, 4)]  # of the data, where nothing is drawn
    np.testing.assert_array_equal(call(find(f"{file}:widths"), images=rows), [1, 2, 3, 4])


def test_stop_run_stops_and_a_call_has_a_limit_of_its_own(file):
    """A call of 1.5 s within a stage of 1 s is no timeout."""
    with pytest.raises(StopRun, match="the licence is over"):
        collect_rewards({"gone": find(f"{file}:gone")}, TEXTS, TEXTS, {}, 2, on_error="missing")
    reward = isolate(f"{file}:slow", 600.0)

    def score(texts):
        return collect_rewards({"a": reward}, texts, texts, {}, 2)

    (values,), _ = run_pipeline([TEXTS], [Stage("score", score)], timeout=1.0)
    assert (values == 1).all()


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("brief", {}, "rewards.brief.isolated: expected package.module:function or file.py:function"),
        ("<given>:mine", {"functions": {"mine": len}}, "rewards.mine.isolated: run.. was given mine in Python"),
        ("{file}:pictures", {}, "rewards.pictures.isolated: pictures asks for images, which stay"),
        ("{file}:asks", {"judges": ["renderer"]}, "rewards.asks.isolated: asks asks for renderer, which stay"),
        ("{file}:no_such", {}, "has no no_such"),
        ("no_such.py:f", {}, "the file no_such.py does not exist"),
        ("no_such_module:f", {}, "no module no_such_module"),
    ],
)
def test_what_cannot_be_isolated_is_refused(file, name, more, message):
    source = TaskRewards({"brief": len})
    with pytest.raises(UserError, match=message):
        find(name.replace("{file}", str(file)), source=source, drawn=True, **more)


def test_a_function_given_in_python_is_found_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "mine_isolated.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    reward = find("mine_isolated:process", functions={"process": lambda completions: [0.0] * 4})
    assert call(reward)[0] not in (0, os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end a child with its parent")
def test_it_dies_with_a_run_that_is_killed_while_it_is_stuck(file):
    script = f"from grpo_jax.rollout.isolated import isolate; isolate({str(file)!r} + ':hang', None)(completions=['a'])"
    path = os.pathsep.join(sys.path)
    run = subprocess.Popen([sys.executable, "-c", script], cwd=file.parent, env=os.environ | {"PYTHONPATH": path})
    pid = file.parent / "pid"
    wait(lambda: pid.is_file() and pid.read_text().endswith("\n"))
    child = int(pid.read_text())
    assert is_alive(child)
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait(lambda: not is_alive(child))


def is_alive(pid):
    """Not gone, nor waiting for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait(condition):
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
