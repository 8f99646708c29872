"""One run on several processes of this machine, through the command: as on one, whoever dies, and resumed elsewhere."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from support.processes import again, announcement, ended, held, lines, start
from support.text_task import ROOT, finish, finished_run, rows, train_here, wait_for

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


def joins(process, port):
    """Whether a process listens on the coordinator's port, or is connected to it."""
    if process.poll() is not None:
        return False
    connections = psutil.Process(process.pid).net_connections()
    return any(port in (end.port for end in (one.laddr, one.raddr) if end) for one in connections)


def test_sigterm_ends_processes_that_wait_for_another(place, tmp_path):
    told, port = announcement(3)
    processes = start(place, tmp_path / "run", "--training.prompts_per_batch=6", told=told)
    for process in processes:
        wait_for(lambda process=process: joins(process, port), process)
    line = "stopped while waiting for the other processes: the same command begins again\n"
    for process, printed in [(processes[1], f"process 1: {line}"), (processes[0], line)]:
        process.send_signal(signal.SIGTERM)
        done = finish(process)
        assert (done.returncode, done.stdout) == (0, printed) and not lines(done.stderr), done.stderr


def test_who_waits_for_another_that_never_comes_ends_in_time(place, tmp_path):
    told = announcement(2)[0]
    (done,) = ended(start(place, tmp_path / "run", "--process_timeout=1", told=told, numbers=[1]))
    message = "expected all 2 processes to begin within 1 s (--process_timeout), and some did not"
    assert done.returncode == 2 and lines(done.stderr) == [f"error: process 1: {message}"], done.stderr


WATCHED = """
import os, sys, time
from grpo_jax.models.broadcast import meet, others_wait, together
from grpo_jax.runs.processes import join_processes
from grpo_jax.runs.several import joined, part
from grpo_jax.runs.watch import Watch
from grpo_jax.errors import leave

def run_together(act):
    join_processes()
    joined.set()
    watch = Watch("run", float(sys.argv[1]))
    act(int(os.environ["JAX_PROCESS_ID"]))
    watch.over()
    part()
    leave(0)
"""
LEAVES = """
def act(number):
    import json, math
    import jax, numpy as np
    from grpo_jax.models import sharding

    def held():  # by this process's one device
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.live_arrays())

    def gather(leaf, mesh, real=sharding.gather):
        gathered = real(leaf, mesh)
        peaks.append(held())
        return gathered

    kernels = {f"{name}_proj": {"kernel": np.full((2, 64, 64), place)} for place, name in enumerate("qkvo")}
    tree = {"params": {"embed_tokens": np.ones((256, 64)), "layers": kernels, "norm": {"scale": np.ones(64)}}}
    tree = jax.tree.map(np.float32, tree)
    sharded = sharding.shard(tree, sharding.make_mesh(2, 1, jax.devices()))
    share, peaks = held(), []
    sharding.gather = gather
    whole = sharding.on_host(sharded)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, whole, tree)))
    sizes = [x.nbytes for x in jax.tree.leaves(tree)]
    print(json.dumps([share, max(peaks), max(sizes), sum(sizes)]), flush=True)
    time.sleep(4 * number)
"""
STUCK = """
def act(number):
    if number == 0:
        with others_wait():
            time.sleep(5)
    with together("a meeting"):
        meet()
    print("met", flush=True)
    if number == 0:
        time.sleep(600)
    with together("a meeting"):
        meet()
"""


def start_watched(act, timeout):
    """Start two processes that do `act(number)` and watch each other, without a run."""
    told = announcement(2)[0]
    command = [sys.executable, "-c", f"{WATCHED}{act}\nrun_together(act)", str(timeout)]
    environment = os.environ | told | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(number)}, **pipes) for number in range(2)
    ]


@pytest.fixture(scope="module")
def left():
    """Two processes that have brought arrays together, of which the second left late."""
    return ended(start_watched(LEAVES, 600))


def test_the_coordinator_waits_for_one_that_leaves_late(left):
    assert [process.returncode for process in left] == [0, 0], left


def test_no_device_holds_more_than_its_share_and_a_leaf_while_weights_come_to_the_host(left):
    for process in left:
        share, peak, largest, whole = json.loads(process.stdout.splitlines()[-1])
        assert share < peak <= share + largest < whole


def test_who_waits_for_process_0_ends_in_time():
    """Also where it is neither gone nor frozen; what it does with judges does not count."""
    first, second = ended(start_watched(STUCK, 3))
    assert (first.returncode, second.returncode, second.stdout) == (1, 1, "met\n")
    reason = "a meeting has taken more than 3 s (--process_timeout)"
    assert lines(second.stderr) == [f"error: process 1: {reason}: {again('run')}"], second.stderr
    assert lines(first.stderr) == [f"error: process 1 of 2 is gone: {again('run')}"], first.stderr


@pytest.mark.wide  # half a minute in which the coordinator, and so JAX's own threads, do not answer
@pytest.mark.parametrize("stop", [False, True])
def test_who_waits_for_a_frozen_process_0_ends_in_time(stop):
    processes = start_watched(STUCK, 600)
    assert processes[1].stdout.readline() == "met\n"
    processes[0].send_signal(signal.SIGSTOP)
    if stop:
        processes[1].send_signal(signal.SIGTERM)
    second = finish(processes[1])
    processes[0].send_signal(signal.SIGCONT)
    first = finish(processes[0])
    reason = "process 0 has not answered for 8 s"
    assert second.returncode == 1 and lines(second.stderr) == [f"error: process 1: {reason}: {again('run')}"], second
    assert first.returncode == 1 and lines(first.stderr) == [f"error: process 1 of 2 is gone: {again('run')}"], first
