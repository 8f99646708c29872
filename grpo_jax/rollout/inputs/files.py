"""Where the records of a data set come from: text files, tables, saved data sets, the hub."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_jax.errors import UserError, one_line, said
from grpo_jax.rollout.inputs.lines import DELIMITERS, read_text
from grpo_jax.rollout.inputs.records import Records
from grpo_jax.rollout.inputs.tables import read_tables, records_of, tables_of

HUB = "hub:"
_TEXTS = (".jsonl", ".txt", *DELIMITERS)


def read_records(place: str) -> Records:
    """Opens a data set.

    Args:
        place: A .jsonl, .csv, .tsv, .txt or .parquet file, the folder of a saved Hugging Face data set, or
            "hub:OWNER/NAME", "hub:OWNER/NAME:CONFIG", "hub:OWNER/NAME:CONFIG:SPLIT".

    Raises:
        UserError: It is something else, or cannot be read.
    """
    if place.startswith(HUB):
        return _hub(place)
    path = Path(place)
    kind = path.suffix.lower()
    if kind == ".parquet" or os.path.isdir(path):
        return read_tables(path)
    if kind not in _TEXTS:
        raise UserError(
            f"{said(path)}: prompts come from a .jsonl, .csv, .tsv, .txt or .parquet file, from a saved data set's "
            f"folder, from {HUB}OWNER/NAME, or from builtin[:TIER]"
        )
    return read_text(path)


def _hub(place: str) -> Records:
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
    return records_of(tables, None, place)
