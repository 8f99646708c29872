"""Prompts from tables: parquet files, and folders and data sets of Hugging Face's `datasets`.

Arrow reads them, without `datasets`. Rows become Python's each time they are read; pictures stay where they
are until they are looked at.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError, one_line, said
from grpo_jax.rollout.inputs.pictures import Stored
from grpo_jax.rollout.inputs.records import Numbered, Records

_PICTURES = ("image", "images")


def read_tables(path: Path) -> Records:
    """The records of a parquet file, or of a folder that `save_to_disk` wrote, its splits as "split".

    Raises:
        UserError: It cannot be read, or is something else.
    """
    import pyarrow.parquet

    try:
        tables = [(None, pyarrow.parquet.read_table(path, memory_map=True))] if path.is_file() else _folder(path)
        return records_of(tables, path.parent, str(path))
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:  # Arrow's are among them
        raise UserError(f"{said(path)} cannot be read: {one_line(error, 120)}") from error


def _folder(path: Path) -> list[tuple[str | None, Any]]:
    if (path / "dataset_dict.json").is_file():
        splits = load_json(path / "dataset_dict.json")["splits"]
        return [(split, table) for split in splits for table in _saved(path / Path(split).name)]
    if (path / "state.json").is_file():
        return [(None, table) for table in _saved(path)]
    raise UserError(f"{said(path)} is a folder without prompts: give a file, or what Dataset.save_to_disk wrote")


def _saved(folder: Path) -> list[Any]:
    """The tables of one data set, whose Arrow files are read where they lie."""
    import pyarrow

    state = load_json(folder / "state.json")
    names = [Path(file["filename"]).name for file in state["_data_files"]]
    return [pyarrow.ipc.open_stream(pyarrow.memory_map(str(folder / name))).read_all() for name in names]


def records_of(tables: Sequence[tuple[str | None, Any]], base: Path | None, name: str) -> Records:
    """The rows of Arrow tables one after another, each with the "split" of its table, pictures as what finds them.

    Args:
        tables: With their splits.
        base: The folder that paths in them are relative to.
        name: What errors call them.
    """
    ends = np.cumsum([table.num_rows for _, table in tables], dtype=np.int64).tolist()

    def read(start: int, stop: int) -> list[Numbered]:
        found: list[Numbered] = []
        while start < stop:
            which = bisect.bisect_right(ends, start)
            (split, table), end = tables[which], min(stop, ends[which])
            part = table.slice(start - (ends[which] - table.num_rows), end - start)
            named = {} if split is None else {"split": split}
            try:
                found += enumerate([record | named for record in _records(part)], start)
            except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # Arrow's are among them
                raise UserError(f"{said(name)} cannot be read: {one_line(error, 120)}") from error
            start = end
        return found

    return Records("row", base, ends[-1] if ends else 0, read)


def _records(table: Any) -> Iterator[dict[str, Any]]:
    columns = {
        name: _pictures(table.column(name)) if name in _PICTURES else table.column(name).to_pylist()
        for name in table.column_names
    }
    for row in range(table.num_rows):
        yield {name: values[row] for name, values in columns.items()}


def _pictures(column: Any) -> list[Any]:
    """A column of pictures, one or several in each row."""
    import pyarrow

    if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        return [_sources(cell.values) if cell.is_valid else None for cell in column]
    return _sources(column)


def _sources(column: Any) -> list[Any]:
    """Pictures {bytes, path}, bytes or texts, as `source_of` takes them."""
    import pyarrow
    import pyarrow.compute

    kind = column.type
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
        return [Stored(column, row) if column[row].is_valid else None for row in range(len(column))]
    names = [field.name for field in kind] if pyarrow.types.is_struct(kind) else []
    if "bytes" not in names:
        return column.to_pylist()
    field = getattr(pyarrow.compute, "struct_field")  # noqa: B009 (made when pyarrow is imported)
    inner = field(column, "bytes")
    paths = field(column, "path").to_pylist() if "path" in names else [None] * len(column)
    found: list[Any] = []
    for row, path in enumerate(paths):
        found.append(Stored(inner, row) if inner[row].is_valid else {"path": path} if path else None)
    return found


def tables_of(given: Any) -> list[tuple[str | None, Any]] | None:
    """A Hugging Face data set in memory, or several by split, as Arrow tables; None where it is something else."""
    if isinstance(given, Mapping) and given and all(_is_dataset(one) for one in given.values()):
        return [(str(split), _as_arrow(one)) for split, one in given.items()]
    return [(None, _as_arrow(given))] if _is_dataset(given) else None


def _as_arrow(dataset: Any) -> Any:
    return dataset.with_format("arrow")[:]


def _is_dataset(given: Any) -> bool:
    return all(hasattr(given, name) for name in ("with_format", "features", "column_names"))
