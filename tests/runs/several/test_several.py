"""One run on several processes of this machine, through the command: as on one, whoever dies, and resumed elsewhere."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from support.processes import MESH, again, announcement, ended, held, lines, start
from support.text_task import ROOT, finish, finished_run, rows, train_here, wait_for
from support.text_task import start as start_alone

from grpo_jax import evaluate
from grpo_jax.config import make_config
from grpo_jax.errors import UserError
from grpo_jax.runs import several
from grpo_jax.runs.processes import StopRequests

pytestmark = pytest.mark.slow


def stop_and_kill(place, run):
    """Two processes, of which the second is asked to stop; then the second is killed at the next checkpoint's batch."""
    processes = start(place, run, judge="hold:2")
    held(processes, run)
    processes[1].send_signal(signal.SIGTERM)  # it asks process 0, which stops the run
    first, second = [finish(process) for process in processes]
    assert first.returncode == 0 and "stopped and saved after iteration 2" in first.stdout, first.stderr
    assert second.returncode == 0, second.stderr
    (run / "held").unlink()
    processes = start(place, run, "--resume", judge="hold:4")
    held(processes, run)
    processes[1].kill()
    first, _ = ended(processes)
    assert first.returncode == 1 and "resumed after iteration 2 of 6" in first.stdout
    assert lines(first.stderr) == [f"error: process 1 of 2 is gone: {again(run)}"], first.stderr
    (run / "held").unlink()


def assert_ends_as(expected, place, run, printed):
    """Goes on in one process on one device, and compares all iterations with those of a run that always was there."""
    assert train_here(place.config, run, "--resume", "--policy.mesh.fsdp=1") == 0
    assert "resumed after iteration 3 of 6" in printed().out
    for came, wanted in zip(rows(run), expected, strict=True):
        assert came == {name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in wanted.items()}


@pytest.mark.wide  # two minutes; the update of two processes is that of one in tests/models/test_sharding.py
def test_a_run_that_was_stopped_and_killed_is_the_run_of_one_process(place, tmp_path, monkeypatch, capsys):
    expected = rows(finished_run(place))
    stop_and_kill(place, tmp_path / "run")
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path / "run"))
    assert evaluate.main(["--run", str(tmp_path / "run"), "--checkpoint", "3", "--mesh", "1", "1"]) == 0
    assert_ends_as(expected, place, tmp_path / "run", capsys.readouterr)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"policy\.mesh: .* a multiple of the 2 processes, got 1"),
        (
            {"policy": {"mesh": {"fsdp": 2}}, "training": {"lag": 1}},
            r"training\.lag: expected 0 with a policy over 2 processes, got 1",
        ),
    ],
)
def test_what_several_processes_refuse(fields, message, monkeypatch):
    for name, value in announcement(2)[0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(UserError, match=message):
        several.join(make_config({"task": "text", **fields}), StopRequests())


def test_a_mistake_is_told_once(place, tmp_path):
    first, second = ended(start(place, tmp_path / "run", last=("--policy.path=/nowhere",)))
    assert (first.returncode, second.returncode) == (2, 2) and not lines(second.stderr)
    (line,) = lines(first.stderr)
    assert line.startswith("error: policy.path: expected the same in all processes, got files of digest ")
    assert line.endswith(" in process 0 and '/nowhere' in process 1")
    assert not os.path.exists(tmp_path / "run")


def test_sigterm_ends_a_process_that_waits_for_the_others(place, tmp_path, monkeypatch):
    told, port = announcement(2)
    for name, value in (told | {"JAX_PROCESS_ID": "0"}).items():
        monkeypatch.setenv(name, value)
    process = start_alone(place, tmp_path / "run", MESH)

    def listens():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(listens, process)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 0 and not lines(done.stderr), done.stderr
    assert done.stdout == "stopped while waiting for the other processes: the same command begins again\n"


LATE = """
import sys, time
from grpo_jax.errors import leave
from grpo_jax.runs.processes import join_processes
from grpo_jax.runs.several import Watch, joined, part
join_processes()
joined.set()
watch = Watch("run", 600)
time.sleep(int(sys.argv[1]))
watch.over()
part()
leave(0)
"""


def test_the_coordinator_waits_for_one_that_leaves_late():
    told, _ = announcement(2)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LATE, str(4 * number)],
            env=os.environ | told | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_PROCESS_ID": str(number)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    assert [(finish(process).returncode, process.args[-1]) for process in processes] == [(0, "0"), (0, "4")]
