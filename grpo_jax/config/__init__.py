"""What a run is made of, as frozen dataclasses."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name in ("run", "sections", "algorithm", "command_line"):
        raise AttributeError(name)
    return getattr(importlib.import_module("grpo_jax.config.run"), name)
