"""The run directory: atomic writes, no overwriting, exact truncation."""

import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from grpo_jax.errors import UserError
from grpo_jax.runs.directory import (
    RunDirectory,
    RunLock,
    finite,
    read_metrics,
    truncate_metrics,
    write_atomically,
)


def test_a_locked_folder_is_refused_until_its_process_ends(tmp_path):
    script = (
        "import sys, time; from grpo_jax.runs.directory import RunDirectory; "
        "run = RunDirectory.open(sys.argv[1]); print('held', flush=True); time.sleep(600)"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "run")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    before = sorted((tmp_path / "run").iterdir())
    with pytest.raises(UserError, match=f"run is in use by process {process.pid} on"):
        RunDirectory.open(tmp_path / "run")
    assert sorted((tmp_path / "run").iterdir()) == before
    process.kill()
    process.communicate()
    run = RunDirectory.open(tmp_path / "run")  # what a killed process leaves is free
    run.close()
    assert RunDirectory.open(tmp_path / "run").path == tmp_path / "run"


FORKING = """
import os, sys, time
from grpo_jax.runs.directory import RunDirectory

run = RunDirectory.open(sys.argv[1])
if os.fork() == 0:
    print("after the fork", flush=True)
    time.sleep(60)
os._exit(1)
"""


def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    arguments = [sys.executable, "-c", FORKING, str(tmp_path / "run")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline()  # of the child, whose first act is to release the lock
        process.wait(60)
        RunDirectory.open(tmp_path / "run").close()
        os.killpg(process.pid, signal.SIGKILL)


def test_one_of_many_processes_gets_the_lock(tmp_path):
    def take(_):
        try:
            return RunLock(tmp_path)
        except UserError:
            return None

    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            (held,) = filter(None, pool.map(take, range(8)))
            held.release()


def test_unusable_run_directories_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no run to resume"):
        RunDirectory.open(tmp_path / "none", resume=True)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match="file is a file; choose another --run_dir"):
        RunDirectory.open(tmp_path / "file")
    for name in ("file/run", "x" * 300, "a\0b"):
        with pytest.raises(UserError, match=r"cannot write .* \(.*\): choose another --run_dir") as raised:
            RunDirectory.open(tmp_path / name)
        assert len(str(raised.value)) < 300
    assert (tmp_path / "file").read_text() == "kept"


def test_the_folder_of_another_program_is_refused(tmp_path):
    """Its names may be those of a run that never trained, whose checkpoints a new start removes."""
    (tmp_path / "checkpoints").mkdir()
    files = {"train.log": "epoch 3", "config.yaml": "rate: 1", "checkpoints/epoch_3.pt": "a week of work"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    for _ in range(2):
        with pytest.raises(UserError, match="is not empty; continue it with --resume or choose another --run_dir"):
            RunDirectory.open(tmp_path)
        there = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
        assert there == files


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(UserError, match=r"cannot write .*a\.json \(No space left on device\): make room"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_numbers_that_are_not_finite_are_null():
    values = {"a": {"before": np.float32(0.5), "after": float("nan"), "oracle": None}, "n": [np.int64(3)]}
    assert finite(values) == {"a": {"before": 0.5, "after": None, "oracle": None}, "n": [3]}


def test_metrics_are_truncated_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"step": step, "loss": step / 3, "kl": None}).encode() + b"\n" for step in range(1, 6)]
    path.write_bytes(b"".join(whole) + b'{"step": 6, "lo')  # killed in the middle of a line
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert read_metrics(path)[0] == {"step": 1, "loss": 1 / 3, "kl": None}
    truncate_metrics(path, 3)
    assert path.read_bytes() == b"".join(whole[:3])
    truncate_metrics(path, 0)
    assert path.read_bytes() == b""
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2: not a row of metrics"):
        read_metrics(path)
    assert read_metrics(tmp_path / "none.jsonl") == []
