"""Callbacks and early ends: results are the same however often a run is stopped."""

import dataclasses
import io
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from support.text_task import assert_same_run, rows

from grpo_jax import evaluate, export
from grpo_jax.config.run import make_config
from grpo_jax.errors import StopRun, UserError
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.runs.session import Callbacks, EarlyStopping
from grpo_jax.runs.trainer import Trainer
from grpo_jax.train import run

ENTROPY = 2.0  # the target, in nats
STEPS = 4  # of six: nothing exceeds the first validation by so much, and three more are waited for


@pytest.fixture(scope="module")
def config(place):
    values = yaml.safe_load(place.config.read_text())
    values["training"] = {"prompts_per_batch": 4, "max_steps": 6, "save_every": 2, "inner_epochs": 2, "minibatches": 2}
    values["training"] |= {"early_stopping_patience": 3, "early_stopping_threshold": 1e3}
    values["evaluation"] = {"every": 1, "samples": 0, "best_by": "letters"}
    values["algorithm"] = {**values.get("algorithm", {}), "entropy_target": ENTROPY, "entropy_coef": 0.1}
    return make_config(values)


def go(config, folder, *, judge="work:0", **more):
    """The run in this process; with the changes of `training` that a resume may make."""
    training = config.training.replace(**more.pop("training", {}))
    resume = (folder / "config.yaml").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_RUN", str(folder))
        patch.setenv("JUDGE", judge)
        return run(config.replace(run_dir=str(folder), resume=resume, training=training), **more)


def measure_beside(folder):
    """Measure and export a run that is training: what it has is found, and nothing of it is touched."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert json.loads(before[folder / "run.lock"])["process"] == os.getpid()
    out = folder.parent / "evaluation.json"
    latest = evaluate.main(["--run", str(folder), "--checkpoint", "latest", "--out", str(out), "--json"])
    assert latest == 0 and json.loads(out.read_text())["step"] == STEPS
    with pytest.MonkeyPatch.context() as patch:
        complaints = io.StringIO()
        patch.setattr("sys.stderr", complaints)
        assert evaluate.main(["--run", str(folder), "--checkpoint", "final"]) == 2
    told = complaints.getvalue()
    assert f"no checkpoint 'final' in {folder / 'checkpoints'}: there are: " in told and told.endswith("4, best\n")
    policy = folder.parent / "policy"
    assert export.main(["--run", str(folder), "--checkpoint", "latest", "--out", str(policy)]) == 0
    assert (policy / "config.json").is_file()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.fixture(scope="module")
def told(config, tmp_path_factory):
    """A run that nobody stopped, what it returned, and what its callbacks were told, in order."""
    folder, moments = tmp_path_factory.mktemp("told") / "run", []

    def take(name):
        def callback(moment):
            if moment.checkpoint is not None:
                assert moment.checkpoint.is_dir()
                with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
                    assert checkpoints.read_meta(moment.step)["step"] == moment.step
            if moment.step == STEPS and name == "on_checkpoint":
                measure_beside(folder)
            moments.append((name, moment))

        return callback

    names = Callbacks._fields
    return folder, go(config, folder, **{name: take(name) for name in names}), moments


def test_callbacks_are_called_in_order_with_the_rows_of_metrics_jsonl(told):
    folder, _, moments = told
    expected = []
    for step in range(1, STEPS + 1):
        expected += [("on_iteration", step), ("on_validation", step)]
        expected += [("on_checkpoint", step)] if step % 2 == 0 else []
    assert [(name, moment.step) for name, moment in moments] == expected
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [moment.metrics for name, moment in moments if name == "on_iteration"] == written
    validated = [moment.metrics for name, moment in moments if name == "on_validation"]
    assert all(metrics.items() <= row.items() for metrics, row in zip(validated, written, strict=True))
    assert {"validation/score", "validation/letters"} < validated[0].keys()
    assert all(moment.iterations == 6 and moment.run_dir == folder for _, moment in moments)
    with pytest.raises(dataclasses.FrozenInstanceError):
        moments[0][1].step = 7


def test_early_stopping_ends_a_run_with_all_its_results(told):
    folder, summary, _ = told
    first = rows(folder)[0]["validation/letters"]
    assert summary["best"]["validation_score"] == max(row["validation/letters"] for row in rows(folder))
    reason = f"validation/letters has not exceeded {first:.4g}, of iteration 1, in 3 validations"
    assert summary["early_stopping"] == reason and not summary["stopped"] and summary["iterations"] == STEPS
    assert f"early stopping after iteration {STEPS}: {reason}" in (folder / "train.log").read_text()
    assert json.loads((folder / "summary.json").read_text())["reward"] == summary["reward"]
    assert (folder / "policy" / "model.safetensors").exists() and (folder / "report.html").exists()


def test_a_run_stopped_in_every_way_ends_as_an_uninterrupted_run(config, told, tmp_path, capsys):
    folder = tmp_path / "run"

    def tire(moment):
        raise RuntimeError("tired")

    with pytest.raises(UserError, match=r"on_iteration: RuntimeError: tired\. Saved after iteration 1; continue"):
        go(config, folder, on_iteration=tire)
    with pytest.raises(UserError, match=r"the reward is away.*Saved after iteration 2") as failed:
        go(config, folder, judge="validation:1")  # its validation is made up for
    logged = (folder / "train.log").read_text().splitlines()[-1].replace("--resume", "resume=True and")
    assert logged.replace(" --", " ") == f"error: {failed.value}"  # with the words of Python
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    summary = go(config, folder, on_validation=lambda moment: np.bool_(moment.step == 2))
    assert summary == {"stopped": True, "iteration": 2}
    assert "on_validation requested a stop" in capsys.readouterr().out
    assert go(config, folder, training={"max_hours": 1e-9}) == {"stopped": True, "iteration": 3}
    assert "training.max_hours = 1e-09 reached; saving\nstopped and saved after iteration 3" in capsys.readouterr().out
    ended = go(config, folder, on_iteration=lambda moment: True)  # of the last iteration: nothing is left to stop
    other, expected, _ = told
    assert not ended["stopped"] and ended["early_stopping"] == expected["early_stopping"]
    assert_same_run(folder, other)
    coefficients = [row["entropy_coef"] for row in rows(folder)]  # of each iteration's last update: four are made
    assert coefficients[0] == pytest.approx(0.1 - 4 * 0.005 * np.sign(rows(folder)[0]["entropy"] - ENTROPY))
    assert len(set(coefficients)) == STEPS


def test_patience_counts_validations_without_improvement():
    config = make_config(task="text", training={"early_stopping_patience": 2, "early_stopping_threshold": 0.1})
    waited, ended = EarlyStopping(), []
    for iteration, score in enumerate([1.0, 1.05, 1.2, float("nan"), 1.25, 1.31], 1):
        waited = waited.after({"score": score}, iteration, config)
        ended.append((waited.best, waited.validations, bool(waited.reason(config))))
    assert ended == [
        *((1.0, 0, False), (1.0, 1, False), (1.2, 0, False)),
        *((1.2, 1, False), (1.2, 2, True), (1.31, 0, False)),  # a missing score is no better
    ]
    missing = EarlyStopping().after({}, 1, config).after({}, 2, config)
    assert "was missing in 2 validations" in missing.reason(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": {"every": 0}}, "early_stopping_patience: expected 0 with evaluation.every 0"),
        ({"data": {"held_out": 0}}, "early_stopping_patience: expected 0, for there are no validation prompts"),
        ({"evaluation": {"best_by": "lettres"}}, "evaluation.best_by: expected one of score, letters, brief"),
        ({"evaluation": {"best_by": "kl_penalty"}}, "kl_penalty is kl; its weight is algorithm.kl_coef of metrics"),
        ({"training": {"max_hours": -1}}, "max_hours: expected a number >= 0"),
    ],
)
def test_contradictory_settings_are_refused(place, changes, message, tmp_path):
    values = yaml.safe_load(place.config.read_text()) | {"run_dir": str(tmp_path / "run")}
    values["training"] = {"prompts_per_batch": 4, "early_stopping_patience": 2} | changes.get("training", {})
    for name in ("evaluation", "data"):
        values[name] |= changes.get(name, {})
    with pytest.raises(UserError, match=message):
        run(make_config(values))


@pytest.mark.parametrize("answer", [57, "text", {}])
def test_a_callback_answers_nothing_or_a_bool(tmp_path, answer):
    """`lambda event: file.write(…)` returns a number, and is no request to stop."""
    trainer = SimpleNamespace(
        callbacks=Callbacks(on_iteration=lambda event: answer),
        progress=SimpleNamespace(iteration=1),
        iterations=2,
        output=SimpleNamespace(directory=RunDirectory(tmp_path)),
    )
    with pytest.raises(StopRun, match="on_iteration: TypeError: expected None, or True to stop, got "):
        Trainer.call_back(trainer, "on_iteration", {})
