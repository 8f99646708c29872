"""Seconds of a run by what they were spent on, over all the processes that it took."""

from __future__ import annotations

import time
from typing import Any


def add_seconds(seconds: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """The sum by name."""
    return {name: seconds.get(name, 0.0) + more.get(name, 0.0) for name in {**seconds, **more}}


def with_total(seconds: dict[str, float], clock: float) -> dict[str, float]:
    """Seconds as a checkpoint and the summary hold them: "total" is the whole run's until now.

    While a process runs, "total" is what earlier ones took: the checkpoint that it started from says so.

    Args:
        seconds: By name; no "total" where there was no process before.
        clock: `time.monotonic()` at the start of this process.
    """
    parts = {name: value for name, value in seconds.items() if name != "total"}
    return {**parts, "total": seconds.get("total", 0.0) + time.monotonic() - clock}


def remembered(progress: Any, clock: float) -> dict[str, Any]:
    """What a checkpoint's meta holds of a run's progress (a NamedTuple with `seconds`)."""
    return {"progress": progress._replace(seconds=with_total(progress.seconds, clock))._asdict()}
