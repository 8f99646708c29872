"""Prompts from files, from the package and from records in memory: checked, mistakes named together, and split."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.reading import read_json
from grpo_jax.errors import UserError, said, shown
from grpo_jax.rollout.data import RESERVED_COLUMNS, SPLITS, PromptSet, Row, check_held_out, split_rows
from grpo_jax.rollout.inputs.conversations import read_prompt, take_pictures
from grpo_jax.rollout.inputs.tables import read_tables

TIERS = ("plain", "attributes", "crowded")

_SHOWN_CHARACTERS = 140


class _Line(NamedTuple):
    """A row as read, before it is known which part it belongs to."""

    row: Row
    split: str | None


def load_prompts(path: str | Path, *, held_out: int | float = 0.2) -> PromptSet:
    """Reads a data set.

    A ``.jsonl`` file has one object per line: ``prompt`` (text, or chat messages), optionally ``image`` or ``images``
    (docs/pictures.md), ``split`` (train, validation or test, on every line or on none), and any further columns, which
    travel to the rewards. A ``.parquet`` file has the same as columns, and so has the folder that a Hugging Face data
    set was saved to. A ``.txt`` file has one prompt per line. ``builtin``, ``builtin:plain``, ``builtin:attributes``
    and ``builtin:crowded`` are the prompts that come with the package. Blank lines are skipped. A prompt that occurs
    twice is kept twice (it is drawn twice as often), both times in the same part; it may not stand in two parts.

    Args:
        path: The file, or the name of a built-in list.
        held_out: Without a ``split`` column: how many different prompts (int), or which share of them (float), are
            kept for testing, and as many again for validation. See ``split_rows``.

    Returns:
        The three parts. ``train`` is never empty; the others are where nothing is held out.

    Raises:
        UserError: If the file is missing, unreadable or empty, or has bad lines: the first are named, all are counted.
        ValueError: If ``held_out`` is neither a count nor a share.
    """
    check_held_out(held_out)
    name = str(path)
    if name == "builtin" or name.startswith("builtin:"):
        return split_rows(builtin_rows(name), held_out=held_out)
    lines = _read_lines(Path(path))
    if not lines:
        raise UserError(f"{path} has no prompts: write one per line")
    return _parted(lines, str(path), held_out)


def split_records(records: Iterable[Mapping[str, Any]], *, held_out: int | float = 0.2) -> PromptSet:
    """A data set from records in memory, each what a line of a ``.jsonl`` file holds; ids are places, from 0.

    Args:
        records: ``{"prompt": text, column: value, …}``, on all or on none "split".
        held_out: As for `load_prompts`.

    Raises:
        UserError: If there are none, or bad ones: the first are named, all are counted.
        ValueError: If ``held_out`` is neither a count nor a share.
    """
    check_held_out(held_out)
    lines = _checked(((dict(record), i) for i, record in enumerate(records)), None, "prompts", "row")
    if not lines:
        raise UserError("prompts: expected at least one")
    return _parted(lines, "prompts", held_out)


def _checked(records: Iterable[tuple[dict[Any, Any], int]], base: Path | None, subject: str, name: str) -> list[_Line]:
    """The rows of numbered records; raises one error that names all bad ones."""
    lines, problems = [], []
    for record, number in records:
        line = _parse_record(record, number, base)
        if isinstance(line, str):
            problems.append(f"{name} {number}: {line}")
        else:
            lines.append(line)
    problems += _split_problems(lines, name)
    if problems:
        raise UserError(_listing(subject, problems))
    return lines


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


def _read_lines(path: Path) -> list[_Line]:
    """Every line of a file; raises one error that names all bad ones."""
    kind = path.suffix.lower()
    if kind == ".parquet" or os.path.isdir(path):
        return _checked(
            ((dict(record), i) for i, record in enumerate(read_tables(path))), path.parent, str(path), "row"
        )
    if kind not in (".jsonl", ".txt"):
        raise UserError(
            f"{said(path)}: prompts come from a .jsonl, .txt or .parquet file, from a saved data set's folder, or from "
            "builtin[:TIER]"
        )
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{said(path)} does not exist: give a .jsonl or .txt file with prompts") from None
    except (OSError, ValueError) as error:  # NUL in a path is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{said(path)} cannot be read: {reason}") from None
    lines: list[_Line] = []
    problems: list[str] = []
    for number, data in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        line = _parse_line(data, kind, number, path.parent)
        if isinstance(line, str):
            problems.append(f"line {number}: {line}")
        elif line is not None:
            lines.append(line)
    problems += _split_problems(lines)
    if problems:
        raise UserError(_listing(str(path), problems))
    return lines


def _parse_line(data: bytes, kind: str, number: int, base: Path) -> _Line | str | None:
    """A line's row, what is wrong with it, or None where it is blank."""
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        return "not UTF-8 text"
    if not text:
        return None
    if kind == ".txt":
        return _parse_record({"prompt": text}, number)
    try:
        record = read_json(text)
    except ValueError as error:
        return str(error)
    if not isinstance(record, dict):
        return f'expected an object like {{"prompt": "…"}}, got {type(record).__name__}'
    return _parse_record(record, number, base)


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
