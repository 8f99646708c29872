"""Early stopping: a run ends where validations bring nothing better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

SCORE = "score"
"""As training.early_stopping_metric: what is maximised, by which the best checkpoint is chosen."""


class Waited(NamedTuple):
    """What validations have come to; JSON in every checkpoint.

    Attributes:
        best: Best value of the metric so far; None before the first.
        iteration: Where it was reached.
        validations: How many since brought nothing better.
    """

    best: float | None = None
    iteration: int = 0
    validations: int = 0


def after_validation(waited: Waited, measures: Mapping[str, float], iteration: int, training: Any) -> Waited:
    """Takes a validation: better is what exceeds the best by more than training.early_stopping_threshold.

    Args:
        waited: Before it.
        measures: The validation's, `SCORE` among them.
        iteration: Behind which it was made.
        training: The config's section.
    """
    value = measures.get(training.early_stopping_metric, math.nan)
    better = waited.best is None or value > waited.best + training.early_stopping_threshold
    if math.isfinite(value) and better:
        return Waited(float(value), iteration)
    return waited._replace(validations=waited.validations + 1)


def reason_to_end(waited: Waited, training: Any) -> str:
    """Why training is over before its iterations are; "" if it is not."""
    patience = getattr(training, "early_stopping_patience", 0)  # a program that validates nothing has none
    if not patience or waited.validations < patience:
        return ""
    metric = training.early_stopping_metric
    if waited.best is None:
        return f"validation/{metric} was missing in {waited.validations} validations in a row"
    return (
        f"validation/{metric} has not exceeded {waited.best:.4g}, of iteration {waited.iteration}, in "
        f"{waited.validations} validations"
    )
