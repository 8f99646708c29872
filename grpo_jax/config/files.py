"""Files that a run reads whole: its own and its users' configs, JSON and lists, within bounds of size, time and depth.

A path may lead to a device without an end, to a pipe that nobody writes into, or to what a disk has damaged. Whatever
it is, it takes at most the memory of its bound to find that out, and the error is one line with the path.
"""

from __future__ import annotations

import json
import os
import select
import stat
import time
from pathlib import Path
from typing import Any, TypeVar

from grpo_jax.errors import UserError, said, shown

Value = TypeVar("Value")
MOST_BYTES = 2**28
"""Of a file that is read whole, by default."""
SILENCE_SECONDS = 60.0
"""How long nothing may come from a pipe or a terminal."""
_AT_ONCE = 2**20  # bytes
_DEEPEST = 100  # levels of JSON that a program wrote; those who walk it call themselves


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file; of a pipe or a device, as `/dev/stdin` and `<(command)` are, what comes until its end.

    Args:
        path: Of the file.
        most: Bytes.

    Raises:
        OSError: The system refuses it.
        ValueError: It is longer, no path at all, or nothing comes from the pipe for `SILENCE_SECONDS`.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        regular = stat.S_ISREG(os.fstat(handle).st_mode)
        parts, size = [], 0
        while size <= most:
            if not regular:
                _wait(handle)
            part = os.read(handle, min(_AT_ONCE, most + 1 - size))
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
    finally:
        os.close(handle)
    raise ValueError(f"it holds more than {most:,} bytes")


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """A file as text, without the mark that some programs put before UTF-8.

    Raises:
        UserError: It cannot be read, is too long (as `read_bytes`) or not UTF-8.
    """
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{said(path, 200)}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{said(path, 200)}: not UTF-8 text; save it as UTF-8") from error
    except ValueError as error:
        raise UserError(f"{said(path, 200)}: cannot be read ({error})") from error


def load_json(path: str | Path, kind: type[Value] = dict) -> Value:  # type: ignore[assignment]
    """The value in a JSON file that a program wrote.

    Args:
        path: Of the file.
        kind: What it must be.

    Raises:
        UserError: As `read_text`, or it is no JSON, nested deeper than any program writes it, or of another kind.
    """
    text = read_text(path)
    try:
        return parse_json(text, kind)
    except ValueError as error:
        raise UserError(
            f"{said(path, 200)}: cannot be read ({error}); copy it again from where it came, or make it anew"
        ) from error


def parse_json(text: str | bytes, kind: type[Value] = dict) -> Value:  # type: ignore[assignment]
    """The value of a JSON text that a program wrote: as `json.loads`, but every error is a ValueError of one line.

    Raises:
        ValueError: It is no JSON, nested deeper than any program writes it, or of another kind.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"not JSON ({str(error).partition(';')[0]})") from error
    _require_shallow(value)
    if not isinstance(value, kind):
        raise ValueError(f"expected a JSON {_CALLED.get(kind, kind.__name__)}, got {shown(value)}")
    return value


_TOO_DEEP = f"nested deeper than {_DEEPEST} levels"
_CALLED = {dict: "object", list: "list"}


def _require_shallow(value: Any, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise ValueError(_TOO_DEEP)
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_shallow(entry, depth + 1)


def _wait(handle: int) -> None:
    """Waits until a pipe or a device has more, or has ended."""
    poll, begun = select.poll(), time.monotonic()
    poll.register(handle, select.POLLIN)
    while not poll.poll(max(0.0, begun + SILENCE_SECONDS - time.monotonic()) * 1000):
        if time.monotonic() - begun >= SILENCE_SECONDS:
            raise ValueError(f"nothing came from it for {SILENCE_SECONDS:g} s, it is no file but a pipe or a device")
