"""Open a data set as numbered records: text files where they lie, tables through Hugging Face `datasets`.

JSON lines are not read by `datasets`: it makes 1 of a column's 1 and 2.5 a float, dates of texts that look like one,
takes NaN, and names no line of a file in its errors. What a line holds goes to the rewards as it stands.
"""

from __future__ import annotations

import csv
import glob
import io
import itertools
import mmap
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.files import checked, read_bytes, read_json
from grpo_jax.errors import UserError, one_line, short_name

HUB = "hub:"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
_TEXT_KINDS = (".jsonl", ".txt", *DELIMITERS)
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
        return _loaded(lambda: load_hub(place), place, None)
    path = Path(place)
    kind = path.suffix.lower()
    if kind == ".parquet" or os.path.isdir(path):
        return _table(path)
    if kind in DELIMITERS:
        return _sheet(path, DELIMITERS[kind])
    if kind in _TEXT_KINDS:
        return read_lines(path, (lambda text: {"prompt": text}) if kind == ".txt" else parse_object)
    raise UserError(
        f"{short_name(path)}: prompts come from a .jsonl, .csv, .tsv, .txt or .parquet file, from a saved data set's "
        f"folder, from {HUB}OWNER/NAME, or from builtin[:TIER]"
    )


def listed(unit: str, base: Path | None, records: Sequence[tuple[int, Record]]) -> Records:
    """Return numbered records that are in memory already."""
    return Records(unit, base, len(records), lambda start, stop: [*records[start:stop]])


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
    """Read rows under a heading, whose cells are texts; a row's number is that of its last line."""
    try:
        text = io.StringIO(bytes(_content(path)).decode("utf-8-sig"), newline="")
    except UnicodeDecodeError:
        raise UserError(f"{short_name(path)}: not UTF-8 text; save it as UTF-8") from None
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        columns = reader.fieldnames or []
        records = [(reader.line_num, filled(row)) for row in reader]
    except csv.Error as error:
        raise UserError(f"{short_name(path)}: line {reader.reader.line_num}: {one_line(error)}") from error
    if len(set(columns)) != len(columns):
        raise UserError(f"{short_name(path)}: its first line names a column twice; it must name each one once")
    return listed("line", path.parent, records)


def filled(row: Fields) -> Record:
    """Return a row of a sheet without its empty cells; cells behind the last column stand under None."""
    further = row.pop(None, [])
    if further:
        return f"{len(row) + len(further)} cells, and the first line names {len(row)} columns"
    try:
        return checked({name: cell for name, cell in row.items() if cell})
    except ValueError as error:
        return str(error)


def _content(path: Path) -> bytes | mmap.mmap:
    try:
        if os.path.getsize(path) <= _MAPPED:
            return read_bytes(path, _MAPPED)
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UserError(f"{short_name(path)} does not exist: give a .jsonl, .csv or .txt file with prompts") from None
    except (OSError, ValueError) as error:  # NUL in a path is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{short_name(path)} cannot be read: {reason}") from None


def _line_starts(path: Path, content: bytes | mmap.mmap) -> array[int]:
    """Return where the lines of a file begin, and its end, without a byte order mark; a line may be too long."""
    first = len(_BOM) if content[: len(_BOM)] == _BOM else 0
    starts = array("q", [first])
    starts.extend(match.end() for match in _LINE_END.finditer(content, first))
    if starts[-1] < len(content):
        starts.append(len(content))
    for number, (start, end) in enumerate(itertools.pairwise(starts), 1):
        if end - start > _LONGEST:
            where = f"{short_name(path)}: line {number}"
            raise UserError(f"{where} is longer than {_LONGEST >> 20} MB; a row has a line of its own")
    return starts


def parse_object(text: str) -> Record:
    """Return the object of a line of JSON, or what is wrong with it."""
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
        raise UserError(
            f"{short_name(path)} is a folder without prompts: give a file, or what Dataset.save_to_disk wrote"
        )
    return _loaded(lambda: datasets.load_from_disk(str(path)), path, path.parent)


def load_hub(place: str, split: str | None = None, **options: Any) -> Any:
    """Load "hub:OWNER/NAME", perhaps with :CONFIG or :CONFIG:SPLIT behind it; else `split`."""
    name, config, named, *more = [*place.removeprefix(HUB).split(":"), "", ""]
    if not name or any(more):
        raise UserError(f"{short_name(place)}: expected {HUB}OWNER/NAME, with :CONFIG or :CONFIG:SPLIT behind it")
    import datasets

    return datasets.load_dataset(name, config or None, split=named or split, **options)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keep the package datasets from logging what it also raises."""
    import datasets

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


@contextmanager
def loading(subject: str | Path) -> Iterator[None]:
    """Raise UserError, which names the data, for whatever goes wrong when the package datasets loads them inside."""
    try:
        with quiet_datasets():
            yield
    except UserError:
        raise
    except Exception as error:  # of the network, of the hub, of pyarrow, of its own
        raise UserError(f"{short_name(subject)} cannot be loaded: {one_line(error.__cause__ or error, 150)}") from error


def _loaded(load: Callable[[], object], subject: str | Path, base: Path | None) -> Records:
    with loading(subject):
        records = dataset_records(load(), str(subject), base)
    if records is None:
        raise UserError(f"{short_name(subject)} cannot be loaded: it has no rows")
    return records


def dataset_records(value: Any, subject: str, base: Path | None = None) -> Records | None:
    """Return the rows of a `Dataset`, or of a `DatasetDict` one split after another with a "split"; else None.

    `subject` is its name in errors, `base` the folder that paths in it are relative to.
    """
    parts: list[Any] = [*value.values()] if isinstance(value, Mapping) else [value]
    if not parts or not all(hasattr(part, "with_format") and hasattr(part, "__getitem__") for part in parts):
        return None
    if isinstance(value, Mapping):
        import datasets

        named = []
        for split, part in value.items():
            others = part.select_columns([name for name in part.column_names if name != "split"])
            named.append(others.add_column("split", [str(split)] * len(part)))
        value = datasets.concatenate_datasets(named)
    table = value.with_format("arrow")
    features = type(value.features)(_encoded(value.features))

    def read(start: int, stop: int) -> list[tuple[int, Record]]:
        try:
            return list(enumerate(map(features.decode_example, table[start:stop].to_pylist()), start))
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # Arrow's are among them
            raise UserError(f"{short_name(subject)} cannot be read: {one_line(error, 120)}") from error

    row_bytes = value.data.nbytes // max(len(value), 1)
    batch = min(_BATCH_ROWS, max(1, _BATCH_BYTES // max(row_bytes, 1)))
    return Records("row", base, len(value), read, batch)


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
