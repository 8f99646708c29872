"""Read prompts from files, from the package or from memory: parse them, report all mistakes together, and split."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from grpo_jax.config.files import require_text
from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError, short_name, short_repr
from grpo_jax.models.hf.chat import PICTURE, Message
from grpo_jax.rollout.data import (
    PICTURE_MARK,
    RESERVED_COLUMNS,
    ROW_SIZES,
    SPLITS,
    PromptSet,
    Row,
    Rows,
    as_digests,
    check_held_out,
    groups_of,
    row_digest,
    row_sizes,
    size_of_row,
    split_places,
)
from grpo_jax.rollout.pictures import File, Source, source_of
from grpo_jax.rollout.records import Fields, Records, in_memory, read_records

TIERS = ("plain", "attributes", "crowded")
_SHOWN_CHARACTERS = 140
_SHOWN_PROBLEMS = 32  # problems that are put into words; the others are counted
_NO_SPLIT = -1
_PROMPT_COLUMNS = ("question", "problem", "instruction", "query", "input", "text", "messages")
"""Column names that data sets often have for prompts."""
ROLES = ("system", "user", "assistant")
_MOST_PICTURES = 256
_PICTURE_KEYS = ("image", "image_url", "base64", "url", "path")


def prompts_of(section: DataSection) -> PromptSet:
    """Read the data set that a config names (`load_prompts`)."""
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
    """Read a data set.

    A ``.jsonl`` file has one object per line: ``prompt`` (text, or chat messages), optionally ``image`` or ``images``
    (docs/pictures.md), ``split`` (train, validation or test, on every line or on none), and any further columns,
    which travel to the rewards. A ``.parquet`` file has the same as columns, and so have the folder that a Hugging
    Face data set was saved to and ``hub:OWNER/NAME``, a data set of the hub. A ``.csv`` or ``.tsv`` file names them
    in its first line, and all that it holds is text. A ``.txt`` file has one prompt per line. ``builtin``,
    ``builtin:plain``, ``builtin:attributes`` and ``builtin:crowded`` are the prompts that come with the package.
    Blank lines are skipped. A prompt that occurs twice is drawn twice as often; it may not stand in two parts.

    Args:
        held_out: Without a ``split`` column: how many different prompts (int), or which share of them (float), are
            kept for testing, and as many again for validation (`split_rows`).
        columns: {name: the data's name for it}.
        validation: A data set of its own for validation; with it, or with
        test: one for testing, all of `path` is trained on.

    Raises:
        UserError: The file is missing, unreadable or empty, or has bad lines: the first are named, all are counted.
    """
    check_held_out(held_out)
    train = _scan_place(str(path), columns)
    if not (validation or test):
        return _split(train, str(path), held_out)
    others = (("validation", validation), ("test", test))
    return _separate_files({"train": train} | {part: _scan_place(place, columns) for part, place in others if place})


def split_records(
    records: Iterable[Mapping[str, object]] | Records,
    *,
    held_out: int | float = 0.2,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> PromptSet:
    """Make a data set from records in memory, each like a line of a ``.jsonl`` file; ids are places, from 0.

    `held_out` and `columns` are as in `load_prompts`, and so are the errors.
    """
    check_held_out(held_out)
    opened = records if isinstance(records, Records) else in_memory([*records])
    scanned = _scan(opened, "prompts", columns)
    if not len(scanned.rows):
        raise UserError("prompts: expected at least one")
    return _split(scanned, "prompts", held_out)


def make_prompt_set(
    train: Iterable[Mapping[str, object]],
    validation: Iterable[Mapping[str, object]] = (),
    test: Iterable[Mapping[str, object]] = (),
) -> PromptSet:
    """Make a data set from rows in memory, ``{"prompt": text, column: value, …}``; ids count through.

    Raises:
        UserError: If a row is bad or nothing is there to train on.
    """
    parts = PromptSet([], [], [])
    problems = _Problems()
    ids = itertools.count()
    for split, records, rows in zip(SPLITS, (train, validation, test), parts, strict=True):
        for place, record in enumerate(records):
            try:
                row, named = _parse(dict(record), next(ids), None)
                if named not in (None, split):
                    raise ValueError(f'its "split" is {named}')
                rows.append(row)
            except ValueError as error:
                problems.add(f"row {place} of {split}: {error}")
    problems.refuse("bad prompts")
    if not parts.train:
        raise UserError("no prompts to train on")
    return PromptSet(*map(tuple, parts))


def builtin_rows(name: str) -> tuple[Row, ...]:
    """Return the prompts that come with the package: "builtin" all of them, "builtin:TIER" one tier.

    The tier is a column; a prompt has the same id in both.
    """
    tier = name.partition(":")[2]
    if tier and tier not in TIERS:
        choices = ", ".join(f"builtin:{name}" for name in TIERS)
        raise UserError(f"no built-in prompts called {short_repr(name)}: choose builtin, {choices}")
    text = resources.files("grpo_jax.rollout").joinpath("builtin_prompts.txt").read_text(encoding="utf-8")
    rows, heading = [], ""
    for line in text.splitlines():
        if line.startswith("# "):
            heading = line.removeprefix("# ")
        elif line:
            rows.append(Row(len(rows), line, {"tier": heading}))
    return tuple(row for row in rows if not tier or row.columns["tier"] == tier)


def rename_columns(record: Fields, columns: Mapping[str, str]) -> Fields:
    """Rename the columns of a record as the config says, {new: old}."""
    if not columns:
        return record
    others = {name: value for name, value in record.items() if name not in columns.values()}
    return others | {new: record[old] for new, old in columns.items() if old in record}


def _parse(record: Fields, number: int, base: Path | None) -> tuple[Row, str | None]:
    """Return a record's row and split, or raise ValueError; paths of its pictures are relative to `base`."""
    nameless = [name for name in record if not isinstance(name, str)]
    if nameless:
        raise ValueError(f"a column's name must be text, got {short_repr(nameless[0])}")
    split = record.pop("split", None)
    if split is not None and not (isinstance(split, str) and split in SPLITS):
        raise ValueError(f'"split" must be one of {", ".join(SPLITS)}, got {short_repr(split)}')
    if "prompt" not in record:
        raise ValueError(f'no "prompt" (it has {", ".join(map(short_repr, list(record)[:3])) or "nothing"})')
    pictures = take_pictures(record, base)
    prompt = read_prompt(record.pop("prompt"), pictures, base)
    clashes = [name for name in RESERVED_COLUMNS if name in record]
    if clashes:
        raise ValueError(f"column {clashes[0]!r} is a name the trainer itself passes to rewards: rename it")
    return Row(number, prompt.text, record, prompt.pictures, prompt.messages), split


class Prompt(NamedTuple):
    """Text of a row's prompt (of a conversation, what the user said last), its pictures in order, and its messages."""

    text: str
    pictures: tuple[Source, ...]
    messages: tuple[Message, ...]


class _Picture(NamedTuple):
    """A picture among the parts of a message; its source is None where the row's column has it."""

    source: Source | None


def take_pictures(record: Fields, base: Path | None) -> list[Source]:
    """Take `image` or `images` out of a record, as sources; raises ValueError."""
    columns = {name: record.pop(name, None) for name in ("image", "images")}
    names = [name for name, value in columns.items() if value is not None]
    if not names:
        return []
    if len(names) > 1:
        raise ValueError('it has "image" and "images": keep one of them')
    value = columns[names[0]]
    several = isinstance(value, list | tuple) and not isinstance(value, File)
    values = list(value) if several else [value]
    if len(values) > _MOST_PICTURES:
        raise ValueError(f'"{names[0]}" holds {len(values)} pictures; a prompt takes {_MOST_PICTURES} at most')
    sources = []
    for number, picture in enumerate(values, 1):
        try:
            sources.append(source_of(picture, base))
        except ValueError as error:
            raise ValueError(f'"{names[0]}"{f" {number}" if several else ""}: {error}') from error
    return sources


def read_prompt(value: object, pictures: Sequence[Source], base: Path | None) -> Prompt:
    """Read a row's `prompt`, text or messages {"role": …, "content": text or parts}; raises ValueError.

    The `pictures` of its column take the places of parts {"type": "image"} without a source, or stand before the
    user's first text.
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError('"prompt" is empty')
        require_text(value)
        count = value.count(PICTURE_MARK)
        if pictures and count not in (0, len(pictures)):
            raise ValueError(f'"prompt" has {PICTURE_MARK} {count} times, and there are {len(pictures)} pictures')
        return Prompt(value.strip(), tuple(pictures), ())
    if not isinstance(value, list | tuple):
        raise ValueError(f'"prompt" must be text or a list of messages, got {type(value).__name__}')
    if not value:
        raise ValueError('"prompt" is empty')
    messages = [_read_message(number, message, base) for number, message in enumerate(value, 1)]
    if messages[-1][0] != "user":
        raise ValueError('"prompt": the last message must be the user\'s, which the policy answers')
    _place_pictures(messages, pictures)
    sources = tuple(part.source for _, parts in messages for part in parts if isinstance(part, _Picture))
    conversation = tuple(
        Message(role, tuple(PICTURE if isinstance(part, _Picture) else part for part in parts))
        for role, parts in messages
    )
    texts = [message.text.strip() for message in reversed(conversation) if message.role == "user"]
    return Prompt(next(filter(None, texts), "(a picture)"), sources, conversation)


def _read_message(number: int, message: object, base: Path | None) -> tuple[str, list[str | _Picture]]:
    where = f'"prompt", message {number}'
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        expected = f'{{"role": {" | ".join(ROLES)}, "content": …}}'
        raise ValueError(f"{where}: expected {expected}, got {short_repr(message, 40)}")
    content = message.get("content")
    if not isinstance(content, str | list | tuple):
        raise ValueError(f"{where}: content must be text or a list of parts, got {type(content).__name__}")
    try:
        return message["role"], [
            _read_part(part, base) for part in ([content] if isinstance(content, str) else content)
        ]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read_part(part: object, base: Path | None) -> str | _Picture:
    fields = part if isinstance(part, Mapping) else {}
    kind = "text" if isinstance(part, str) else fields.get("type")
    if kind == "text":
        text = part if isinstance(part, str) else fields.get("text")
        if not isinstance(text, str):
            raise ValueError(f'a part of type "text" holds no text, got {short_repr(text, 40)}')
        require_text(text)
        return text
    if kind not in ("image", "image_url"):
        raise ValueError(f'a part must be of type "text" or "image", got {short_repr(kind or part, 40)}')
    picture = next((fields[name] for name in _PICTURE_KEYS if fields.get(name) is not None), None)
    return _Picture(None if picture is None else source_of(picture, base))


def _place_pictures(messages: Sequence[tuple[str, list[str | _Picture]]], column: Sequence[Source]) -> None:
    places = [
        (parts, at)
        for _, parts in messages
        for at, part in enumerate(parts)
        if isinstance(part, _Picture) and part.source is None
    ]
    if not places and column:
        first = next(parts for role, parts in messages if role == "user")
        first[:0] = map(_Picture, column)
        return
    if len(places) != len(column):
        raise ValueError(f'"prompt" keeps {len(places)} places for pictures, and there are {len(column)}')
    for (parts, at), source in zip(places, column, strict=True):
        parts[at] = _Picture(source)


class _Scanned(NamedTuple):
    """Rows of a data set without mistakes, their digests u64 [n, 4], and splits i8 [n] (`_NO_SPLIT` or a place)."""

    rows: Rows
    digests: np.ndarray
    splits: np.ndarray


class _Problems:
    """Mistakes, counted, and the first of them in words: a file may hold millions."""

    def __init__(self) -> None:
        self.count = 0
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        self.count += 1
        if len(self.messages) < _SHOWN_PROBLEMS:
            self.messages.append(message)

    def refuse(self, subject: str) -> None:
        """Raise UserError where there are any: one line, with as many as fit in."""
        if not self.count:
            return
        listed: list[str] = []
        for message in self.messages:
            if listed and sum(map(len, listed)) + len(message) > _SHOWN_CHARACTERS:
                break
            listed.append(message if len(message) <= _SHOWN_CHARACTERS else f"{message[:_SHOWN_CHARACTERS]}…")
        if self.count > len(listed):
            listed.append(f"and {self.count - len(listed)} more")
        raise UserError(f"{subject}: {self.count} bad line{'s' if self.count > 1 else ''}: {'; '.join(listed)}")


def _scan_place(place: str, columns: Mapping[str, str]) -> _Scanned:
    """Scan a data set or a built-in list; it has at least one row."""
    if place == "builtin" or place.startswith("builtin:"):
        listed = builtin_rows(place)
        rows = Rows(listed.__getitem__, np.arange(len(listed)), row_sizes(listed))
        digests = as_digests(b"".join(map(row_digest, listed)))
        return _Scanned(rows, digests, np.full(len(listed), _NO_SPLIT, np.int8))
    scanned = _scan(read_records(place), place, columns)
    if not len(scanned.rows):
        raise UserError(f"{place} has no prompts: write one per line")
    return scanned


def _scan(records: Records, subject: str, columns: Mapping[str, str]) -> _Scanned:
    """Parse every record once, and raise UserError for bad ones; a row is made again when it is drawn."""

    def parse(record: Fields | str | None, number: int) -> tuple[Row, str | None]:
        if not isinstance(record, dict):
            raise ValueError(record or "gone")
        return _parse(rename_columns(record, columns), number, records.base)

    places, numbers, sizes = array("q"), array("q"), array("q")
    digests, splits = bytearray(), array("b")
    problems = _Problems()
    names: dict[str, None] = {}
    for place, (number, record) in enumerate(records.all()):
        if record is None:
            continue
        if isinstance(record, dict):
            names |= dict.fromkeys(map(str, record))
        try:
            row, split = parse(record, number)
        except ValueError as error:
            problems.add(f"{records.unit} {number}: {error}")
            continue
        places.append(place)
        numbers.append(number)
        sizes.extend(size_of_row(row))
        digests += row_digest(row)
        splits.append(_NO_SPLIT if split is None else SPLITS.index(split))
    if names:
        _check_columns(list(names), columns, subject)

    def make(place: int) -> Row:
        ((number, record),) = records.read(place, place + 1)
        try:
            return parse(record, number)[0]
        except ValueError as error:
            where = f"{short_name(subject)}: {records.unit} {number}"
            raise UserError(f"{where}: {error}; it has changed since it was read") from error

    rows = Rows(make, np.frombuffer(places, np.int64), np.frombuffer(sizes, ROW_SIZES))
    scanned = _Scanned(rows, as_digests(bytes(digests)), np.frombuffer(splits, np.int8))
    _check_splits(scanned, numbers, records.unit, problems)
    problems.refuse(subject)
    return scanned


def _check_columns(names: Sequence[str], columns: Mapping[str, str], subject: str) -> None:
    """Raise UserError where no record has a prompt, or a column that the config names."""
    has = f"{short_name(subject)} has {short_repr(', '.join(names), 120)}"
    for new, old in columns.items():
        if old not in names:
            raise UserError(f"data.columns.{new}: no such column, {short_repr(old)}; {has}")
    if "prompt" not in columns and "prompt" not in names:
        prompt = next((name for name in _PROMPT_COLUMNS if name in names), names[0])
        raise UserError(f'{has}, and no "prompt": say which one asks, as in --data.columns.prompt {short_name(prompt)}')


def _check_splits(scanned: _Scanned, numbers: Sequence[int], unit: str, problems: _Problems) -> None:
    """Report rows without a split among rows that have one, and prompts that stand in two parts."""
    splits = scanned.splits
    named = np.flatnonzero(splits != _NO_SPLIT)
    if not named.size:
        return
    ranks, first = groups_of(scanned.digests[named])
    before = np.arange(len(splits))
    before[named] = named[first][ranks]  # the first row of the same prompt
    for place in np.flatnonzero((splits == _NO_SPLIT) | (splits != splits[before])).tolist():
        if splits[place] == _NO_SPLIT:
            problems.add(f'{unit} {numbers[place]}: no "split", which other {unit}s have')
            continue
        this, other = SPLITS[splits[place]], SPLITS[splits[before[place]]]
        first_line = f"{unit} {numbers[before[place]]}"
        problems.add(f"{unit} {numbers[place]}: this {this} prompt is also a {other} prompt ({first_line})")


def _split(scanned: _Scanned, subject: str, held_out: int | float) -> PromptSet:
    """Return the parts that the rows name, or hold some out."""
    if scanned.splits[0] == _NO_SPLIT:
        places = split_places(scanned.digests, held_out=held_out)
    else:
        places = tuple(np.flatnonzero(scanned.splits == split) for split in range(len(SPLITS)))
    parts = PromptSet(*map(scanned.rows.take, places))
    if not parts.train:
        raise UserError(f'{subject} has no line with "split": "train"')
    return parts


def _separate_files(scanned: Mapping[str, _Scanned]) -> PromptSet:
    """Return the parts from files of their own; ids count through."""
    parts: dict[str, Rows] = {}
    first, before = 0, np.empty((0, 4), np.uint64)
    for part, (rows, digests, splits) in scanned.items():
        where = "data.prompts" if part == "train" else f"data.{part}"
        if (splits != _NO_SPLIT).any():
            raise UserError(f'{where}: its rows have a "split"; name one file for all, or files without it')
        ranks, _ = groups_of(np.concatenate([before, digests]))
        same = np.flatnonzero(np.isin(ranks[len(before) :], ranks[: len(before)]))
        if same.size:
            example = short_repr(rows[int(same[0])].prompt)
            raise UserError(f"{where}: {same.size} of its prompts stand in another part too, such as {example}")
        before = np.concatenate([before, digests])
        parts[part] = rows.numbered_from(first)
        first = parts[part][-1].id + 1
    return PromptSet(*(parts.get(name, ()) for name in SPLITS))
