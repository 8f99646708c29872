"""Functions of the user's that are told of a run as it goes, and may ask it to stop.

As in

    def watch(event):
        return event.metrics["kl"] > 0.5  # True: stop, with everything saved

    run(config, on_iteration=watch)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_jax.errors import UserError, one_line


@dataclass(frozen=True)
class IterationEvent:
    """What a callback is told.

    Attributes:
        step: Iterations done.
        iterations: That there are to be.
        metrics: By name as in metrics.jsonl: on an iteration its row, on a validation that row's "validation/…"; on a
            checkpoint nothing.
        run_dir: Of the run.
        checkpoint: The checkpoint that was written; None otherwise.
    """

    step: int
    iterations: int
    metrics: Mapping[str, float]
    run_dir: Path
    checkpoint: Path | None = None


Callback = Callable[[IterationEvent], bool | None]
"""callback(event) → True to stop the run as a signal does: saved, and `--resume` goes on; False or None goes on."""


class Callbacks(NamedTuple):
    """Who is told of what; None for nobody.

    Attributes:
        on_iteration: Each iteration, when its row of metrics.jsonl is written.
        on_validation: Each validation behind it.
        on_checkpoint: Each checkpoint of the loop, when it is on disk.
    """

    on_iteration: Callback | None = None
    on_validation: Callback | None = None
    on_checkpoint: Callback | None = None

    def ask(self, name: str, event: IterationEvent) -> bool:
        """Tells the callback of that name; whether it asks to stop.

        Raises:
            UserError: It raised, or returned something else.
        """
        callback = getattr(self, name)
        if callback is None:
            return False
        try:
            answer = callback(event)
        except Exception as error:
            raise UserError(f"{name}: {type(error).__name__}: {one_line(error)}") from error
        if answer is not None and not isinstance(answer, bool | np.bool_):
            raise UserError(f"{name}: expected it to return True to stop, else False or None, got {one_line(answer)}")
        return bool(answer)
