"""A run that is training is measured by hand: nothing of it is touched, and it comes to the same end."""

import json
import os

import pytest
from support.text_task import finished_run, rows

from grpo_jax import evaluate, export
from grpo_jax.config.command_line import parse
from grpo_jax.train import run


def files_of(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_that_is_training_is_measured_and_not_disturbed(place, tmp_path, capsys, monkeypatch):
    folder, out, looked = tmp_path / "run", tmp_path / "evaluation.json", []
    monkeypatch.setenv("JUDGE", "work:0")
    monkeypatch.setenv("JUDGE_RUN", str(folder))

    def look(moment):
        """Beside the third checkpoint, with nothing more to write; the first is gone."""
        if moment.step != 3:
            return
        before = files_of(folder)
        assert json.loads(before[folder / "run.lock"])["process"] == os.getpid()
        capsys.readouterr()
        found = {}
        for which in ("latest", "best"):
            assert evaluate.main(["--run", str(folder), "--checkpoint", which, "--out", str(out), "--json"]) == 0
            found[which] = json.loads(capsys.readouterr().out)
            assert json.loads(out.read_text()) == found[which]
        assert found["latest"]["step"] == 3 and found["best"]["step"] == 2
        assert found["latest"]["greedy"] != found["best"]["greedy"]
        for which in ("1", "final"):
            assert evaluate.main(["--run", str(folder), "--checkpoint", which]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.endswith("there are: 2, 3, best") and f"no checkpoint '{which}'" in line
        assert export.main(["--run", str(folder), "--checkpoint", "latest", "--out", str(tmp_path / "policy")]) == 0
        assert (tmp_path / "policy" / "config.json").is_file()
        assert files_of(folder) == before
        looked.append(moment.step)

    kept = ["--training.save_every=1", "--training.keep_checkpoints=2"]
    run(parse([f"--config={place.config}", f"--run_dir={folder}", *kept]), on_checkpoint=look)
    assert looked == [3]
    expected, weights = finished_run(place), "policy/model.safetensors"
    assert rows(folder) == rows(expected)
    assert (folder / weights).read_bytes() == (expected / weights).read_bytes()


@pytest.mark.parametrize("out", ["", "nowhere/evaluation.json"])
def test_a_place_for_the_results_that_is_none_is_said_before_anything_is_measured(out, place, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(place.config.read_text())
    assert evaluate.main(["--run", str(tmp_path), "--out", str(tmp_path / out)]) == 2
    assert "--out: expected a file in a folder that is there" in capsys.readouterr().err
