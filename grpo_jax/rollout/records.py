"""Open a data set as numbered records, memory-mapped by Hugging Face `datasets`.

A line of JSON stays text there and is parsed on access. Otherwise `datasets` would infer column types: an int beside
floats becomes a float, a string may become a date, and no error names its line.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.files import checked, read_json
from grpo_jax.errors import UserError, one_line, short_name

_HUB = "hub:"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
RECORD_SUFFIXES = (".jsonl", ".json", ".parquet", *_DELIMITERS)  # of files with columns
_BATCH_ROWS = 4096  # records per read in a full pass
_BATCH_BYTES = 2**26
_SMALL_BYTES = 2**24  # of a file of lines that is read into memory, without `datasets`, which takes a second to import

Fields = dict[Any, Any]
"""A record: columns by name, which a file may spell with other keys than texts."""
Record = Fields | str | None
"""A record, a text about the mistake in it, or None for a blank line."""


class Records(NamedTuple):
    """Records of a data set, read from the source on each access."""

    unit: str  # "line" or "row", for errors
    base: Path | None  # the folder that its paths are relative to
    count: int  # number of records, including blank lines
    read: Callable[[int, int], list[tuple[int, Record]]]  # (start, stop) → those records with their numbers
    batch: int = _BATCH_ROWS  # records that `all` reads at once

    def all(self) -> Iterator[tuple[int, Record]]:
        """Yield every record in order, with few in memory at a time."""
        for start in range(0, self.count, self.batch):
            yield from self.read(start, min(start + self.batch, self.count))


def read_records(place: str) -> Records:
    """Open a data set: a .jsonl, .csv, .tsv, .txt or .parquet file, or the folder of a saved Hugging Face data set.

    Also "hub:OWNER/NAME", "hub:OWNER/NAME:CONFIG" and "hub:OWNER/NAME:CONFIG:SPLIT".
    """
    if place.startswith(_HUB) and place != _HUB:
        name, config, split = [*place.removeprefix(_HUB).split(":", 2), "", ""][:3]
        files = [file for file in sorted(Path(name).rglob("*")) if file.is_file()]  # of a local folder
        return _loaded(lambda: _load(name, files, name=config or None, split=split or None), place, None)
    path = Path(os.path.expanduser(place))
    kind = path.suffix.lower()
    if os.path.isdir(path):  # written by `save_to_disk`
        return _loaded(lambda: _datasets().load_from_disk(str(path)), path, path.parent)
    if kind == ".jsonl":
        return read_lines(path, _parse_object)
    if kind == ".txt":
        return read_lines(path, lambda text: {"prompt": text})
    if kind == ".parquet":
        from pyarrow.parquet import read_metadata  # `datasets` cannot load a table without rows

        return _loaded(lambda: _load_file("parquet", path) if read_metadata(path).num_rows else None, path, path.parent)
    if kind in _DELIMITERS:
        return _sheet(path, _DELIMITERS[kind])
    named = place if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", place) else "OWNER/NAME"
    raise UserError(
        f"{short_name(path)}: prompts come from a .jsonl, .csv, .tsv, .txt or .parquet file, from a saved data set's "
        f"folder, from {_HUB}{named}, from reasoning_gym:NAME, or from builtin[:plain|attributes|crowded]"
    )


def listed(records: Sequence[tuple[int, Record]]) -> Records:
    """Return numbered records that are already in memory."""
    return Records("row", None, len(records), lambda start, stop: [*records[start:stop]])


def read_lines(path: Path, parse: Callable[[str], Record]) -> Records:
    """Open a file of lines; parse(text of a non-blank line) → its record, or a ValueError."""
    if os.path.isfile(path) and 0 < os.path.getsize(path) <= _SMALL_BYTES:
        lines = _read(path)
    else:
        lines = _loaded(lambda: _load_file("text", path, encoding="utf-8-sig"), path, path.parent)

    def parse_line(record: Fields) -> Record:
        return parse(text) if (text := record["text"].strip()) else None

    return _parsed(lines._replace(unit="line"), 1, parse_line)


def _read(path: Path) -> Records:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return listed([*enumerate({"text": line} for line in file)])._replace(base=path.parent)
    except (OSError, UnicodeDecodeError) as error:
        raise _load_error(path, error) from error


def _parsed(records: Records, first: int, parse: Callable[[Fields], Record]) -> Records:
    """Number records from `first`, and parse each; a ValueError is the mistake in it."""

    def parsed(number: int, record: Any) -> tuple[int, Record]:
        try:
            return number + first, parse(record)
        except ValueError as error:
            return number + first, str(error)

    return records._replace(read=lambda start, stop: [parsed(*record) for record in records.read(start, stop)])


def _parse_object(text: str) -> Record:
    record = read_json(text)
    if not isinstance(record, dict):
        raise ValueError(f'expected an object like {{"prompt": "…"}}, got {type(record).__name__}')
    return record


def _sheet(path: Path, delimiter: str) -> Records:
    """Read rows below a header, which is row 1; cells are strings, and an empty cell is None."""

    def load() -> Any:
        datasets = _datasets()
        with open(path, encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file, delimiter=delimiter), [])
            if not any(file):
                return None
        names = [name or f"Unnamed: {place}" for place, name in enumerate(names)]  # as pandas names them
        if len(set(names)) != len(names):  # pandas would rename them
            raise ValueError("its first line names a column twice")
        features = datasets.Features({name: datasets.Value("string") for name in names})
        as_text = {"keep_default_na": False, "na_values": [""], "skip_blank_lines": False, "index_col": False}
        return _load_file("csv", path, sep=delimiter, features=features, encoding="utf-8-sig", **as_text)

    def parse(record: Fields) -> Record:
        return checked({name: cell for name, cell in record.items() if cell is not None}) or None

    return _parsed(_loaded(load, path, path.parent), 2, parse)


def _datasets() -> Any:
    """Import the package `datasets`, which takes a second."""
    import datasets

    return datasets


def _load_file(builder: str, path: Path, **options: Any) -> Any:
    return _load(builder, [path], data_files=glob.escape(str(path)), split="train", **options)


def _load(source: str, files: Sequence[Path], **options: Any) -> Any:
    """Convert files once to Arrow, in the cache of `datasets`, and memory-map it.

    The cache's own key has their paths and times; a copy with `cp -p` keeps the time of its source.
    """
    content = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            content.update(hashlib.file_digest(file, "sha256").digest())
    datasets = _datasets()
    cache = os.path.join(datasets.config.HF_DATASETS_CACHE, "grpo_jax", content.hexdigest()[:32])
    return datasets.load_dataset(source, cache_dir=cache if files else None, **options)


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Stop `datasets` from logging errors that it also raises, and from drawing progress bars."""
    datasets = _datasets()
    level, bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _loaded(load: Callable[[], object], subject: str | Path, base: Path | None) -> Records:
    """Return the records of the data set that load() returns; UserError, which names `subject`, if that fails."""
    name = short_name(subject)
    if isinstance(subject, Path) and not os.path.exists(subject):
        raise UserError(f"{name} does not exist: give a .jsonl, .csv, .txt or .parquet file with prompts")
    if isinstance(subject, Path) and os.path.isfile(subject) and not os.path.getsize(subject):
        raise UserError(f"{name}: expected at least one prompt")
    try:
        from pandas.errors import ParserWarning  # raised before pandas drops cells beyond the last column

        with _quiet_datasets(), warnings.catch_warnings(action="error", category=ParserWarning):
            return dataset_records(load(), str(subject), base) or listed([])
    except Exception as error:  # from the network, the hub, pandas, pyarrow or datasets
        raise _load_error(subject, error.__cause__ or error) from error


def _load_error(subject: str | Path, cause: BaseException) -> UserError:
    if isinstance(subject, Path) and isinstance(cause, UnicodeDecodeError):
        return UserError(f"{short_name(subject)}: line {_undecodable_line(subject)}: not UTF-8 text; save it as UTF-8")
    return UserError(f"{short_name(subject)} cannot be loaded: {one_line(cause, 150)}")


def _undecodable_line(path: Path) -> int:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return next((number for number, line in enumerate(file, 1) if re.search("[\udc80-\udcff]", line)), 1)


def dataset_records(value: Any, subject: str, base: Path | None = None) -> Records | None:
    """Return the rows of a `Dataset`, or of all splits of a `DatasetDict` with a column "split"; else None.

    `subject` is its name in errors, `base` the folder that its paths are relative to.
    """
    parts: list[Any] = [*value.values()] if isinstance(value, Mapping) else [value]
    if not parts or not all(hasattr(part, "with_format") and hasattr(part, "data") for part in parts):
        return None  # a streamed data set too, which has no table: its rows are listed
    if any(part.format["type"] == "custom" for part in parts):
        raise UserError(f"{short_name(subject)}: set_transform is not applied here: apply the function by map(…)")
    if isinstance(value, Mapping):
        named = []
        for split, part in value.items():
            others = part.select_columns([name for name in part.column_names if name != "split"])
            named.append(others.add_column("split", [str(split)] * len(part)))
        value = _datasets().concatenate_datasets(named)
    table = value.with_format("arrow")
    features = type(value.features)(_encoded(value.features))

    def read(start: int, stop: int) -> list[tuple[int, Record]]:
        try:
            return list(enumerate(map(features.decode_example, table[start:stop].to_pylist()), start))
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # Arrow's errors subclass these
            raise UserError(f"{short_name(subject)} cannot be read: {one_line(error, 120)}") from error

    row_bytes = value.data.nbytes // max(len(value), 1)
    batch = min(_BATCH_ROWS, max(1, _BATCH_BYTES // max(row_bytes, 1)))
    return Records("row", base, len(value), read, batch)


def _encoded(feature: Any) -> Any:
    """Return a feature, of any nesting, without decoding of its pictures and sounds."""
    if isinstance(feature, Mapping):
        return {name: _encoded(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_encoded(inner) for inner in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_encoded(feature.feature))
    json = type(feature).__name__ == "Json"  # JSON text, which decoding turns back into a value
    return replace(feature, decode=False) if hasattr(feature, "decode") and not json else feature
