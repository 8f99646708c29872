"""A run that is training is measured by hand: nothing of it is touched, and it comes to the same end."""

import json
import time

import pytest
from support.text_task import assert_same_run, finish, finished_run, start, wait_for

from grpo_jax import evaluate, export


@pytest.fixture
def held(place, tmp_path):
    """A run in a process of its own that waits in its fourth iteration, with nothing more to write."""
    run = tmp_path / "run"
    at = run / "checkpoints"
    process = start(place, run, "--training.save_every=1", "--training.keep_checkpoints=2", judge="hold:3")
    wait_for((run / "held").exists, process)
    # The third is there before the first goes, by way of .writing.
    steps = {at / "step_2", at / "step_3"}
    wait_for(lambda: set(at.glob("step_*")) == steps and not any((at / ".writing").iterdir()), process)
    yield run, process
    process.kill()
    process.communicate()


def files_of(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_that_is_training_is_measured_and_not_disturbed(place, held, tmp_path, capsys, monkeypatch):
    (run, process), out = held, tmp_path / "evaluation.json"
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    before = files_of(run)
    assert json.loads(before[run / "run.lock"])["process"] == process.pid

    found = {}
    for which in ("latest", "best"):
        assert evaluate.main(["--run", str(run), "--checkpoint", which, "--out", str(out), "--json"]) == 0
        found[which] = json.loads(capsys.readouterr().out)
        assert json.loads(out.read_text()) == found[which]
    assert found["latest"]["step"] == 3 and found["best"]["step"] == 2
    assert found["latest"]["greedy"] != found["best"]["greedy"]
    for which in ("1", "final"):
        assert evaluate.main(["--run", str(run), "--checkpoint", which]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("there are: 2, 3, best") and f"no checkpoint '{which}'" in line
    assert export.main(["--run", str(run), "--checkpoint", "latest", "--out", str(tmp_path / "policy")]) == 0
    assert (tmp_path / "policy" / "config.json").is_file()
    assert files_of(run) == before

    while process.poll() is None:
        (run / "held").unlink(missing_ok=True)
        time.sleep(0.02)
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    assert_same_run(run, finished_run(place))


@pytest.mark.parametrize("out", ["", "nowhere/evaluation.json"])
def test_a_place_for_the_results_that_is_none_is_said_before_anything_is_measured(out, place, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(place.config.read_text())
    assert evaluate.main(["--run", str(tmp_path), "--out", str(tmp_path / out)]) == 2
    assert "--out: expected a file in a folder that is there" in capsys.readouterr().err
