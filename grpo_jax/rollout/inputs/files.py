"""Records of a data set as numbered dictionaries: from JSON lines, CSV, plain lines, tables and the hub."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.reading import checked, read_json
from grpo_jax.errors import UserError, one_line, said
from grpo_jax.rollout.inputs.tables import read_tables, records_of, tables_of

HUB = "hub:"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_TEXTS = (".jsonl", ".txt", *_DELIMITERS)


class Records(NamedTuple):
    """What a data set holds.

    Attributes:
        unit: What errors call one of them: "line" or "row".
        base: The folder that paths in it are relative to; None for none.
        rows: Each with its number, or what is wrong with it.
    """

    unit: str
    base: Path | None
    rows: Iterable[tuple[int, dict[Any, Any] | str]]


def read_records(place: str) -> Records:
    """Opens a data set.

    Args:
        place: A .jsonl, .csv, .tsv, .txt or .parquet file, the folder of a saved Hugging Face data set, or
            "hub:OWNER/NAME", "hub:OWNER/NAME:CONFIG", "hub:OWNER/NAME:CONFIG:SPLIT".

    Raises:
        UserError: It is something else, or cannot be read.
    """
    if place.startswith(HUB):
        return Records("row", None, enumerate(_hub(place)))
    path = Path(place)
    kind = path.suffix.lower()
    if kind == ".parquet" or os.path.isdir(path):
        return Records("row", path.parent, enumerate(read_tables(path)))
    if kind not in _TEXTS:
        raise UserError(
            f"{said(path)}: prompts come from a .jsonl, .csv, .tsv, .txt or .parquet file, from a saved data set's "
            f"folder, from {HUB}OWNER/NAME, or from builtin[:TIER]"
        )
    content = _content(path)
    rows = _cells(path, content, _DELIMITERS[kind]) if kind in _DELIMITERS else _lines(content, kind)
    return Records("line", path.parent, rows)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except FileNotFoundError:
        raise UserError(f"{said(path)} does not exist: give a .jsonl, .csv or .txt file with prompts") from None
    except (OSError, ValueError) as error:  # NUL in a path is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{said(path)} cannot be read: {reason}") from None


def _lines(content: bytes, kind: str) -> Iterator[tuple[int, dict[Any, Any] | str]]:
    """Lines of JSON or of text; blank ones are none."""
    for number, data in enumerate(content.splitlines(), start=1):
        try:
            text = data.decode("utf-8").strip()
        except UnicodeDecodeError:
            yield number, "not UTF-8 text"
            continue
        if text:
            yield number, {"prompt": text} if kind == ".txt" else _object(text)


def _object(text: str) -> dict[Any, Any] | str:
    try:
        record = read_json(text)
    except ValueError as error:
        return str(error)
    if not isinstance(record, dict):
        return f'expected an object like {{"prompt": "…"}}, got {type(record).__name__}'
    return record


def _cells(path: Path, content: bytes, delimiter: str) -> Iterator[tuple[int, dict[Any, Any] | str]]:
    """Rows under a heading; each cell is a text, an empty one is none."""
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8"), newline=""), delimiter=delimiter, strict=True)
    except UnicodeDecodeError:
        raise UserError(f"{said(path)}: not UTF-8 text; save it as UTF-8") from None
    try:
        heading = next(reader, [])
        if len(set(heading)) != len(heading):
            raise UserError(f"{said(path)}: its first line names a column twice; it must name each one once")
        for cells in reader:
            if not cells:
                continue
            if len(cells) > len(heading):
                yield reader.line_num, f"{len(cells)} cells, and the first line names {len(heading)} columns"
                continue
            yield reader.line_num, _filled(dict(zip(heading, cells, strict=False)))
    except csv.Error as error:
        raise UserError(f"{said(path)}: line {reader.line_num}: {one_line(error)}") from error


def _filled(record: dict[str, str]) -> dict[Any, Any] | str:
    try:
        return {name: text for name, text in checked(record).items() if text}
    except ValueError as error:
        return str(error)


def _hub(place: str) -> Iterator[dict[str, Any]]:
    """The records of a data set of the hub, its splits as "split", where it has several."""
    name, config, split, *more = [*place.removeprefix(HUB).split(":"), "", ""]
    if not name or any(more):
        raise UserError(f"{said(place)}: expected {HUB}OWNER/NAME, with :CONFIG or :CONFIG:SPLIT behind it")
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{said(place)}: datasets is not installed; run pip install datasets") from error
    try:
        loaded = datasets.load_dataset(name, config or None, split=split or None)
        tables = tables_of(loaded)
    except Exception as error:  # of the network, of the hub, of pyarrow, of its own
        raise UserError(f"{said(place)} cannot be loaded: {one_line(error, 150)}") from error
    if tables is None:
        raise UserError(f"{said(place)}: expected a data set with rows, got a {type(loaded).__name__}")
    for part, table in tables:
        yield from (record | ({} if part is None else {"split": part}) for record in records_of(table))
