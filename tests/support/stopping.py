"""Runs that are told to stop: by the event that a signal would set, at a place that is the same each time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_jax.runs import trainer


class AfterRows:
    """Whether a stop was asked for: once metrics.jsonl of a run has so many rows."""

    def __init__(self, run: Path, rows: int):
        self.metrics, self.rows = run / "metrics.jsonl", rows

    def is_set(self) -> bool:
        return self.metrics.is_file() and len(self.metrics.read_text().splitlines()) >= self.rows

    def at_once(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def stopped_after(run: Path, rows: int) -> Iterator[None]:
    """Within, a run in this folder stops and saves after so many iterations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "stop_requests", lambda: contextlib.nullcontext(AfterRows(run, rows)))
        yield
