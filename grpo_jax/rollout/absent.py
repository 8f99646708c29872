"""Rewards that never come: how long each has been missing for every completion, and when that ends a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

PATIENCE = 3
"""Iterations in a row without any reward, after which a run stops."""


def absent_in(values: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> list[str]:
    """The maximised rewards that no completion has.

    Args:
        values: Of each reward, any shape, NaN where missing.
        weights: Of each reward; one of weight 0 is not maximised, unless all are.
    """
    return [name for name in _maximised(weights) if np.isnan(values[name]).all()]


def counted(
    absent: Mapping[str, int], values: Mapping[str, np.ndarray], weights: Mapping[str, float]
) -> dict[str, int]:
    """Iterations in a row in which no completion had a reward, {name: number}, for those that are maximised.

    Args:
        absent: Before this iteration; empty at the start.
        values: As in `absent_in`, of this iteration.
        weights: Likewise.
    """
    gone = absent_in(values, weights)
    return {name: absent.get(name, 0) + 1 if name in gone else 0 for name in _maximised(weights)}


def without_signal(absent: Mapping[str, int], iterations: int) -> str:
    """What to say of a run that has had no reward at all lately; "" if it may go on.

    A reward may well apply to few prompts, and another be there for the rest. Where all of them are missing, for
    `PATIENCE` iterations in a row or in all iterations of a shorter run, there is nothing to learn from.

    Args:
        absent: As `counted` gives it.
        iterations: Of the whole run.
    """
    silent = min(absent.values(), default=0)
    if not silent or silent < min(PATIENCE, iterations):
        return ""
    return f"no completion got a reward in {silent} iterations in a row ({listed(list(absent))})"


def never_came(absent: Mapping[str, int], iteration: int, iterations: int) -> str:
    """What to note of single rewards that nobody got since the start; "" but for once, after `PATIENCE` iterations.

    Args:
        absent: As `counted` gives it.
        iteration: Iterations done.
        iterations: Of the whole run.
    """
    names = [name for name, count in absent.items() if count == iteration]
    if not names or len(names) == len(absent) or iteration != min(PATIENCE, iterations):
        return ""
    return f"no completion got the reward {listed(names)} in the first {iteration} iterations"


def _maximised(weights: Mapping[str, float]) -> list[str]:
    return [name for name, weight in weights.items() if weight] or list(weights)


def listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
