"""Where metrics go: metrics.jsonl always, TensorBoard and Weights & Biases when asked."""

import json
import sys
import time
import types

import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.errors import UserError
from grpo_jax.reports.writers import JsonLines, open_writers
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.tasks.task import GalleryEntry


def test_rows_are_strict_json(tmp_path):
    writer = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        writer.write(step, {"loss": step / 3, "kl": float("inf")})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": s, "loss": s / 3, "kl": None} for s in (1, 2)]


def test_a_full_disk_is_named(impatient):
    writer = JsonLines("/dev/full")
    with pytest.raises(UserError, match=r"cannot write /dev/full \(No space left on device\).*--resume"):
        writer.write(1, {"loss": 1.0})
    writer.close()


def test_tensorboard_reads_the_scalars_of_a_resumed_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDirectory.open(tmp_path / "run")
    (lines, board), notes = open_writers(run, ["tensorboard"])
    assert notes == []
    lines.close()
    for step in (1, 2, 3):
        board.write(step, {"loss": float(step), "kl": float("nan"), "note": "text"})
    board.close()
    time.sleep(1.1)  # event files are read in the order of their names, which have whole seconds
    (lines, board), _ = open_writers(run, ["tensorboard"], resume_step=1)
    lines.close()
    board.write(2, {"loss": 20.0})
    board.close()
    found = EventAccumulator(str(run.tensorboard))
    found.Reload()
    assert found.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1.0), (2, 20.0)]
    assert "tensorflow" not in sys.modules


def test_missing_writers(tmp_path, monkeypatch):
    run = RunDirectory.open(tmp_path / "run")
    for name in ("tensorboard.compat.proto.event_pb2", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    writers, notes = open_writers(run, ["tensorboard"])
    writers[0].close()
    assert len(writers) == 1 and notes == ["no TensorBoard events: pip install tensorboard adds them"]
    with pytest.raises(UserError, match="wandb is not installed; pip install wandb"):
        open_writers(run, ["wandb"])


def test_wandb_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    def refuse(**_):
        raise RuntimeError("api_key not configured\nmore")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with pytest.raises(UserError, match=r"wandb does not start \(api_key not configured\); run `wandb login`"):
        open_writers(RunDirectory.open(tmp_path / "run"), ["wandb"])


def gallery():
    pictures = [np.full((4, 6, 3), value, np.uint8) for value in (10, 200)]
    return [GalleryEntry("a dog", "a brown dog", *pictures, {}), GalleryEntry("a text", "another", None, None, {})]


def test_wandb_gets_completions_and_pictures(tmp_path, monkeypatch):
    """By wandb itself, which writes to the disk where it is offline."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = RunDirectory.open(tmp_path / "run")
    lines, writer = open_writers(run, ["wandb"])[0]
    lines.close()
    columns = {"completion": ["a", "b"], "reward/x": np.array([0.5, 1.0], np.float32), "pictures": [[b"1"], [b"2"]]}
    writer.completions(1, columns)
    writer.write(1, {"loss": 1.0, "kl": float("nan")})
    writer.finish({"reward": 1.0}, gallery())
    writer.close()
    again = open_writers(run, ["wandb"])[0]  # a resumed run continues its own
    for one in again:
        one.close()
    assert len({folder.name.rpartition("-")[2] for folder in (run.path / "wandb").glob("offline-run-*")}) == 1
    (media,) = (run.path / "wandb").glob("offline-run-*/files/media")
    (table,) = media.glob("table/completions*.json")
    found = json.loads(table.read_text())
    assert found["columns"] == ["completion", "reward/x"] and found["data"] == [["a", 0.5], ["b", 1.0]]
    assert len([*media.glob("images/gallery*.png")]) == 2


def test_what_cannot_be_told_is_said_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = ["--task=text", "--policy.path=nowhere", "--data.prompts=nowhere.txt", "--rewards=m:f"]
    assert train.main([*words, "--report_to=wandb", f"--run_dir={tmp_path / 'run'}"]) == 2
    expected = "error: report_to: wandb is not installed; pip install wandb, or leave it out of report_to\n"
    assert capsys.readouterr().err == expected and not (tmp_path / "run").exists()
