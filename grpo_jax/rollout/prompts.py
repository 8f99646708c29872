"""Prompts from files, from the package and from records in memory: checked, mistakes named together, and split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError, shown
from grpo_jax.rollout.data import SPLITS, PromptSet, Row, Rows, check_held_out, groups_of, split_places
from grpo_jax.rollout.inputs.files import read_records
from grpo_jax.rollout.inputs.records import Records, in_memory
from grpo_jax.rollout.inputs.scanning import (
    Line,
    Problems,
    Scanned,
    parse_record,
    parsing,
    scan,
    scanned_rows,
)

TIERS = ("plain", "attributes", "crowded")


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
    found = _scanned(str(path), columns)
    if not (validation or test):
        return _parted(found, str(path), held_out)
    named = {"train": found}
    named |= {part: _scanned(place, columns) for part, place in (("validation", validation), ("test", test)) if place}
    return _of_files(named)


def _scanned(place: str, columns: Mapping[str, str]) -> Scanned:
    """A data set, or a built-in list; at least one row."""
    if place == "builtin" or place.startswith("builtin:"):
        return scanned_rows(builtin_rows(place))
    records = read_records(place)
    found = scan(records, place, parsing(records.base, columns), columns)
    if not len(found.rows):
        raise UserError(f"{place} has no prompts: write one per line")
    return found


def _of_files(named: Mapping[str, Scanned]) -> PromptSet:
    """Parts that are files of their own; ids count through."""
    parts: dict[str, Rows] = {}
    first, known = 0, np.empty((0, 4), np.uint64)
    for part, (rows, keys, splits) in named.items():
        where = "data.prompts" if part == "train" else f"data.{part}"
        if (splits >= 0).any():
            raise UserError(f'{where}: its rows have a "split"; name one file for all, or files without it')
        ranks, _ = groups_of(np.concatenate([known, keys]))
        same = np.flatnonzero(np.isin(ranks[len(known) :], ranks[: len(known)]))
        if same.size:
            example = shown(rows[int(same[0])].prompt)
            raise UserError(f"{where}: {same.size} of its prompts stand in another part too, such as {example}")
        known = np.concatenate([known, keys])
        parts[part] = rows.numbered_from(first)
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
    return split_given(in_memory([*records]), held_out=held_out, columns=columns)


def split_given(records: Records, *, held_out: int | float, columns: Mapping[str, str]) -> PromptSet:
    """As `split_records`, from records that were opened."""
    check_held_out(held_out)
    found = scan(records, "prompts", parsing(None, columns), columns)
    if not len(found.rows):
        raise UserError("prompts: expected at least one")
    return _parted(found, "prompts", held_out)


def _parted(found: Scanned, name: str, held_out: int | float) -> PromptSet:
    """The parts that the rows name, or, where they name none, that are held out."""
    if found.splits[0] < 0:
        places = split_places(found.keys, held_out=held_out)
    else:
        places = tuple(np.flatnonzero(found.splits == split) for split in range(len(SPLITS)))
    parts = PromptSet(*map(found.rows.chosen, places))
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
    parts, problems, first = [], Problems(), 0
    for split, rows in zip(SPLITS, (train, validation, test), strict=True):
        part = []
        for i, record in enumerate(rows):
            line = parse_record(dict(record), first + i)
            if isinstance(line, Line) and line.split not in (None, split):
                line = f'its "split" is {line.split}'
            if isinstance(line, Line):
                part.append(line.row)
            else:
                problems.add(lambda i=i, split=split, line=line: f"row {i} of {split}: {line}")
        first += len(part)
        parts.append(tuple(part))
    problems.refuse("bad prompts")
    if not parts[0]:
        raise UserError("no prompts to train on")
    return PromptSet(*parts)
