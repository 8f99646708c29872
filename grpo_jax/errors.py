"""What the commands show in one line, and how: without a traceback, with an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "diffusers", "open_clip", "accelerate", "PIL"), "diffusion"),
    **dict.fromkeys(("sklearn", "ray", "sentence_transformers"), "recommendation"),
    **dict.fromkeys(("gymnax", "six"), "cartpole"),
    **dict.fromkeys(("tensorboard", "wandb"), "logging"),
    "qwix": "quantised",
}
"""The extra that brings a module which is imported only where it is needed."""


class UserError(Exception):
    """Something the user can mend: the message says what is wrong and what to do. Commands exit with 2."""


class StopRun(UserError):
    """A judge is gone for good: the run saves and ends. Never turned into a missing reward."""


class StageError(RuntimeError):
    """A stage raised; the original exception is the `__cause__`. Has `stage` (name) and `chunk` (index)."""

    def __init__(self, stage: str, chunk: int, reason: str):
        """Say which stage failed, on which chunk, and why."""
        super().__init__(f"stage {stage!r} failed on chunk {chunk}: {reason}")
        self.stage = stage
        self.chunk = chunk


class StageTimeout(StageError):
    """A stage took longer than allowed for one chunk."""


def shown(value: object, most: int = 60) -> str:
    """A value as an error line shows it: its repr, in so many characters at most."""
    try:
        text = repr(value)
    except Exception as error:  # a number of 5000 digits, a list without end, anyone's own class
        text = f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def said(name: object, most: int = 80) -> str:
    """A name as an error line shows it: as it stands, where it is short and can be printed."""
    text = str(name)
    return text if text.isprintable() and len(text) <= most else shown(text, most)


@contextmanager
def extras_named() -> Iterator[None]:
    """Says which extra brings a module that an import inside did not find; a decorator too.

    Raises:
        UserError: A module of `EXTRAS` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise UserError(f'{error.name} is not installed; run pip install "grpo_jax[{EXTRAS[error.name]}]"') from error


def guarded(function: Callable[[], Any], *, debug: bool = False) -> int:
    """Runs a command: a user's mistake or a failed judge is one line and exit code 2, an interrupt 130.

    Args:
        function: The command; an int it returns is the exit code.
        debug: Let tracebacks through.
    """
    try:
        with extras_named():
            result = function()
    except (UserError, StageError) as error:
        if debug or (isinstance(error, StageError) and error.stage == "sample"):
            raise
        # One line whatever a user's file, or a library, put into the message.
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return result if isinstance(result, int) else 0
