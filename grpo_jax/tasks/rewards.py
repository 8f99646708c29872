"""Rewards as functions: loading the user's, calling them all, and saying which one failed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.errors import UserError

Reward = Callable[..., Any]


class RewardError(RuntimeError):
    """A reward raised, or returned something that is not one number per completion. Has `name`."""

    def __init__(self, name: str, reason: str):
        """Say which reward failed and why."""
        super().__init__(f"reward {name!r} {reason}")
        self.name = name


def load_reward(path: str) -> Reward:
    """A reward by import path.

    Args:
        path: "package.module:function" or "folder/file.py:function".

    Raises:
        UserError: There is no such file, module or function, or it cannot be called as a reward.
    """
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise UserError(f"reward {path!r}: expected package.module:function or file.py:function")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except UserError:
        raise
    except Exception as error:  # whatever the user's module raises while it is imported
        raise UserError(f"reward {path!r}: importing {source} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise UserError(f"reward {path!r}: {source} has no function {name!r} (functions there: {names})")
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"reward file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collect_rewards(
    functions: Sequence[Reward],
    names: Sequence[str],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Any],
    group_size: int,
    *,
    on_error: str = "raise",
) -> np.ndarray:
    """Calls every reward on the flat batch and keeps the objectives apart.

    Args:
        functions: N rewards, reward(prompts, completions, **columns) → P·G numbers or None for a missing one. A
            reward that does not take **columns gets those it names.
        names: N names.
        prompts: P·G prompts, each repeated for its group.
        completions: P·G texts.
        columns: The rows' columns and the pictures.
        group_size: G.
        on_error: "raise", or "missing": what a failed reward or a value that is not finite becomes.

    Returns:
        f32 [P, G, N]; NaN is missing.

    Raises:
        RewardError: A reward raised, or returned another number of values, text, or values that are not finite.
    """
    result = np.full((len(functions), len(completions)), np.nan, np.float32)
    for index, (function, name) in enumerate(zip(functions, names, strict=True)):
        try:
            values = function(list(prompts), list(completions), **_wanted(function, columns))
            result[index] = _as_numbers(name, values, len(completions), strict=on_error == "raise")
        except RewardError:
            raise
        except Exception as error:  # a judge may raise anything
            if on_error == "raise":
                raise RewardError(name, f"raised {type(error).__name__}: {error}") from error
    return np.moveaxis(result, 0, -1).reshape(len(completions) // group_size, group_size, len(functions))


def _wanted(function: Reward, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns a reward takes: all with **columns, else those it names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return dict(columns)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(columns)
    named = {parameter.name for parameter in parameters}
    return {name: value for name, value in columns.items() if name in named}


def _as_numbers(name: str, values: Any, count: int, *, strict: bool) -> np.ndarray:
    """A reward's answer as f32 [count]; None is missing, anything else must be a finite number if `strict`."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if values is None or isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise RewardError(name, f"must return {count} numbers, got {type(values).__name__}")
    if len(values) != count:
        raise RewardError(name, f"must return {count} numbers, one per completion, got {len(values)}")
    absent = np.array([value is None for value in values])
    try:
        numbers = np.array([np.nan if value is None else float(value) for value in values], np.float32)
    except (TypeError, ValueError) as error:
        raise RewardError(name, f"must return numbers: {error}") from error
    broken = ~np.isfinite(numbers) & ~absent
    if strict and broken.any():
        where = int(np.flatnonzero(broken)[0])
        raise RewardError(
            name, f"returned {values[where]} for completion {where}: return None where there is no reward"
        )
    return np.where(broken, np.nan, numbers)
