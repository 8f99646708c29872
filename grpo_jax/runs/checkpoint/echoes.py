"""What Orbax and tensorstore print of errors that they also raise: kept from the terminal, where one line stands."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

_LATE = "Event loop is closed"  # tensorstore tells a loop that has ended of a write that failed beside another


def silence() -> None:
    """Silences them from now on; a second time does nothing."""
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    if not getattr(sys.excepthook, "__grpo_jax__", False):
        sys.excepthook = _but_late(sys.excepthook)
        sys.unraisablehook = _but_late(sys.unraisablehook)
        threading.excepthook = _but_late(threading.excepthook)


def _but_late(hook: Any) -> Any:
    """The hook, which no longer hears of calls to a loop that has ended."""

    def told(*arguments: Any) -> None:
        error = arguments[1] if len(arguments) == 3 else arguments[0].exc_value
        if not (isinstance(error, RuntimeError) and str(error) == _LATE):
            hook(*arguments)

    told.__grpo_jax__ = True  # pyright: ignore[reportFunctionMemberAccess]
    return told
