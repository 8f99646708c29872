"""What the commands show in one line, and how: without a traceback, with an exit code."""

from __future__ import annotations

import reprlib
import sys
import threading
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


def one_line(value: object, limit: int = 100) -> str:
    """What a user's text, exception or object says of itself: one line that can be printed, of `limit` characters.

    Never raises, whatever its own methods do. Texts and exceptions speak as they are, other objects as their repr.
    """
    try:
        text = str(value) if isinstance(value, str | BaseException) else reprlib.repr(value)
    except BaseException:
        text = f"<{type(value).__name__}>"
    words = " ".join(text[: 4 * limit].split())
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def is_own_doing(error: BaseException) -> bool:
    """Whether what a judge raised is its own: no `StopRun`, and no Ctrl-C, which the main thread alone gets."""
    interrupt = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
    return not interrupt and not isinstance(error, StopRun)


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
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return result if isinstance(result, int) else 0
