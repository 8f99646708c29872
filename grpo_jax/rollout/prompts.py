"""Prompts from files, from the package and from records in memory: checked, mistakes named together, and split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError, said, shown
from grpo_jax.rollout.data import RESERVED_COLUMNS, SPLITS, PromptSet, Row, check_held_out, split_rows
from grpo_jax.rollout.inputs.conversations import read_prompt, take_pictures
from grpo_jax.rollout.inputs.files import read_records

TIERS = ("plain", "attributes", "crowded")

_SHOWN_CHARACTERS = 140
_ASKING = ("question", "problem", "instruction", "query", "input", "text", "messages")
"""What data sets often call their prompts."""


class _Line(NamedTuple):
    """A row as read, before it is known which part it belongs to."""

    row: Row
    split: str | None


def prompts_of(section: DataSection) -> PromptSet:
    """The data set that a config names; as `load_prompts`."""
    return load_prompts(
        section.prompts,
        held_out=section.held_out,
        columns=section.columns,
        validation=section.validation,
        test=section.test,
    )


def load_prompts(
    path: str | Path,
    *,
    held_out: int | float = 0.2,
    columns: Mapping[str, str] = MappingProxyType({}),
    validation: str = "",
    test: str = "",
) -> PromptSet:
    """Reads a data set.

    A ``.jsonl`` file has one object per line: ``prompt`` (text, or chat messages), optionally ``image`` or ``images``
    (docs/pictures.md), ``split`` (train, validation or test, on every line or on none), and any further columns, which
    travel to the rewards. A ``.parquet`` file has the same as columns, and so have the folder that a Hugging Face data
    set was saved to and ``hub:OWNER/NAME``, a data set of the hub. A ``.csv`` or ``.tsv`` file names them in its first
    line, and all that it holds is text. A ``.txt`` file has one prompt per line. ``builtin``, ``builtin:plain``,
    ``builtin:attributes`` and ``builtin:crowded`` are the prompts that come with the package. Blank lines are skipped.
    A prompt that occurs twice is kept twice (it is drawn twice as often), both times in the same part; it may not
    stand in two parts.

    Args:
        path: The file, or the name of a built-in list.
        held_out: Without a ``split`` column: how many different prompts (int), or which share of them (float), are
            kept for testing, and as many again for validation. See ``split_rows``.
        columns: What columns of the data are called otherwise: {name: the data's name for it}.
        validation: A data set of its own for validation; with it, or with
        test: one for testing, all of `path` is trained on.

    Returns:
        The three parts. ``train`` is never empty; the others are where nothing is held out.

    Raises:
        UserError: If the file is missing, unreadable or empty, or has bad lines: the first are named, all are counted.
        ValueError: If ``held_out`` is neither a count nor a share.
    """
    check_held_out(held_out)
    lines = _lines_of(str(path), columns)
    if not (validation or test):
        return _parted(lines, str(path), held_out)
    named = {"train": lines}
    named |= {part: _lines_of(place, columns) for part, place in (("validation", validation), ("test", test)) if place}
    return _of_files(named)


def _lines_of(place: str, columns: Mapping[str, str]) -> list[_Line]:
    """The lines of a file, or of a built-in list; at least one."""
    if place == "builtin" or place.startswith("builtin:"):
        return [_Line(row, None) for row in builtin_rows(place)]
    lines = _read_lines(place, columns)
    if not lines:
        raise UserError(f"{place} has no prompts: write one per line")
    return lines


def _of_files(named: Mapping[str, Sequence[_Line]]) -> PromptSet:
    """Parts that are files of their own; ids count through."""
    parts: dict[str, tuple[Row, ...]] = {}
    first, known = 0, set()
    for part, lines in named.items():
        where = "data.prompts" if part == "train" else f"data.{part}"
        if any(line.split is not None for line in lines):
            raise UserError(f'{where}: its rows have a "split"; name one file for all, or files without it')
        keys = [line.row.key for line in lines]
        same = [line.row.prompt for line, key in zip(lines, keys, strict=True) if key in known]
        if same:
            raise UserError(f"{where}: {len(same)} of its prompts stand in another part too, such as {shown(same[0])}")
        known.update(keys)
        parts[part] = tuple(replace(line.row, id=line.row.id + first) for line in lines)
        first = parts[part][-1].id + 1
    return PromptSet(*(parts.get(name, ()) for name in SPLITS))


def split_records(
    records: Iterable[Mapping[str, Any]],
    *,
    held_out: int | float = 0.2,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> PromptSet:
    """A data set from records in memory, each what a line of a ``.jsonl`` file holds; ids are places, from 0.

    Args:
        records: ``{"prompt": text, column: value, …}``, on all or on none "split".
        held_out: As for `load_prompts`.
        columns: Likewise.

    Raises:
        UserError: If there are none, or bad ones: the first are named, all are counted.
        ValueError: If ``held_out`` is neither a count nor a share.
    """
    check_held_out(held_out)
    numbered = ((i, dict(record)) for i, record in enumerate(records))
    lines = _checked(numbered, None, "prompts", "row", columns)
    if not lines:
        raise UserError("prompts: expected at least one")
    return _parted(lines, "prompts", held_out)


def _checked(
    records: Iterable[tuple[int, dict[Any, Any] | str]],
    base: Path | None,
    subject: str,
    name: str,
    columns: Mapping[str, str],
) -> list[_Line]:
    """The rows of numbered records; raises one error that names all bad ones."""
    lines: list[_Line] = []
    problems, seen = [], {}
    for number, record in records:
        line: _Line | str
        if isinstance(record, str):
            line = record
        else:
            seen |= dict.fromkeys(record)
            line = _parse_record(_renamed(record, columns), number, base)
        if isinstance(line, str):
            problems.append(f"{name} {number}: {line}")
        else:
            lines.append(line)
    if seen:
        _check_columns([str(column) for column in seen], columns, subject)
    problems += _split_problems(lines, name)
    if problems:
        raise UserError(_listing(subject, problems))
    return lines


def _renamed(record: Mapping[Any, Any], columns: Mapping[str, str]) -> dict[Any, Any]:
    """A record whose columns have the names that the config gives them."""
    others = {name: value for name, value in record.items() if name not in columns.values()}
    return others | {new: record[old] for new, old in columns.items() if old in record}


def _check_columns(seen: Sequence[str], columns: Mapping[str, str], subject: str) -> None:
    """Raises UserError where no record at all has a prompt, or a column that the config names."""
    has = f"{said(subject)} has {shown(', '.join(seen), 120)}"
    for new, old in columns.items():
        if old not in seen:
            raise UserError(f"data.columns.{new}: no such column, {shown(old)}; {has}")
    if "prompt" not in columns and "prompt" not in seen:
        asks = next((name for name in _ASKING if name in seen), seen[0])
        raise UserError(f'{has}, and no "prompt": say which one asks, as in --data.columns.prompt {asks}')


def _parted(lines: Sequence[_Line], name: str, held_out: int | float) -> PromptSet:
    """The parts that the lines name, or, where they name none, that are held out."""
    if lines[0].split is None:
        return split_rows([line.row for line in lines], held_out=held_out)
    parts = PromptSet(*(tuple(line.row for line in lines if line.split == split) for split in SPLITS))
    if not parts.train:
        raise UserError(f'{name} has no line with "split": "train"')
    return parts


def builtin_rows(name: str) -> tuple[Row, ...]:
    """The prompts that come with the package, with their tier as a column.

    Args:
        name: "builtin" for all, or "builtin:TIER". A prompt has the same id in both.

    Raises:
        UserError: If there is no such tier.
    """
    tier = name.partition(":")[2]
    if tier and tier not in TIERS:
        choices = ", ".join(f"builtin:{known}" for known in TIERS)
        raise UserError(f"no built-in prompts called {shown(name)}: choose builtin, {choices}")
    text = resources.files("grpo_jax.rollout").joinpath("builtin_prompts.txt").read_text(encoding="utf-8")
    rows, heading = [], ""
    for line in text.splitlines():
        if line.startswith("# "):
            heading = line.removeprefix("# ")
        elif line:
            rows.append(Row(len(rows), line, {"tier": heading}))
    return tuple(row for row in rows if not tier or row.columns["tier"] == tier)


def make_prompt_set(
    train: Iterable[Mapping[str, Any]],
    validation: Iterable[Mapping[str, Any]] = (),
    test: Iterable[Mapping[str, Any]] = (),
) -> PromptSet:
    """A data set from rows that are already in memory, ``{"prompt": text, column: value, …}``; ids count through.

    Raises:
        UserError: If a row is bad or nothing is there to train on.
    """
    parts, problems, first = [], [], 0
    for split, rows in zip(SPLITS, (train, validation, test), strict=True):
        part = []
        for i, record in enumerate(rows):
            line = _parse_record(dict(record), first + i)
            if isinstance(line, str):
                problems.append(f"row {i} of {split}: {line}")
            elif line.split not in (None, split):
                problems.append(f'row {i} of {split}: its "split" is {line.split}')
            else:
                part.append(line.row)
        first += len(part)
        parts.append(tuple(part))
    if problems:
        raise UserError(_listing("bad prompts", problems))
    if not parts[0]:
        raise UserError("no prompts to train on")
    return PromptSet(*parts)


def _read_lines(place: str, columns: Mapping[str, str]) -> list[_Line]:
    """Every line of a data set; raises one error that names all bad ones."""
    found = read_records(place)
    return _checked(found.rows, found.base, place, found.unit, columns)


def _parse_record(record: dict[Any, Any], identity: int, base: Path | None = None) -> _Line | str:
    """A record's row and part, or what is wrong with it; its pictures' paths are relative to `base`."""
    nameless = [name for name in record if not isinstance(name, str)]
    if nameless:
        return f"a column's name must be text, got {shown(nameless[0])}"
    split = record.pop("split", None)
    if split is not None and not (isinstance(split, str) and split in SPLITS):
        return f'"split" must be one of {", ".join(SPLITS)}, got {shown(split)}'
    if "prompt" not in record:
        return f'no "prompt" (it has {", ".join(map(shown, list(record)[:3])) or "nothing"})'
    try:
        pictures = take_pictures(record, base)
        asked = read_prompt(record.pop("prompt"), pictures, base)
    except ValueError as error:
        return str(error)
    clashes = [name for name in RESERVED_COLUMNS if name in record]
    if clashes:
        return f"column {clashes[0]!r} is a name the trainer itself passes to rewards: rename it"
    return _Line(Row(identity, asked.text, record, asked.pictures, asked.messages), split)


def _split_problems(lines: Sequence[_Line], name: str = "line") -> list[str]:
    """Lines without a split among lines that have one, and prompts that stand in two parts."""
    if all(line.split is None for line in lines):
        return []
    problems, seen = [], {}
    for line in lines:
        if line.split is None:
            problems.append(f'{name} {line.row.id}: no "split", which other {name}s have')
            continue
        split, number = seen.setdefault(line.row.key, (line.split, line.row.id))
        if split != line.split:
            problems.append(
                f"{name} {line.row.id}: this {line.split} prompt is also a {split} prompt ({name} {number})"
            )
    return problems


def _listing(subject: str, problems: Sequence[str]) -> str:
    """One line for all problems: those that fit in, and how many more there are."""
    bad, listed = f"{subject}: {len(problems)} bad line{'s' if len(problems) > 1 else ''}", []
    for problem in problems:
        if listed and sum(map(len, listed)) + len(problem) > _SHOWN_CHARACTERS:
            break
        listed.append(problem if len(problem) <= _SHOWN_CHARACTERS else f"{problem[:_SHOWN_CHARACTERS]}…")
    more = len(problems) - len(listed)
    return f"{bad}: {'; '.join(listed)}{f'; and {more} more' if more else ''}"
