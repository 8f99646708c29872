"""Metric writers: metrics.jsonl always, TensorBoard and Weights & Biases on request."""

import io
import json
import sys
import time
import types

import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.reports.output import RunOutput
from grpo_jax.tasks.task import Finished, GalleryEntry


def write(run, service, rows, *, resume_after=None, act=lambda output: None):
    """Write rows as a run does, from its start or after a step; return what it prints."""
    resume, stream = resume_after is not None, io.StringIO()
    config = make_config(task="text", run_dir=str(run), report_to=[service], resume=resume)
    with RunOutput(config, stream=stream) as output:
        output.truncate(resume_after or 0)
        for row in rows:
            output.iteration(row)
        act(output)
    return stream.getvalue()


def test_tensorboard_reads_the_scalars_of_a_resumed_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    write(run, "tensorboard", [{"step": step, "loss": float(step), "kl": float("nan")} for step in (1, 2, 3)])
    time.sleep(1.1)  # event files are read in the order of their names, which have whole seconds
    write(run, "tensorboard", [{"step": 2, "loss": 20.0}], resume_after=1)
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1.0), (2, 20.0)]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 1.0, "kl": None}, {"step": 2, "loss": 20.0}]
    assert "tensorflow" not in sys.modules


def test_a_run_goes_on_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    shown = write(tmp_path / "run", "tensorboard", [{"step": 1}])
    assert shown == "warning: no TensorBoard events: pip install tensorboard adds them\n"
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # not installed
    assert make_config(task="text").report_to == []


def test_wandb_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    def refuse(**_):
        raise RuntimeError("api_key not configured\nmore")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with pytest.raises(UserError, match=r"wandb does not start \(api_key not configured\); run `wandb login`"):
        write(tmp_path / "run", "wandb", [])


def test_a_wandb_run_that_python_has_started_gets_the_metrics_and_goes_on(tmp_path, monkeypatch):
    logged, config, ended = [], {}, []
    own = types.SimpleNamespace(
        id="sweep7", log=lambda values, step: logged.append((step, values)), finish=lambda: ended.append(True),
        config=types.SimpleNamespace(update=lambda values, allow_val_change: config.update(values)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=own))
    write(tmp_path / "run", "wandb", [{"step": 1, "loss": 0.5}])
    assert logged == [(1, {"loss": 0.5})] and config["report_to"] == ["wandb"] and not ended
    assert (tmp_path / "run" / "wandb_id").read_text() == "sweep7"


def test_wandb_gets_completions_and_pictures(tmp_path, monkeypatch):
    """By wandb itself, which writes to the disk where it is offline."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    columns = {"completion": ["a", "b"], "reward/x": np.array([0.5, 1.0], np.float32), "pictures": [[], []]}
    pictures = [np.full((4, 6, 3), value, np.uint8) for value in (10, 200)]
    gallery = [GalleryEntry("a dog", "a brown dog", *pictures, {}), GalleryEntry("a text", "another", None, None, {})]
    config = make_config(task="text")

    def act(output):
        output.completions(1, columns)
        output.iteration({"step": 1, "loss": 1.0, "kl": float("nan")})
        output.finish(Finished({"baseline_reward": 1.0, "evaluation": {}}, gallery=gallery), config=config)

    write(run, "wandb", [], act=act)
    write(run, "wandb", [], resume_after=1)  # continues its own
    assert len({folder.name.rpartition("-")[2] for folder in (run / "wandb").glob("offline-run-*")}) == 1
    stored = b"".join(stream.read_bytes() for stream in (run / "wandb").glob("offline-run-*/*.wandb"))
    assert b"loss" in stored and b"baseline_reward" in stored
    (media,) = (run / "wandb").glob("offline-run-*/files/media")
    (table,) = media.glob("table/completions*.json")
    found = json.loads(table.read_text())
    assert found["columns"] == ["completion", "reward/x"] and found["data"] == [["a", 0.5], ["b", 1.0]]
    assert len([*media.glob("images/gallery*.png")]) == 2


def test_a_missing_wandb_is_said_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = ["--task=text", "--policy.path=nowhere", "--data.prompts=nowhere.txt", "--rewards=m:f"]
    assert train.main([*words, "--report_to=wandb", f"--run_dir={tmp_path / 'run'}"]) == 2
    expected = 'error: wandb is not installed; run pip install "grpo_jax[logging]"\n'
    assert capsys.readouterr().err == expected and not (tmp_path / "run").exists()
