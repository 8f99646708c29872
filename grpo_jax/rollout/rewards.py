"""Calling rewards: by name or import path, flat as TRL calls them, stacked and never silently 0.

A reward is a function ``reward(prompts, completions, **columns) -> list[float | None]`` (or an array). It is called
flat, with each prompt repeated for its G completions; None is a reward that does not apply.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from grpo_jax.errors import StopRun, UserError
from grpo_jax.rollout.data import RESERVED_COLUMNS

Reward = Callable[..., Any]

IN_PYTHON = "<given>"
"""Stands in a run's config for what `run` was given in Python: as data.prompts, and as the place of a function."""


class Maker(NamedTuple):
    """What makes a reward of its options: make(**options) → reward."""

    make: Callable[..., Reward]


class RewardError(UserError):
    """A reward that failed. ``reward`` is its name; what it raised is the cause."""

    def __init__(self, reward: str, reason: str):
        """Names the reward and says what it did."""
        super().__init__(f"reward {reward}: {reason}")
        self.reward = reward


def collect_rewards(
    functions: Sequence[Reward],
    names: Sequence[str],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Any],
    group_size: int,
    *,
    on_error: Literal["raise", "missing"] = "raise",
) -> np.ndarray:
    """Calls every reward once.

    Args:
        functions: N rewards. One without ``**columns`` receives those of its arguments that exist.
        names: N names, for errors.
        prompts: P·G texts, each prompt repeated.
        completions: P·G texts.
        columns: P·G values for each of the rewards' other arguments (pictures too).
        group_size: G.
        on_error: What a reward that raises, returns the wrong number of values, or a value that is no finite number
            does: "raise" raises; "missing" makes the values missing, all of them in the first two cases.

    Returns:
        f32[P, G, N]; NaN where a reward is missing.

    Raises:
        RewardError: As `on_error` says.
        ValueError: If the arguments do not fit each other.
    """
    count = len(completions)
    if len(prompts) != count or group_size < 1 or count % group_size:
        raise ValueError(
            f"prompts and completions must both have P·G texts with G = {group_size}, got {len(prompts)} and {count}"
        )
    if len(functions) != len(names):
        raise ValueError(f"names must name {len(functions)} functions, got {list(names)}")
    for name, values in columns.items():
        if len(values) != count:
            raise ValueError(f"column {name!r} must have {count} values, got {len(values)}")
    if on_error not in ("raise", "missing"):
        raise ValueError(f'on_error must be "raise" or "missing", got {on_error!r}')
    arguments = {"prompts": list(prompts), "completions": list(completions), **columns}
    result = np.full((count, len(functions)), np.nan, np.float32)
    for n, (function, name) in enumerate(zip(functions, names, strict=True)):
        result[:, n] = _call(function, name, arguments, count, on_error)
    return result.reshape(count // group_size, group_size, len(functions))


def _call(function: Reward, name: str, arguments: dict[str, Any], count: int, on_error: str) -> np.ndarray:
    """One reward's values, f64[count]."""
    try:
        # Each gets lists of its own: what one reward does to them is not the next one's input.
        own = {name: list(value) if isinstance(value, list) else value for name, value in arguments.items()}
        returned = function(**accepted_arguments(function, own))
        values = _as_list(returned)
    except StopRun:
        raise
    except Exception as error:
        if on_error == "missing":
            return np.full(count, np.nan)
        first = (str(error).strip().splitlines() or [""])[0]
        raise RewardError(name, f"it raised {type(error).__name__}: {first}") from error
    if len(values) != count:
        if on_error == "missing":
            return np.full(count, np.nan)
        raise RewardError(name, f"it must return one value for each of {count} completions, got {len(values)}")
    numbers = np.full(count, np.nan)
    for i, value in enumerate(values):
        if value is None:
            continue
        number = _as_number(value)
        if number is not None:
            numbers[i] = number
        elif on_error == "raise":
            text = arguments["completions"][i]
            raise RewardError(
                name, f"it returned {value!r} for completion {i} ({text[:60]!r}), not a finite number or None"
            )
    return numbers


def accepted_arguments(function: Reward, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments a reward takes: all with ``**columns``, otherwise those it names."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _as_list(returned: Any) -> list[Any]:
    """Values from a list, a NumPy, JAX or torch array of one axis."""
    if hasattr(returned, "detach"):
        returned = returned.detach().cpu()
    if hasattr(returned, "shape") and len(returned.shape) != 1:
        raise TypeError(f"a reward returns a list or an array with one axis, got shape {tuple(returned.shape)}")
    if hasattr(returned, "tolist"):
        return returned.tolist()
    if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Sequence):
        raise TypeError(f"a reward returns a list or an array with one axis, got {type(returned).__name__}")
    return list(returned)


def _as_number(value: Any) -> float | None:
    """A finite float, or None for whatever else."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    # Compared as stored: what overflows float32 is not finite there.
    return number if abs(number) <= float(np.finfo(np.float32).max) else None


def with_options(reward: Reward, label: str, options: Mapping[str, Any]) -> Reward:
    """A reward with some of its arguments fixed; a column of the data of the same name does not reach it.

    Args:
        reward: A user's.
        label: Its name, for errors.
        options: Values by argument.

    Raises:
        UserError: As `check_options`.
    """
    if not options:
        return reward
    check_options(label, reward, options, RESERVED_COLUMNS)

    @functools.wraps(reward)
    def fixed(**arguments: Any) -> Any:
        return reward(**{**accepted_arguments(reward, arguments), **options})

    return fixed


def check_options(label: str, function: Callable[..., Any], options: Mapping[str, Any], other: Collection[str]) -> None:
    """Refuses options that a function does not name among its arguments.

    What it would only swallow in ``**columns`` is refused too: nearly every reward has them, and a mistyped option
    would vanish there.

    Args:
        label: Name of the reward.
        function: The reward, or what makes it.
        options: Values by argument.
        other: Arguments that are no options.

    Raises:
        UserError: Naming the option, and those there are.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind in named and p.name not in other]
    for option in options:
        if option not in known:
            raise UserError(
                f"rewards.{label}.options: expected arguments of the reward ({', '.join(known) or 'it has none'}), "
                f"got {option!r}"
            )


def import_path(function: Reward, label: str) -> str:
    """What finds a function again, as a config names it: "module:function", else "<given>:label".

    Found are functions at the top level of a module, under their own name: not those of a script that was run or
    typed in, nor lambdas, methods and objects.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    home = sys.modules.get(module or "")
    file = Path(getattr(home, "__file__", None) or "")
    stem = file.parent.name if file.name == "__init__.py" else file.stem
    importable = module != "__main__" and name == label and getattr(home, label, None) is function
    # A file that was loaded under another name, as a config's file.py is, is not found by that name.
    if module is None or not importable or stem != module.rpartition(".")[2]:
        return f"{IN_PYTHON}:{label}"
    return f"{module}:{label}"
