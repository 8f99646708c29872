"""Records of a data set: numbered dictionaries, made each time they are read of what lies in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Numbered = tuple[int, dict[Any, Any] | str | None]
"""A record with its number; what is wrong with it; or None for a blank line, which is none."""
_TOGETHER = 4096  # records that are read at once where all are looked at


class Records(NamedTuple):
    """What a data set holds.

    Attributes:
        unit: What errors call one of them: "line" or "row".
        base: The folder that paths in it are relative to; None for none.
        count: How many there are, blank lines among them.
        read: read(start, stop) → those places.
    """

    unit: str
    base: Path | None
    count: int
    read: Callable[[int, int], list[Numbered]]

    def all(self) -> Iterator[Numbered]:
        """Every one in order; few of them at a time are in memory."""
        for start in range(0, self.count, _TOGETHER):
            yield from self.read(start, min(start + _TOGETHER, self.count))


def in_memory(records: Sequence[Mapping[Any, Any]]) -> Records:
    """Records that are there already; they are left as they are."""

    def read(start: int, stop: int) -> list[Numbered]:
        return [(place, dict(records[place])) for place in range(start, stop)]

    return Records("row", None, len(records), read)
