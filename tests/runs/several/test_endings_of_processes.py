"""Two processes of one run: one differs, is gone, is frozen, cannot write, comes back, or sees another folder."""

import resource
import signal
import subprocess
import time
from contextlib import contextmanager

import psutil
import pytest
from support.processes import again, ended, held, lines, start
from support.text_task import finish, rows, train_here, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.wide,  # each takes two processes and half a minute; test_several.py runs, stops, kills and resumes
]
GONE = "error: process 1 of 2 is gone: "


@pytest.mark.parametrize(
    ("arguments", "last", "message"),
    [
        (("--training.lag=1",), (), "training.lag: expected 0 with a policy over 2 processes, got 1"),
        (
            (),
            ("--optimizer.learning_rate=0.02",),
            "optimizer.learning_rate: expected the same in all processes, got 0.01 in process 0 and 0.02 in process 1",
        ),
    ],
)
def test_a_config_that_is_refused_is_told_once(arguments, last, message, place, tmp_path):
    first, second = ended(start(place, tmp_path / "run", *arguments, last=last))
    assert (first.returncode, second.returncode) == (2, 2) and not lines(second.stderr)
    assert lines(first.stderr) == [f"error: {message}"] and not (tmp_path / "run").exists()


def test_no_process_outlives_the_first(place, tmp_path):
    processes = start(place, tmp_path / "run", judge="hold:1")
    held(processes, tmp_path / "run")
    processes[0].kill()
    before = time.monotonic()
    finish(processes[0])
    second = finish(processes[1])
    assert second.returncode != 0 and time.monotonic() - before < 60, second.stderr


@contextmanager
def frozen(process):
    """Within, a process neither runs nor sends heartbeats, and is there."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_frozen_process_holds_nobody(place, tmp_path):
    run = tmp_path / "run"
    processes = start(place, run, judge="hold:1")
    held(processes, run)
    with frozen(processes[1]):
        (run / "held").unlink()
        processes[0].send_signal(signal.SIGTERM)
        before = time.monotonic()
        first = finish(processes[0])
        assert time.monotonic() - before < 30
    second = finish(processes[1])
    reason = "a stop was asked for, and process 1 takes no part in broadcast"
    assert first.returncode == 1 and lines(first.stderr) == [f"error: {reason}: {again(run)}"], first.stderr
    assert second.returncode != 0 and time.monotonic() - before < 60, second.stderr


def test_a_process_that_cannot_write_its_checkpoint_ends_all(place, tmp_path, capsys):
    run = tmp_path / "run"
    processes = start(place, run, "--training.save_every=1", judge="hold:2")
    held(processes, run)
    wait_for((run / "checkpoints" / "step_2").exists, processes[0])  # it may still be on its way
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (0, 0))
    while any(process.poll() is None for process in processes):
        (run / "held").unlink(missing_ok=True)  # it is held at each batch that follows
        time.sleep(0.1)
    first, second = ended(processes)
    assert first.returncode == 1 and lines(first.stderr) == [f"{GONE}{again(run)}"], first.stderr
    (line,) = lines(second.stderr)
    assert second.returncode == 2 and line.startswith("error: process 1: cannot write a checkpoint to "), line
    assert train_here(place.config, run, "--resume", "--policy.mesh.fsdp=1") == 0
    assert "resumed after iteration 2 of 6" in capsys.readouterr().out
    assert len(rows(run)) == 6


def test_a_process_that_comes_back_under_its_number_is_refused(place, tmp_path):
    run = tmp_path / "run"
    processes = start(place, run, judge="hold:1")
    held(processes, run)
    environment = psutil.Process(processes[1].pid).environ()
    processes[1].kill()
    finish(processes[1])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    back = subprocess.Popen(processes[1].args, env=environment, cwd=place.folder, **pipes)
    first, second = ended([processes[0], back])
    assert first.returncode == 1 and lines(first.stderr) == [f"{GONE}{again(run)}"], first.stderr
    (line,) = lines(second.stderr)
    assert second.returncode != 0 and line.startswith("error: process 1: it was started again while its run goes on")


def test_a_run_directory_that_is_not_shared_is_refused(place, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first, second = ended(start(place, "run", folders=folders))  # as a path that is each machine's own
    message = f"{folders[1] / 'run'}: expected one folder for all processes; what process 0 wrote there is not here"
    assert second.returncode == 2 and lines(second.stderr) == [f"error: process 1: {message}"], second.stderr
    assert first.returncode == 1 and lines(first.stderr) == [f"{GONE}{again('run')}"], first.stderr
