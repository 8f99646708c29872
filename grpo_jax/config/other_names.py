"""Names that are not fields here: those of TRL, verl and OpenRLHF, and removed ones.

They are for hints and docs/coming_from_trl.md. The tables are in other_names.yaml, which documents their format.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

NOT_HERE = "not here: "


def _one_by_one(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table with one entry per name."""
    return {name: entry for names, entry in table.items() for name in names.split(", ")}


_TEXT = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
TABLES: dict[str, dict[str, str]] = yaml.load(_TEXT, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
ALL_NAMES = {
    name: entry
    for table in ("verl", "openrlhf", "trainer", "grpo_config", "training_arguments", "command", "older_scripts")
    for name, entry in _one_by_one(TABLES[table]).items()
}
"""The entry of every name of another program; of two entries of a name, TRL's."""
REMOVED = _one_by_one(TABLES["removed"])
"""Removed names, by their dotted path, each with its successor; also kinds and configs."""


def fields_of(entry: str) -> list[str]:
    """Return the dotted names of an entry's fields; none without an equivalent here."""
    settings = [] if entry.startswith(NOT_HERE) else entry.partition("; ")[0].split(", ")
    return [setting.partition(": ")[0] for setting in settings if setting]


def metric_hint(name: str) -> str:
    """Return an older script's metric by its name here, in brackets; "" for any other name."""
    entries = [entry for names, entry in TABLES["metrics"].items() if name in names.split(", ")]
    return f" ({name} is {entries[0]} of metrics.jsonl)" if entries else ""


def hint_for(path: str, names: Sequence[str] | None = None, same: Sequence[str] = ()) -> str:
    """Return the hint after "no such field; " for another program's name; "" if unknown, or without a field in `names`.

    The longest end of the dotted path that has an entry counts. `same` are fields of the same name; they take
    precedence over a name without an equivalent.
    """
    parts = path.split(".")
    entry = next((ALL_NAMES[end] for i in range(len(parts)) if (end := ".".join(parts[i:])) in ALL_NAMES), None)
    fields = fields_of(entry or "")
    if entry is None or path in fields:
        return ""
    if names is not None and not (all(field in names for field in fields) if fields else not same):
        return ""
    return f"it is {entry}" if entry.startswith(NOT_HERE) else f"here it is {entry}"
