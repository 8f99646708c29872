"""Services that track runs: Weights & Biases, MLflow, trackio. Each library's own login, address and offline mode hold.

A tracked run is the same one again on resume: the run directory keeps its name there.
"""

from __future__ import annotations

import importlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config.files import read_text
from grpo_jax.errors import UserError, one_line
from grpo_jax.runs.directory import RunDirectory, finite, write_atomically
from grpo_jax.tasks.display import GalleryEntry

_COMPLETIONS = 64  # of an iteration that a table shows
_CELLS = (str, bool, int, float, type(None))
_LONGEST, _AT_ONCE = 500, 100  # characters of a parameter, and parameters of a call, that every MLflow server takes


class WeightsAndBiases:
    """A run on Weights & Biases."""

    def __init__(self, run: RunDirectory, config: Mapping[str, Any]):
        """Starts or continues the run.

        Raises:
          UserError: wandb refuses to start.
        """
        import wandb

        id_file = run.path / "wandb_id"
        identity = _kept(id_file) or f"{time.time_ns():x}"
        self._run = _started(
            "wandb",
            "run `wandb login`, or set WANDB_MODE=offline",
            lambda: wandb.init(
                project=_project(config), name=run.path.name, dir=str(run.path), id=identity, resume="allow",
                config=dict(config),
            ),
        )  # fmt: skip
        write_atomically(id_file, identity)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one row."""
        self._run.log(numbers(metrics), step=step)

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Logs the first of them as a table, with the iteration's numbers."""
        import wandb

        first = {name: [_plain(value) for value in column[:_COMPLETIONS]] for name, column in columns.items()}
        shown = {name: column for name, column in first.items() if all(isinstance(cell, _CELLS) for cell in column)}
        table = wandb.Table(columns=list(shown), data=[list(row) for row in zip(*shown.values(), strict=True)])
        self._run.log({"completions": table}, step=step)

    def finish(self, summary: Mapping[str, Any], tables: Sequence[Any], gallery: Sequence[GalleryEntry] = ()) -> None:
        """Puts the summary into the run's, logs each table under its title, and the gallery as one with pictures."""
        import wandb

        self._run.summary.update(finite(summary))
        for table in tables:
            rows: list[Any] = [list(row) for row in table.rows]
            name = re.sub(r"\W+", "_", table.title)  # part of a file's name
            self._run.log({f"table/{name}": wandb.Table(columns=list(table.columns), data=rows)})

        def image(picture: Any) -> Any:
            return None if picture is None else wandb.Image(picture)

        if gallery:
            rows = [[entry.prompt, entry.rewrite, image(entry.before), image(entry.after)] for entry in gallery]
            columns: list[Any] = ["prompt", "text", "before", "after"]
            self._run.log({"table/gallery": wandb.Table(columns=columns, data=rows)})

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class MLflow:
    """A run of an MLflow experiment, at MLFLOW_TRACKING_URI or where MLflow puts it otherwise."""

    def __init__(self, run: RunDirectory, config: Mapping[str, Any]):
        """Starts or continues the run.

        Raises:
          UserError: the tracking server or store does not answer, or the run is not there any more.
        """
        import mlflow

        self._directory, self._last, self._status = run, 0, "KILLED"  # until it is finished
        id_file = run.path / "mlflow_id"

        def start() -> tuple[Any, str]:
            client, known = mlflow.MlflowClient(), _kept(id_file)
            if known is not None:
                client.update_run(known, status="RUNNING")
                return client, known
            experiment = client.get_experiment_by_name(_project(config))
            place = experiment.experiment_id if experiment else client.create_experiment(_project(config))
            made = client.create_run(place, run_name=run.path.name).info.run_id
            told = [mlflow.entities.Param(name, str(value)[:_LONGEST]) for name, value in _leaves(config)]
            for first in range(0, len(told), _AT_ONCE):  # once: parameters of a run cannot be changed
                client.log_batch(made, params=told[first : first + _AT_ONCE])
            return client, made

        self._client, self._id = _started("mlflow", "see MLFLOW_TRACKING_URI", start)
        write_atomically(id_file, self._id)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one row."""
        import mlflow

        now, found = time.time_ns() // 10**6, numbers(metrics).items()
        told = [mlflow.entities.Metric(re.sub(r"[^\w./ -]", "_", name), value, now, step) for name, value in found]
        self._client.log_batch(self._id, metrics=told)
        self._last = step

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Nothing: completions/ lies beside."""

    def finish(self, summary: Mapping[str, Any], tables: Sequence[Any], gallery: Sequence[GalleryEntry] = ()) -> None:
        """Logs what was measured before and after, and keeps summary.json and report.html as artifacts."""
        self._status = "FINISHED"
        self.write(self._last, _measured(summary))
        self._client.log_dict(self._id, finite(summary), "summary.json")
        self._client.log_artifact(self._id, str(self._directory.report))

    def close(self) -> None:
        """Ends the run; one that goes on later is "KILLED" until then."""
        self._client.set_terminated(self._id, self._status)


class Trackio:
    """A run of trackio: on this machine (TRACKIO_DIR), or where its own environment variables say."""

    def __init__(self, run: RunDirectory, config: Mapping[str, Any]):
        """Starts or continues the run.

        Raises:
          UserError: trackio refuses to start.
        """
        import trackio

        name_file = run.path / "trackio_name"
        known = _kept(name_file)
        name = known or f"{run.path.name}-{time.time_ns():x}"
        self._run = _started(
            "trackio",
            "see its documentation",
            lambda: trackio.init(
                project=_project(config), name=name, config=dict(config), resume="allow" if known else "never"
            ),
        )
        write_atomically(name_file, name)
        self._last = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one row."""
        self._run.log(numbers(metrics), step=step)
        self._last = step

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Nothing: completions/ lies beside."""

    def finish(self, summary: Mapping[str, Any], tables: Sequence[Any], gallery: Sequence[GalleryEntry] = ()) -> None:
        """Logs what was measured before and after."""
        self._run.log(_measured(summary), step=self._last)

    def close(self) -> None:
        """Writes what is left and ends the run."""
        self._run.finish()


TRACKERS: dict[str, Callable[[RunDirectory, Mapping[str, Any]], Any]] = {
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""By what `report_to` calls them, which is the name of their package too."""


def require_tracker(name: str) -> None:
    """Raises UserError where the package of a service is not installed."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"report_to: {name} is not installed; pip install {name}, or leave it out of report_to"
        ) from error


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, without its step."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "step" and value is not None and not isinstance(value, str) and math.isfinite(float(value))
    }


def _started(name: str, hint: str, start: Callable[[], Any]) -> Any:
    try:
        return start()
    except Exception as error:
        reason = one_line((str(error).strip().splitlines() or [type(error).__name__])[0])
        raise UserError(f"report_to: {name} does not start ({reason}); {hint}") from error


def _kept(path: Path) -> str | None:
    """What a run directory has kept of its tracked run."""
    return read_text(path).strip() if path.exists() else None


def _project(config: Mapping[str, Any]) -> str:
    return config.get("project") or "grpo_jax"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of nested sections by their dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _measured(summary: Mapping[str, Any]) -> dict[str, float]:
    """What was measured before and after, a number each."""
    return numbers(
        {
            f"evaluation/{name}/{when}": value
            for name, values in summary.get("evaluation", {}).items()
            for when, value in values.items()
        }
    )


def _plain(value: Any) -> Any:
    """A cell of a table: a plain number or text."""
    return value.item() if hasattr(value, "item") else value
