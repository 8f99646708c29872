"""Open a data set as numbered records: text files where they lie, tables through Hugging Face `datasets`.

JSON lines are not read by `datasets`: it makes 1 of a column's 1 and 2.5 a float, dates of texts that look like one,
takes NaN, and names no line of a file in its errors. What a line holds goes to the rewards as it stands.
"""

from __future__ import annotations

import bisect
import csv
import glob
import itertools
import mmap
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.files import checked, read_bytes, read_json
from grpo_jax.errors import UserError, one_line, said

HUB = "hub:"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_TEXT_KINDS = (".jsonl", ".txt", *_DELIMITERS)
_MAPPED = 2**26  # bytes of a file that is not copied into memory
_LONGEST = 2**26  # bytes of a line, which becomes text and then a record
_BATCH_ROWS = 4096  # records that are read at once where all are looked at
_BATCH_BYTES = 2**26
_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n?|\n")

Fields = dict[Any, Any]
"""A record: columns by name, which a file may spell with other keys than texts."""
Record = Fields | str | None
"""A record; a text that says what is wrong with it; or None for a blank line, which is none."""


class Records(NamedTuple):
    """Records of a data set, read from the source each time.

    Attributes:
        unit: "line" or "row", for errors.
        base: The folder that paths in it are relative to.
        count: Blank lines included.
        read: read(start, stop) → those records with their numbers.
        batch: How many are read at once by `all`.
    """

    unit: str
    base: Path | None
    count: int
    read: Callable[[int, int], list[tuple[int, Record]]]
    batch: int = _BATCH_ROWS

    def all(self) -> Iterator[tuple[int, Record]]:
        """Yield every record in order; few of them at a time are in memory."""
        for start in range(0, self.count, self.batch):
            yield from self.read(start, min(start + self.batch, self.count))


def read_records(place: str) -> Records:
    """Open a data set: a .jsonl, .csv, .tsv, .txt or .parquet file, or the folder of a saved Hugging Face data set.

    Also "hub:OWNER/NAME", "hub:OWNER/NAME:CONFIG" and "hub:OWNER/NAME:CONFIG:SPLIT".
    """
    if place.startswith(HUB):
        return _hub(place)
    path = Path(place)
    kind = path.suffix.lower()
    if kind == ".parquet" or os.path.isdir(path):
        return _table(path)
    if kind in _DELIMITERS:
        return _sheet(path, _DELIMITERS[kind])
    if kind in _TEXT_KINDS:
        return read_lines(path, (lambda text: {"prompt": text}) if kind == ".txt" else _object)
    raise UserError(
        f"{said(path)}: prompts come from a .jsonl, .csv, .tsv, .txt or .parquet file, from a saved data set's "
        f"folder, from {HUB}OWNER/NAME, or from builtin[:TIER]"
    )


def in_memory(records: Sequence[Mapping[str, object]]) -> Records:
    """Return records that are in memory already."""

    def read(start: int, stop: int) -> list[tuple[int, Record]]:
        return [(place, dict(records[place])) for place in range(start, stop)]

    return Records("row", None, len(records), read)


def read_lines(path: Path, parse: Callable[[str], Record]) -> Records:
    """Open a file of lines; parse(text of a line that is not blank) → its record, or the text of an error.

    Up to 64 MB are copied, so that the file may change afterwards; a larger file is mapped, and its lines are read
    again when they are drawn.
    """
    content = _content(path)
    starts = _line_starts(path, content)

    def record(data: bytes) -> Record:
        try:
            text = data.decode("utf-8").strip()
        except UnicodeDecodeError:
            return "not UTF-8 text"
        return parse(text) if text else None

    def read(start: int, stop: int) -> list[tuple[int, Record]]:
        return [(place + 1, record(content[starts[place] : starts[place + 1]])) for place in range(start, stop)]

    return Records("line", path.parent, len(starts) - 1, read)


def _sheet(path: Path, delimiter: str) -> Records:
    """Open rows under a heading, whose cells are texts; a row's number is that of its last line."""
    content = _content(path)
    starts = _line_starts(path, content)

    def rows(start: int, stop: int) -> Any:
        lines = (content[begin:end].decode("utf-8") for begin, end in itertools.pairwise(starts[start : stop + 1]))
        return csv.reader(lines, delimiter=delimiter, strict=True)

    reader, ends = rows(0, len(starts) - 1), array("q")
    try:
        heading = next(reader, [])
        ends.append(reader.line_num)
        ends.extend(reader.line_num for _ in reader)
    except csv.Error as error:
        raise UserError(f"{said(path)}: line {reader.line_num}: {one_line(error)}") from error
    except UnicodeDecodeError:
        raise UserError(f"{said(path)}: not UTF-8 text; save it as UTF-8") from None
    if len(set(heading)) != len(heading):
        raise UserError(f"{said(path)}: its first line names a column twice; it must name each one once")

    def record(cells: list[str]) -> Record:
        if len(cells) > len(heading):
            return f"{len(cells)} cells, and the first line names {len(heading)} columns"
        try:
            return checked({name: cell for name, cell in zip(heading, cells, strict=False) if cell}) if cells else None
        except ValueError as error:
            return str(error)

    def read(start: int, stop: int) -> list[tuple[int, Record]]:
        numbers = ends[start + 1 : stop + 1]
        return [(number, record(cells)) for number, cells in zip(numbers, rows(ends[start], ends[stop]), strict=True)]

    return Records("line", path.parent, len(ends) - 1, read)


def _content(path: Path) -> bytes | mmap.mmap:
    try:
        if os.path.getsize(path) <= _MAPPED:
            return read_bytes(path, _MAPPED)
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UserError(f"{said(path)} does not exist: give a .jsonl, .csv or .txt file with prompts") from None
    except (OSError, ValueError) as error:  # NUL in a path is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{said(path)} cannot be read: {reason}") from None


def _line_starts(path: Path, content: bytes | mmap.mmap) -> array[int]:
    """Return where the lines of a file begin, and its end, without a byte order mark; a line may be too long."""
    first = len(_BOM) if content[: len(_BOM)] == _BOM else 0
    starts = array("q", [first])
    starts.extend(match.end() for match in _LINE_END.finditer(content, first))
    if starts[-1] < len(content):
        starts.append(len(content))
    for number, (start, end) in enumerate(itertools.pairwise(starts), 1):
        if end - start > _LONGEST:
            where = f"{said(path)}: line {number}"
            raise UserError(f"{where} is longer than {_LONGEST >> 20} MB; a row has a line of its own")
    return starts


def _object(text: str) -> Record:
    try:
        record = read_json(text)
    except ValueError as error:
        return str(error)
    if not isinstance(record, dict):
        return f'expected an object like {{"prompt": "…"}}, got {type(record).__name__}'
    return record


def _table(path: Path) -> Records:
    """Open a parquet file (converted once to Arrow in the cache of `datasets`), or a folder of `save_to_disk`."""
    import datasets

    file = glob.escape(str(path))
    if not os.path.isdir(path):
        return _loaded(lambda: datasets.load_dataset("parquet", data_files=file, split="train"), path, path.parent)
    if not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise UserError(f"{said(path)} is a folder without prompts: give a file, or what Dataset.save_to_disk wrote")
    return _loaded(lambda: datasets.load_from_disk(str(path)), path, path.parent)


def _hub(place: str) -> Records:
    name, config, split, *more = [*place.removeprefix(HUB).split(":"), "", ""]
    if not name or any(more):
        raise UserError(f"{said(place)}: expected {HUB}OWNER/NAME, with :CONFIG or :CONFIG:SPLIT behind it")
    import datasets

    return _loaded(lambda: datasets.load_dataset(name, config or None, split=split or None), place, None)


def _loaded(load: Callable[[], object], subject: str | Path, base: Path | None) -> Records:
    import datasets

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would also log what it raises
    try:
        records = dataset_records(load(), str(subject), base)
    except Exception as error:  # of the network, of the hub, of pyarrow, of its own
        raise UserError(f"{said(subject)} cannot be loaded: {one_line(error.__cause__ or error, 150)}") from error
    finally:
        datasets.logging.set_verbosity(level)
    if records is None:
        raise UserError(f"{said(subject)} cannot be loaded: it has no rows")
    return records


def dataset_records(value: object, subject: str, base: Path | None = None) -> Records | None:
    """Return the rows of a `Dataset`, or of a `DatasetDict` one split after another with a "split"; else None.

    `subject` is its name in errors, `base` the folder that paths in it are relative to.
    """
    parts: Mapping[object, Any] = value if isinstance(value, Mapping) else {None: value}
    if not parts or not all(hasattr(part, "with_format") and hasattr(part, "__getitem__") for part in parts.values()):
        return None
    tables = [part.with_format("arrow") for part in parts.values()]
    features = [type(part.features)(_encoded(part.features)) for part in parts.values()]
    splits = [{} if split is None else {"split": str(split)} for split in parts]
    ends = list(itertools.accumulate(map(len, tables)))

    def read(start: int, stop: int) -> list[tuple[int, Record]]:
        records: list[Record] = []
        first = start
        while start < stop:
            which = bisect.bisect_right(ends, start)
            end = min(stop, ends[which])
            before = ends[which] - len(tables[which])
            try:
                rows = tables[which][start - before : end - before].to_pylist()
                records += [features[which].decode_example(row) | splits[which] for row in rows]
            except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # Arrow's are among them
                raise UserError(f"{said(subject)} cannot be read: {one_line(error, 120)}") from error
            start = end
        return list(enumerate(records, first))

    row_bytes = max(part.data.nbytes // max(len(part), 1) for part in parts.values())
    batch = min(_BATCH_ROWS, max(1, _BATCH_BYTES // max(row_bytes, 1)))
    return Records("row", base, ends[-1], read, batch)


def _encoded(feature: Any) -> Any:
    """Return a feature, of whatever nesting, without the decoding of its pictures and sounds."""
    if isinstance(feature, Mapping):
        return {name: _encoded(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_encoded(inner) for inner in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_encoded(feature.feature))
    json = type(feature).__name__ == "Json"  # text of no type of its own, which decoding makes a value again
    return replace(feature, decode=False) if hasattr(feature, "decode") and not json else feature
