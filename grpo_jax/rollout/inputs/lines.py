"""Text files: JSON and plain lines where they lie, sheets of cells as an Arrow table of texts."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.config.files import checked, read_bytes, read_json
from grpo_jax.errors import UserError, one_line, said
from grpo_jax.rollout.inputs.records import Numbered, Records

DELIMITERS = {".csv": ",", ".tsv": "\t"}
_MAPPED = 2**26  # bytes of a file that is not copied into memory
_LONGEST = 2**26  # bytes of a line, which becomes text and then a record
_WINDOW = 2**24  # bytes that are searched for line ends at once
_TOGETHER = 2**16  # rows of a sheet that become Arrow's at once
_BOM = b"\xef\xbb\xbf"


def read_text(path: Path) -> Records:
    """The records of a .jsonl, .txt, .csv or .tsv file.

    Up to 64 MB are copied, so that the file may change afterwards; a larger one of lines is mapped, and its lines are
    read again when they are drawn.

    Raises:
        UserError: It cannot be read, or has a line that is too long; a sheet is not UTF-8, or no sheet.
    """
    kind = path.suffix.lower()
    if kind in DELIMITERS:
        return _cells(path, _content(path), DELIMITERS[kind])
    return read_lines(path, _plain if kind == ".txt" else _object)


def _content(path: Path) -> Any:
    """A file's bytes as a buffer of Arrow, without the mark that some programs put before UTF-8."""
    import pyarrow

    try:
        large = os.path.getsize(path) > _MAPPED
        whole = pyarrow.memory_map(str(path)).read_buffer() if large else pyarrow.py_buffer(read_bytes(path, _MAPPED))
    except FileNotFoundError:
        raise UserError(f"{said(path)} does not exist: give a .jsonl, .csv or .txt file with prompts") from None
    except (OSError, ValueError) as error:  # NUL in a path is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{said(path)} cannot be read: {reason}") from None
    return whole.slice(len(_BOM)) if whole.size >= len(_BOM) and whole.slice(0, len(_BOM)) == _BOM else whole


# -------------------------------------------------------------------------------------------------------------- lines


def read_lines(path: Path, parse: Callable[[str], dict[Any, Any] | str]) -> Records:
    """The lines of a file, which is itself the column that they are cells of; raises as `read_text`.

    Args:
        path: The file.
        parse: The text of a line that is not blank → its record, or what is wrong with it.
    """
    import pyarrow

    content = _content(path)
    offsets = _line_offsets(path, content)
    buffers = [None, pyarrow.py_buffer(offsets), content]
    cells = pyarrow.Array.from_buffers(pyarrow.large_binary(), len(offsets) - 1, buffers)

    def read(start: int, stop: int) -> list[Numbered]:
        found = cells.slice(start, stop - start).to_pylist()
        return [(number, _line(data, parse)) for number, data in enumerate(found, start + 1)]

    return Records("line", path.parent, len(cells), read)


def _line_offsets(path: Path, content: Any) -> np.ndarray:
    """Where the lines of a file begin, and its end.

    Raises:
        UserError: One is longer than any row.
    """
    offsets = np.unique(np.concatenate([[0], *_line_ends(content), [content.size]]).astype(np.int64))
    long = np.flatnonzero(np.diff(offsets) > _LONGEST)
    if long.size:
        raise UserError(
            f"{said(path)}: line {long[0] + 1} is longer than {_LONGEST >> 20} MB; a row has a line of its own"
        )
    return offsets


def _line_ends(content: Any) -> Iterator[np.ndarray]:
    r"""Where lines begin that follow another: behind \n, \r\n or a \r by itself."""
    data = np.frombuffer(content, np.uint8)
    for start in range(0, len(data), _WINDOW):
        window, behind = data[start : start + _WINDOW], data[start + 1 : start + _WINDOW + 1]
        ends = window == ord("\n")
        returns = np.flatnonzero(window == ord("\r"))
        if returns.size:
            ends[[at for at in returns if at >= len(behind) or behind[at] != ord("\n")]] = True
        yield np.flatnonzero(ends) + start + 1


def _line(data: bytes, parse: Callable[[str], dict[Any, Any] | str]) -> dict[Any, Any] | str | None:
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        return "not UTF-8 text"
    return parse(text) if text else None


def _plain(text: str) -> dict[Any, Any]:
    return {"prompt": text}


def _object(text: str) -> dict[Any, Any] | str:
    try:
        record = read_json(text)
    except ValueError as error:
        return str(error)
    if not isinstance(record, dict):
        return f'expected an object like {{"prompt": "…"}}, got {type(record).__name__}'
    return record


# -------------------------------------------------------------------------------------------------------------- cells


def _cells(path: Path, content: Any, delimiter: str) -> Records:
    """Rows under a heading; each cell is a text, an empty one is none."""
    import pyarrow

    _line_offsets(path, content)
    numbers: list[int] = []
    wrong: dict[int, str] = {}
    batches: list[Any] = []
    pending: list[list[str | None]] = []

    def pack() -> None:
        columns = [pyarrow.array(column, pyarrow.string()) for column in zip(*pending, strict=True)]
        batches.append(pyarrow.record_batch(columns, names=[str(place) for place in range(len(columns))]))
        pending.clear()

    stream = io.TextIOWrapper(pyarrow.BufferReader(content), encoding="utf-8", newline="")
    reader = csv.reader(stream, delimiter=delimiter, strict=True)
    try:
        heading = next(reader, [])
        if len(set(heading)) != len(heading):
            raise UserError(f"{said(path)}: its first line names a column twice; it must name each one once")
        for cells in reader:
            if not cells:
                continue
            if len(cells) > len(heading):
                wrong[len(numbers)] = f"{len(cells)} cells, and the first line names {len(heading)} columns"
                cells = []
            numbers.append(reader.line_num)
            pending.append([cell or None for cell in cells] + [None] * (len(heading) - len(cells)))
            if len(pending) == _TOGETHER:
                pack()
    except csv.Error as error:
        raise UserError(f"{said(path)}: line {reader.line_num}: {one_line(error)}") from error
    except UnicodeDecodeError:
        raise UserError(f"{said(path)}: not UTF-8 text; save it as UTF-8") from None
    if pending and heading:
        pack()
    table = pyarrow.Table.from_batches(batches) if batches else None
    lines = np.array(numbers, np.int64)

    def read(start: int, stop: int) -> list[Numbered]:
        part = [] if table is None else [column.to_pylist() for column in table.slice(start, stop - start).columns]
        rows = zip(*part, strict=True) if part else [()] * (stop - start)
        return [
            (int(lines[place]), wrong.get(place) or _filled(dict(zip(heading, cells, strict=False))))
            for place, cells in enumerate(rows, start)
        ]

    return Records("line", path.parent, len(lines), read)


def _filled(record: dict[str, str | None]) -> dict[Any, Any] | str:
    try:
        return {name: text for name, text in checked(record).items() if text}
    except ValueError as error:
        return str(error)
