"""The outcome of a measurement: its figures, or why there are none; saved as soon as it is known.

A row without figures has "absent" (a package that is not installed), "skipped" or "failed". Only "absent" excuses it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Measurements = Mapping[str, Callable[[], Figures]]
"""By name and importance: there may be no time for the last ones."""
OPTIONAL = ("torch", "transformers", "diffusers", "open_clip", "trl", "datasets", "qwix", "vllm")
"""Packages that may be absent. Any other import that fails is a failure: the project's own modules move."""


class Skip(Exception):
    """A measurement that is impossible here; the message has the reason."""


def needs(*packages: str) -> None:
    """Raise ModuleNotFoundError for the first package that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"the package {package} is not installed", name=package)


def needs_torch_beside_jax() -> str:
    """Return torch's device of JAX's first device, "cuda" or "cpu"; skip if torch cannot use it."""
    needs("torch")
    import jax
    import torch

    if jax.default_backend() == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise Skip("torch sees no CUDA device")
    return "cuda"


def compared(difference: float, allowed: float, **more: Any) -> Figures:
    """Figures of two results that ought to agree."""
    return {"difference": float(difference), "allowed": allowed, **more, "agrees": bool(difference <= allowed)}


def outcome(measure: Callable[[], Figures], left: float) -> Figures:
    """Figures and seconds of a measurement, or why there are none, with the traceback of a failure."""
    if left <= 0:
        return {"skipped": "no time was left"}
    start = time.monotonic()
    try:
        return {**measure(), "took": time.monotonic() - start}
    except Skip as reason:
        return {"skipped": str(reason)}
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
            return {"absent": error.name}
        first = (str(error).strip().splitlines() or [""])[0]
        failure = f"{type(error).__name__}: {first}"[:300]
        return {"failed": failure, "took": time.monotonic() - start, "traceback": traceback.format_exc()[-6000:]}


def release() -> None:
    """Free the memory of the last measurement, so that the next one has an empty GPU."""
    gc.collect()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def work(measurements: Measurements, seconds: float, tell: Callable[[dict[str, Figures]], None]) -> None:
    """Make all measurements for which there is time; call tell(results so far) after each."""
    deadline, rows = time.monotonic() + seconds, {}
    for name, measure in measurements.items():
        rows[name] = outcome(measure, deadline - time.monotonic())
        tell(rows)
        release()


def keep(content: Figures, path: Path) -> None:
    """Write JSON atomically."""
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)
