"""What each worker of a test session imports first.

All of them import all of this to collect the tests. On a new machine each would compile every module at the same time
as the others: here one compiles what the others then find compiled.
"""

import importlib
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path

PARTS = (
    ("torch", "torchvision", "diffusers", "peft"),
    ("jax", "flax", "orbax.checkpoint", "sympy", "matplotlib.pyplot"),
    ("scipy.stats", "pandas", "datasets", "ray", "wandb", "reasoning_gym"),
)
"""About as much to compile in each."""
PATIENCE = 120  # seconds: a worker that has died is not waited for


def imports_shared_out() -> None:
    """Import this worker's part, and wait until the others have theirs."""
    worker, count = os.environ["PYTEST_XDIST_WORKER"], int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    folder, deadline = Path(os.environ["HF_DATASETS_CACHE"]), time.monotonic() + PATIENCE
    for package in PARTS[int(worker.removeprefix("gw")) % len(PARTS)]:
        with suppress(ImportError), warnings.catch_warnings(action="ignore"):
            importlib.import_module(package)
    (folder / worker).touch()
    while len([*folder.glob("gw*")]) < min(count, len(PARTS)) and time.monotonic() < deadline:
        time.sleep(0.05)
