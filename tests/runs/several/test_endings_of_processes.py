"""Two processes of one run: one is gone, cannot write, or sees another folder."""

import resource
import time

import pytest
from support.processes import ended, held, lines, start
from support.text_task import finish, rows, train_here, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.wide,  # each takes two processes and half a minute; test_several.py runs, stops, kills and resumes
]


def test_no_process_outlives_the_first(place, tmp_path):
    processes = start(place, tmp_path / "run", judge="hold:1")
    held(processes, tmp_path / "run")
    processes[0].kill()
    finish(processes[0])
    assert finish(processes[1]).returncode != 0


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
    assert first.returncode != 0, first.stderr
    assert second.returncode == 2 and "error: process 1: cannot write a checkpoint" in second.stderr, second.stderr
    assert train_here(place.config, run, "--resume", "--policy.mesh.fsdp=1") == 0
    assert "resumed after iteration 2 of 6" in capsys.readouterr().out
    assert len(rows(run)) == 6


def test_a_run_directory_that_is_not_shared_is_refused(place, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first, second = ended(start(place, "run", folders=folders))  # as a path that is each machine's own
    assert (first.returncode, second.returncode) == (2, 2) and not lines(second.stderr)
    (line,) = lines(first.stderr)
    assert line.endswith("expected one folder for all processes, but process 1 does not see it")
