"""One run on several processes of this machine, through the command: as on one, whoever dies, and resumed elsewhere."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from support import xla
from support.text_task import ROOT, environment, finish, finished_run, rows, train, wait_for
from support.text_task import start as start_alone

from grpo_jax import evaluate
from grpo_jax.config import make_config
from grpo_jax.errors import UserError
from grpo_jax.runs import several
from grpo_jax.runs.processes import StopRequests

pytestmark = pytest.mark.slow
END = 600  # seconds; only a hang takes that long


def announcement(count):
    """What tells `count` processes of each other, and the coordinator's port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}, port


def start(place, run, count, *arguments, judge="work:0", devices=1, last=()):
    """The training command `count` times, each with so many devices; the last one perhaps with arguments of its own."""
    told = announcement(count)[0] | {"XLA_FLAGS": xla.devices(devices)}
    config = [] if "--resume" in arguments else ["--config", str(place.config)]
    command = [sys.executable, "-m", "grpo_jax.train", *config, "--run_dir", str(run), *arguments]
    return [
        subprocess.Popen(
            [*command, *last] if number == count - 1 else command,
            env=environment(place, run, judge) | told | {"JAX_PROCESS_ID": str(number)},
            cwd=place.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def held(processes, run):
    """Waits until the judge holds the run."""
    wait_for((run / "held").exists, processes[0])


def ended(processes):
    """What each printed, once all have ended by themselves."""
    deadline = time.monotonic() + END
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    still = [number for number, process in enumerate(processes) if process.poll() is None]
    for process in processes:
        process.kill()
    assert not still, (still, [finish(process) for process in processes])
    return [finish(process) for process in processes]


def lines(text):
    """What grpo_jax and Python wrote; the libraries beneath log in forms of their own."""
    return [line for line in text.splitlines() if line.startswith(("error", "Traceback"))]


MESH = ("--policy.mesh.fsdp=2", "--policy.mesh.tensor=2")


def stop_and_kill(place, run):
    """Two processes, of which the second is asked to stop; then the second is killed at the next checkpoint's batch."""
    processes = start(place, run, 2, *MESH, devices=2, judge="hold:2")
    held(processes, run)
    processes[1].send_signal(signal.SIGTERM)  # it asks process 0, which stops the run
    first, second = [finish(process) for process in processes]
    assert first.returncode == 0 and "stopped and saved after iteration 2" in first.stdout, first.stderr
    assert second.returncode == 0, second.stderr
    (run / "held").unlink()
    processes = start(place, run, 2, "--resume", *MESH, devices=2, judge="hold:4")
    held(processes, run)
    processes[1].kill()
    first, _ = ended(processes)
    assert first.returncode == 1 and "resumed after iteration 2 of 6" in first.stdout
    again = f"the run ends, its last checkpoint is sound; go on with --resume --run_dir {run}"
    assert lines(first.stderr) == [f"error: process 1 of 2 is gone: {again}"], first.stderr
    (run / "held").unlink()


def assert_ends_as(expected, place, run, monkeypatch):
    """Goes on in one process on another mesh, and compares all iterations with those of a run on one device."""
    monkeypatch.setenv("XLA_FLAGS", xla.devices(2))
    last = train(place, run, "--resume", "--policy.mesh.fsdp=1", "--policy.mesh.tensor=2")
    assert last.returncode == 0 and "resumed after iteration 3 of 6" in last.stdout, last.stderr
    for came, wanted in zip(rows(run), expected, strict=True):
        assert came == {name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in wanted.items()}


def test_a_run_that_was_stopped_and_killed_is_the_run_of_one_process(place, tmp_path, monkeypatch):
    expected = rows(finished_run(place))
    stop_and_kill(place, tmp_path / "run")
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path / "run"))
    assert evaluate.main(["--run", str(tmp_path / "run"), "--checkpoint", "3", "--mesh", "1", "1"]) == 0
    assert_ends_as(expected, place, tmp_path / "run", monkeypatch)


def test_a_mesh_is_a_multiple_of_the_processes(monkeypatch):
    for name, value in announcement(2)[0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(UserError, match=r"policy\.mesh: .* a multiple of the 2 processes, got 1"):
        several.join(make_config(task="text"), StopRequests())


def test_mistakes_are_told_once(place, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    first, second = ended(start(place, tmp_path / "run", 2, "--policy.mesh.fsdp=2", "--training.lag=1"))
    message = "training.lag: expected 0 with a policy over 2 processes, got 1"
    assert first.returncode == 2 and lines(first.stderr) == [f"error: {message}"]
    assert second.returncode == 2 and not lines(second.stderr)
    assert not os.path.exists(tmp_path / "run")
    lacking = start(place, tmp_path / "run", 2, "--policy.mesh.fsdp=2", last=["--policy.path=/nowhere"])
    first, second = ended(lacking)
    assert (first.returncode, second.returncode) == (2, 2) and not lines(second.stderr)
    (line,) = lines(first.stderr)
    assert line.startswith("error: policy.path: expected the same in all processes, got files of digest ")
    assert line.endswith(" in process 0 and '/nowhere' in process 1")


def test_sigterm_ends_a_process_that_waits_for_the_others(place, tmp_path, monkeypatch):
    told, port = announcement(2)
    for name, value in (told | {"JAX_PROCESS_ID": "0"}).items():
        monkeypatch.setenv(name, value)
    process = start_alone(place, tmp_path / "run", "--policy.mesh.fsdp=2")

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
