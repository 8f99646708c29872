"""Early ends of runs: one line, which the log keeps, and resuming."""

import contextlib
import ctypes
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from support.text_task import PATIENCE, ROOT, environment, finished_run, rewound, train_here

from grpo_jax.errors import Stopped, UserError, run_cli
from grpo_jax.reports.console import Console
from grpo_jax.runs import trainer
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.session import Notes, Progress
from grpo_jax.runs.stopping import stop_requests

AWAY = """
import os


def away(completions, **columns):
    os.chdir("/")
    return [float(len(text)) for text in completions]
"""


def test_a_stop_before_the_first_iteration_leaves_the_folder_usable(place, tmp_path, capsys, monkeypatch):
    (tmp_path / "away.py").write_text(AWAY)
    values = yaml.safe_load(place.config.read_text())
    values["policy"]["path"] = str(place.policy.relative_to(place.folder))
    values["rewards"] = [{"name": f"{tmp_path / 'away.py'}:away"}]
    values["training"] |= {"max_steps": 1, "inner_epochs": 1, "minibatches": 1}  # as `SHORT`
    values |= {"algorithm": {}, "optimizer": values["optimizer"] | {"schedule": "constant"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(place.folder)
    run = tmp_path / "run"
    asked = SimpleNamespace(is_set=(run / "metrics.jsonl").is_file, raise_immediately=contextlib.nullcontext)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "stop_requests", lambda: contextlib.nullcontext(asked))
        assert train_here(tmp_path / "config.yaml", Path(os.path.relpath(run))) == 0
    assert " before the first iteration: continue with --resume" in capsys.readouterr().out
    with Checkpoints(run / "checkpoints") as checkpoints:  # a moment later
        checkpoints.save(0, {"variables": {"w": np.ones(2)}}, {})
    (run / "thesis.txt").write_text("years of work")
    assert train_here(place.config, run) == 2
    assert (run / "checkpoints" / "step_0").is_dir() and "is not empty" in capsys.readouterr().err
    (run / "thesis.txt").unlink()
    monkeypatch.chdir(place.folder)
    assert train_here(tmp_path / "config.yaml", Path(os.path.relpath(run))) == 0
    assert "compiling the update …" in capsys.readouterr().out
    assert (run / "policy" / "tokenizer.json").is_file()


LEAVING = """
import sys, threading, time
from grpo_jax import errors
errors._LEAVING_SECONDS = 0.3
threading.Thread(target=time.sleep, args=(600,), name=sys.argv[1]).start()
print("said")
errors.exit_process(3)
"""


@pytest.mark.parametrize("name", ["of someone's library", "abandoned score"])
def test_a_thread_that_never_ends_does_not_hold_the_process(name):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, name], env=environment, timeout=PATIENCE, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\n", "")


IMPATIENT = """
from grpo_jax.rollout import pipeline
pipeline._HELD_SECONDS = 1.0
from grpo_jax.errors import exit_process
from grpo_jax.train import main
exit_process(main())
"""


def test_a_reward_that_holds_the_interpreter_lock_ends_the_process_and_is_shown(place, tmp_path):
    run = rewound(finished_run(place), tmp_path / "run", step=3)
    done = subprocess.run(
        [sys.executable, "-c", IMPATIENT, "--resume", "--run_dir", run, "--judge_timeout=1"],
        env=environment(run, judge="lock:0"),
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and (run / "held").exists(), done.stderr
    assert "Timeout (0:00:02)!" in done.stderr and f'File "{place.judge}"' in done.stderr


def test_a_reward_beyond_its_time_limit_names_the_pool(place, tmp_path, capsys):
    run = rewound(finished_run(place), tmp_path / "run", step=3)
    assert train_here(place.config, run, "--resume", "--judge_timeout=1", judge="hang:0") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: stage 'score' failed on chunk 0: reward letters: no result after 1 s. Saved after")
    assert f"fix the reward and continue with --resume --run_dir {run}, give it more time (--judge_timeout)" in line
    actor = "--judges.NAME '{kind: function, name: FILE.py:FUNCTION, pool: {batch_timeout: 60}}' --rewards NAME"
    assert line.endswith(f"run it in a Ray actor, which can be killed: {actor} (docs/rewards.md)")
    page = " ".join((ROOT / "docs" / "rewards.md").read_text().replace("\\\n", "").split())
    assert actor.replace("NAME", "correct").replace("FILE.py:FUNCTION", "my_rewards.py:correct") in page


def test_a_reward_that_raises_is_shown_with_its_line_and_logged_with_its_traceback(place, tmp_path, capsys):
    run = rewound(finished_run(place), tmp_path / "run", step=3)
    assert train_here(place.config, run, "--resume", judge="raise:0") == 2
    (line,) = capsys.readouterr().err.splitlines()
    source = place.judge.read_text().splitlines()
    number = 1 + source.index('        raise RuntimeError("the reward is away")')
    told = f"error: reward letters: it raised RuntimeError: the reward is away ({place.judge}:{number}). Saved after"
    assert line.startswith(told) and "; fix the reward and continue with --resume" in line
    log = (run / "train.log").read_text().splitlines()
    assert log[-1] == line and log[-2] == "RuntimeError: the reward is away"
    assert "Traceback (most recent call last):" in log and source[number - 1].strip() in map(str.strip, log)


def test_a_ctrl_c_is_acknowledged_at_once_and_the_run_saved(place, tmp_path, capsys):
    run = rewound(finished_run(place), tmp_path / "run", step=3)
    assert train_here(place.config, run, "--resume", judge="interrupt:0") == 0
    shown = capsys.readouterr()
    assert shown.err == "stopping after this iteration; Ctrl-C again stops now\n"
    # A wait for a reward ends at once.
    assert re.search("stopped and saved after iteration [34]: continue with --resume", shown.out)


def test_a_signal_is_acknowledged_before_a_long_call_ends(capsys):
    """Python's handlers run after the call, which may be a compilation of a minute."""
    read_end, write_end = os.pipe()
    masked, shown = threading.Event(), []

    def watch():
        masked.wait()
        os.kill(os.getpid(), signal.SIGTERM)  # this thread gets it
        for _ in range(1000):
            if lines := capsys.readouterr().err.splitlines():
                shown.extend(lines)
                break
            time.sleep(0.01)
        os.write(write_end, b"x")

    with stop_requests() as stop:
        watcher = threading.Thread(target=watch)
        watcher.start()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # or the signal would end the call
        masked.set()
        ctypes.CDLL(None).read(read_end, ctypes.create_string_buffer(1), 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        watcher.join()
    assert shown == ["SIGTERM: stopping after this iteration"] and stop.is_set()


@pytest.mark.parametrize("command", ["grpo_jax.train", "grpo_jax"])
def test_a_ctrl_c_while_modules_are_imported_is_one_line(command, tmp_path):
    (tmp_path / "yaml.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", command, "train"], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


class Gone(io.StringIO):
    """A terminal whose reader went away."""

    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [Gone(), io.StringIO()], ids=["no reader", "closed"])
def test_a_lost_terminal_is_noted_in_the_log(stream, tmp_path):
    if not isinstance(stream, Gone):
        stream.close()
    console = Console(tmp_path / "train.log", stream=stream)
    for text in ("one", "two"):
        console.info(text)
    console.info("policy", "three")
    console.close()
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert lines == ["warning: the terminal is gone; the run continues", "one", "two", "policy     three"]


def test_a_terminal_without_a_character_gets_its_number(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    assert run_cli(lambda _: print("木 × 2", flush=True), ()) == 0
    assert stream.buffer.getvalue() == b"\\u6728 \\xd7 2\n"


def test_a_signal_inside_the_collector_stops_a_moment_later():
    def stop_here(*_):  # Python prints what it raises, and drops it
        gc.callbacks.remove(stop_here)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped), stop_requests() as stop, stop.raise_immediately():
        gc.callbacks.append(stop_here)
        gc.collect()
        for _ in range(10 * PATIENCE):
            time.sleep(0.1)


def test_a_checkpoint_with_other_fields_is_of_another_version(tmp_path):
    progress = Progress(3, 6, None, 0, {}, {"config": {}, "task": {}}, Notes({"greedy": {"a": 1.0}}))
    saved = json.loads(json.dumps(progress.as_json()))
    assert Progress.read({"progress": saved}, tmp_path) == progress
    earlier = {"watched" if name == "eval_rewards_at_start" else name: value for name, value in saved["notes"].items()}
    assert Progress.read({"progress": saved | {"notes": earlier}}, tmp_path) == progress
    without = {name: value for name, value in saved.items() if name != "notes"}
    for meta in ({"progress": saved | {"surprise": 1}}, {"progress": without}, {}):
        with pytest.raises(UserError, match="its checkpoints are of another version of grpo_jax"):
            Progress.read(meta, tmp_path)
