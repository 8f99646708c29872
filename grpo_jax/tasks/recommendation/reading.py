"""Collecting what is wrong with a file, to be said at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_jax.config.files import read_bytes
from grpo_jax.errors import UserError

_SHOWN = 6
_MOST_BYTES = 2**32  # of a table of events, which is read whole


class Problems:
    """The bad places of one file; `check` raises one error that names them with file and line.

    Args:
        path: The file they are in.
    """

    def __init__(self, path: str | Path):
        """Starts without problems."""
        self.path = path
        self.found: list[str] = []

    def add(self, line: int | None, reason: str) -> None:
        """Notes a reason; `line` counts from 1, None is the file as a whole."""
        self.found.append(f"{self.path}: {reason}" if line is None else f"{self.path}:{line}: {reason}")

    def check(self, instead: str = "") -> None:
        """Raises a UserError with what was noted, if anything was; `instead` is the one reason for it all."""
        if self.found and instead:
            raise UserError(f"{self.path}: {instead}")
        raise_all(self.found)


def raise_all(found: Sequence[str]) -> None:
    """One UserError for all problems (the first six are shown); none for none."""
    if not found:
        return
    shown = list(found[:_SHOWN])
    if len(found) > len(shown):
        shown.append(f"… and {len(found) - len(shown)} more")
    raise UserError("\n  ".join([f"bad data ({len(found)} place{'s' if len(found) > 1 else ''}):", *shown]))


def read_text(path: str | Path, what: str) -> str:
    """A file as text, without a byte-order mark.

    Raises:
        UserError: If it is missing, unreadable or not UTF-8 (with the line of the first bad byte).
    """
    try:
        data = read_bytes(path, _MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: expected {what}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be read: {reason}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text: save it as UTF-8") from None
