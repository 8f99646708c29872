"""MLflow and trackio: each by itself where it is installed, and everywhere by what is asked of it."""

import sys
import types
from collections import namedtuple

import pytest

from grpo_jax import train
from grpo_jax.errors import UserError
from grpo_jax.reports.writers import open_writers
from grpo_jax.runs.directory import RunDirectory

CONFIG = {"seed": 1, "project": "sums", "sampling": {"group_size": 8, "stop": []}, "task": {"kind": "text"}}
SUMMARY = {"evaluation": {"total": {"before": 0.25, "after": 0.5, "oracle": None}}, "seconds": 3.0}


def tracked(name, run, step, *, ends=True):
    """Writes one row of a run, as a process of a run does; `ends` says whether it is the last."""
    lines, writer = open_writers(run, [name], config=CONFIG)[0]
    lines.close()
    writer.write(step, {"step": step, "loss": step / 2, "kl": float("nan"), "reward/a@b": 1.0, "note": "text"})
    writer.completions(step, {"completion": ["a"]})
    if ends:
        run.report.write_text("<html>")
        writer.finish(SUMMARY, [], ())
    writer.close()


@pytest.fixture
def run(tmp_path):
    return RunDirectory.open(tmp_path / "mine")


# MLflow


class Client:
    """What MLflow's client is asked for, and all runs there are."""

    calls: list
    runs: dict

    def __getattr__(self, name):
        return lambda *given, **named: self.calls.append((name, *given, *named.values()))

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=self.runs[name]) if name in self.runs else None

    def create_experiment(self, name):
        return self.runs.setdefault(name, "7")

    def create_run(self, experiment_id, run_name):
        identity = f"{experiment_id}-{len(self.runs)}"
        self.runs[identity] = run_name
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=identity))


@pytest.fixture
def mlflow(monkeypatch):
    """A module that notes what it is asked."""
    client = type("Client", (Client,), {"calls": [], "runs": {}})
    entities = types.SimpleNamespace(
        Metric=namedtuple("Metric", "key value timestamp step"), Param=namedtuple("Param", "key value")
    )
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=client, entities=entities))
    return client


def test_mlflow_gets_rows_config_and_report_and_goes_on_in_the_same_run(mlflow, run):
    tracked("mlflow", run, 1, ends=False)
    tracked("mlflow", run, 2)
    assert mlflow.runs == {"sums": "7", "7-1": "mine"}
    params, row, first, again, other, final, kept, report, last = mlflow.calls
    assert params[:2] == ("log_batch", "7-1")
    assert dict(params[2]) == {
        "seed": "1", "project": "sums", "sampling.group_size": "8", "sampling.stop": "[]", "task.kind": "text",
    }  # fmt: skip
    assert [(one.key, one.value, one.step) for one in row[2]] == [("loss", 0.5, 1), ("reward/a_b", 1.0, 1)]
    assert first == ("set_terminated", "7-1", "KILLED") and again == ("update_run", "7-1", "RUNNING")
    assert [(one.key, one.step) for one in other[2]] == [("loss", 2), ("reward/a_b", 2)]
    assert [(one.key, one.value, one.step) for one in final[2]] == [
        ("evaluation/total/before", 0.25, 2),
        ("evaluation/total/after", 0.5, 2),
    ]
    assert kept[:2] == ("log_dict", "7-1") and kept[3] == "summary.json" and kept[2]["seconds"] == 3.0
    assert report == ("log_artifact", "7-1", str(run.report)) and last == ("set_terminated", "7-1", "FINISHED")


def test_a_server_that_does_not_answer_is_one_line(mlflow, run):
    def refuse(_, name):
        raise OSError("connection refused\nfor ever")

    mlflow.get_experiment_by_name = refuse
    with pytest.raises(UserError, match=r"^report_to: mlflow does not start \(connection refused\); see MLFLOW_TRACKI"):
        open_writers(run, ["mlflow"], config=CONFIG)


@pytest.mark.filterwarnings("default")  # its own and its database's
def test_mlflow_itself(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    tracked("mlflow", run, 1, ends=False)
    tracked("mlflow", run, 2)
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (found.info.run_name, found.info.status, found.data.params["sampling.group_size"]) == (
        "mine",
        "FINISHED",
        "8",
    )
    assert [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "loss")] == [(1, 0.5), (2, 1.0)]
    assert found.data.metrics["evaluation/total/after"] == 0.5
    assert {one.path for one in client.list_artifacts(found.info.run_id)} == {"report.html", "summary.json"}


# trackio


def test_trackio_gets_rows_and_goes_on_in_the_same_run(run, monkeypatch):
    calls = []

    def init(**options):
        calls.append(options)
        return types.SimpleNamespace(
            log=lambda row, step: calls.append((step, row)), finish=lambda: calls.append("end")
        )

    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=init))
    tracked("trackio", run, 1, ends=False)
    tracked("trackio", run, 2)
    first, row, end, again, other, final, last = calls
    assert first["name"] == again["name"] and first["name"].startswith("mine-")
    assert (first["project"], first["resume"], again["resume"]) == ("sums", "never", "allow")
    assert first["config"]["sampling"]["group_size"] == 8 and end == last == "end"
    assert row == (1, {"loss": 0.5, "reward/a@b": 1.0}) and other[0] == 2
    assert final == (2, {"evaluation/total/before": 0.25, "evaluation/total/after": 0.5})


@pytest.mark.filterwarnings("default")  # its own and its database's
def test_trackio_itself(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    tracked("trackio", run, 1, ends=False)
    tracked("trackio", run, 2)
    (name,) = SQLiteStorage.get_runs("sums")
    rows = SQLiteStorage.get_logs("sums", name)
    assert [(row["step"], row.get("loss")) for row in rows] == [(1, 0.5), (2, 1.0), (2, None)]


# missing


@pytest.mark.parametrize("name", ("wandb", "mlflow", "trackio"))
def test_what_is_not_installed_is_said_before_anything_is_loaded(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    words = ["--task=text", "--policy.path=nowhere", "--data.prompts=nowhere.txt", "--rewards=m:f"]
    assert train.main([*words, f"--report_to=[{name}]", f"--run_dir={tmp_path / 'run'}"]) == 2
    expected = f"error: report_to: {name} is not installed; pip install {name}, or leave it out of report_to\n"
    assert capsys.readouterr().err == expected and not (tmp_path / "run").exists()
