"""Results and failures of the user's functions: rewards, environments and tools, `async def` ones too."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from grpo_jax.errors import one_line

T = TypeVar("T")
_PACKAGE = Path(__file__).parents[1]
_INSTALLED = tuple(
    f"{folder}{os.sep}"
    for folder in (_PACKAGE, _PACKAGE.parent / "bridges", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
)


class BadReturn(TypeError):
    """A reward or an environment returned another form; the message states the expected one."""


def reason_of(error: BaseException) -> str:
    """Describe a reward's exception in one line, with the line of the user's code that raised it."""
    if isinstance(error, BadReturn):
        return str(error)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [(file, line) for file, line in frames if not file.startswith((*_INSTALLED, "<frozen"))]
    here = f"{os.getcwd()}{os.sep}"
    place = f" ({places[-1][0].removeprefix(here)}:{places[-1][1]})" if places else ""
    return f"it raised {one_line(type(error).__name__, 40)}: {one_line(error, 80)}{place}"


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all `async def` rewards in this process; they may keep connections open."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:  # SystemExit ends the loop; pending tasks continue when it runs again
            with suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=run, name="async rewards", daemon=True).start()
    return loop


def begin(returned: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in `event_loop`."""
    return asyncio.run_coroutine_threadsafe(returned, event_loop())


def all_finished(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines that run concurrently in `event_loop`."""
    futures = [begin(coroutine) for coroutine in coroutines]
    return [future.result() for future in futures]


async def call_async(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Return a function's result, awaited if it is a coroutine; it sees no running loop, so it may call asyncio.run."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        returned = function(*arguments, **named)
    finally:
        asyncio._set_running_loop(loop)
    return await returned if inspect.isawaitable(returned) else returned


def as_list(returned: Any, count: int) -> list[object]:
    """Return `count` values from a list or a one-dimensional array, None if NumPy masks one; else raise BadReturn."""
    got = type(returned).__name__
    if hasattr(returned, "shape"):
        got = f"shape {tuple(returned.shape)}"
        returned = returned.tolist() if len(returned.shape) == 1 else None
    listed = isinstance(returned, Sequence) and not isinstance(returned, str | bytes | Mapping)
    if not listed or len(returned) != count:
        got = str(len(returned)) if listed else one_line(got, 60)
        raise BadReturn(f"it must return a list or an array, one value for each of {count} completions, got {got}")
    return [None if value is np.ma.masked else value for value in returned]


_LARGEST = float(np.finfo(np.float32).max)
"""Numbers are compared as stored: a number beyond float32 is not finite there."""
_NO_NUMBERS = (str, bytes, bytearray, complex, np.complexfloating, np.datetime64, np.timedelta64)
"""Types that `float` takes, or NumPy turns into a number with a warning."""


def as_number(value: Any) -> float | None:
    """Return a finite float, or None for anything else, even if the value's own methods raise."""
    if isinstance(value, _NO_NUMBERS):
        return None
    try:
        number = float(value)
    except (Exception, SystemExit):
        return None
    return number if abs(number) <= _LARGEST else None
