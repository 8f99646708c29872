"""Read prompts from files, the package or memory: parse them, report all mistakes together, and split them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from grpo_jax.config.files import require_text
from grpo_jax.config.run import Config
from grpo_jax.errors import Problems, UserError, short_name, short_repr
from grpo_jax.models.hf.chat import PICTURE, Message, Part
from grpo_jax.rollout.data import (
    FACTS,
    NO_SPLIT,
    PICTURE_MARK,
    RESERVED_COLUMNS,
    SPLITS,
    PromptSet,
    Row,
    Rows,
    facts_of,
    split_places,
)
from grpo_jax.rollout.pictures import File, Source, source_of
from grpo_jax.rollout.reasoning_gym import read_tasks
from grpo_jax.rollout.records import Fields, Record, Records, listed, read_records

BUILTIN = ("builtin", "builtin:plain", "builtin:attributes", "builtin:crowded")
_PROMPT_COLUMNS = ("question", "problem", "instruction", "query", "input", "text", "messages")
"""Column names that data sets often have for prompts."""
T = TypeVar("T")
Data = str | Path | Records | Iterable[Mapping[str, object]]
"""Name of a data set, or records, each like a line of a ``.jsonl`` file."""
ROLES = ("system", "user", "assistant")
_PICTURE_KEYS = ("image", "image_url", "base64", "url", "path")
UNREAD_KEYS = ("tool_calls", "function_call", "reasoning_content", "thinking")
"""Keys of a message that a chat template may write, but no message here has."""


def prompts_of(config: Config) -> PromptSet:
    """Read the data set that a config names (`load_prompts`); its seed draws the tasks of reasoning-gym."""
    section = config.data
    apart = bool(section.validation or section.test)
    return load_prompts(
        read_tasks(section.prompts, config.seed, 0 if apart else section.held_out),
        held_out=section.held_out,
        columns=section.columns,
        validation=read_tasks(section.validation, None, 0),
        test=read_tasks(section.test, None, 0),
    )


def load_prompts(
    data: Data,
    *,
    held_out: int | float = 0.2,
    columns: Mapping[str, str] = MappingProxyType({}),
    validation: Data = "",
    test: Data = "",
) -> PromptSet:
    """Read a data set (docs/data.md): one with a column ``split``, or with `held_out` for `split_places`.

    `columns` are {name: the name in the data}. With separate data sets for validation or testing, all of `data` is for
    training. UserError if a file is missing, unreadable or empty, or has bad lines: it names the first and counts all.
    """
    if validation or test:
        return _separate((data, validation, test), columns, apart=True)
    subject = str(data) if isinstance(data, str | Path) else "prompts"
    return _split(_scan(data, columns, subject), subject, held_out)


def make_prompt_set(
    train: Iterable[Mapping[str, object]],
    validation: Iterable[Mapping[str, object]] = (),
    test: Iterable[Mapping[str, object]] = (),
) -> PromptSet:
    """Make a data set from rows in memory, ``{"prompt": text, column: value, …}``; ids continue across the splits.

    Raises:
        UserError: If a row is bad or there are no rows for training.
    """
    return _separate((train, [*validation], [*test]), {}, apart=False)


def _separate(data: tuple[Data, Data, Data], columns: Mapping[str, str], *, apart: bool) -> PromptSet:
    """Read each split from its own data, with continuing ids; with `apart`, no prompt may be in two splits."""
    parts: dict[str, Rows] = {}
    digests = np.empty(0, FACTS["digest"])
    first = 0
    for part, own in zip(SPLITS, data, strict=True):
        if part != "train" and not own:
            continue
        where = "data.prompts" if part == "train" else f"data.{part}"
        rows = _scan(own, columns, str(own) if isinstance(own, str | Path) else part, first=first)
        if (rows.facts["split"] != NO_SPLIT).any():
            raise UserError(f'{where}: its rows have a "split"; name one file for all, or files without it')
        same = np.flatnonzero(np.isin(rows.facts["digest"], digests))
        if apart and same.size:
            example = short_repr(rows[int(same[0])].prompt)
            raise UserError(f"{where}: {same.size} of its prompts are in another part too, such as {example}")
        digests = np.concatenate([digests, rows.facts["digest"]])
        parts[part] = rows
        first = int(rows.facts["id"][-1]) + 1
    return PromptSet(*(parts.get(name, ()) for name in SPLITS))


def _builtin(name: str) -> Records:
    """Return the package's own prompts, with a column "tier"; a prompt has the same id in "builtin:TIER"."""
    tier = name.partition(":")[2]
    text = resources.files("grpo_jax.rollout").joinpath("builtin_prompts.txt").read_text(encoding="utf-8")
    records: list[Fields] = []
    heading = ""
    for line in text.splitlines():
        if line.startswith("# "):
            heading = line.removeprefix("# ")
        elif line:
            records.append({"prompt": line, "tier": heading})
    return listed([record for record in enumerate(records) if tier in ("", record[1]["tier"])])


def _parse(record: Fields, number: int, base: Path | None) -> tuple[Row, str | None]:
    """Return a record's row and split, or raise ValueError; picture paths are relative to `base`."""
    split = record.pop("split", None)
    if split is not None and not (isinstance(split, str) and split in SPLITS):
        raise ValueError(f'"split" must be one of {", ".join(SPLITS)}, got {short_repr(split)}')
    if "prompt" not in record:
        raise ValueError(f'no "prompt" (it has {", ".join(map(short_repr, list(record)[:3])) or "nothing"})')
    row = read_prompt(record.pop("prompt"), take_pictures(record, base), base)
    if clashes := [name for name in RESERVED_COLUMNS if name in record]:
        raise ValueError(f"column {clashes[0]!r} is a name the trainer itself passes to rewards: rename it")
    return replace(row, id=number, columns=record), split


def take_pictures(record: Fields, base: Path | None) -> list[Source]:
    """Pop `image` and `images` from a record, as sources; raises ValueError."""
    sources: list[Source] = []
    for name in ("image", "images"):
        value = record.pop(name, None)
        values = value if isinstance(value, list | tuple) and not isinstance(value, File) else [value]
        sources += [
            _at(f'"{name}"{f" {number}" if values is value else ""}', source_of, picture, base)
            for number, picture in enumerate(values if value is not None else (), 1)
        ]
    return sources


def _at(where: str, read: Callable[..., T], *arguments: object) -> T:
    """Return read(*arguments); prefix a ValueError with `where`."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def read_prompt(value: object, pictures: Sequence[Source], base: Path | None) -> Row:
    """Make a row from its `prompt`, a string or messages {"role": …, "content": text or parts}; raises ValueError.

    The `pictures` from its columns fill the parts {"type": "image"} without a source, or precede the first user text.
    """
    if isinstance(value, str) and value.strip():
        require_text(value)
        if pictures and (count := value.count(PICTURE_MARK)) not in (0, len(pictures)):
            raise ValueError(f'"prompt" has {PICTURE_MARK} {count} times, and there are {len(pictures)} pictures')
        return Row(0, value.strip(), pictures=tuple(pictures))
    if not isinstance(value, list | tuple):
        wrong = f"must be text or a list of messages, got {type(value).__name__}"
        raise ValueError(f'"prompt" {"is empty" if isinstance(value, str) else wrong}')
    sources: list[Source | None] = []  # None if a column has the source
    messages = [
        _at(f'"prompt", message {number}', read_message, message, sources, base)
        for number, message in enumerate(value, 1)
    ]
    if not messages or messages[-1].role != "user":
        raise ValueError('"prompt": the last message must be the user\'s, which the policy answers')
    empty = [place for place, source in enumerate(sources) if source is None]
    if pictures and not empty:
        first = [message.role for message in messages].index("user")
        before = sum(part is PICTURE for message in messages[:first] for part in message.parts)
        sources[before:before] = pictures
        messages[first] = Message("user", (*[PICTURE] * len(pictures), *messages[first].parts))
    elif len(empty) != len(pictures):
        raise ValueError(f'"prompt" keeps {len(empty)} places for pictures, and there are {len(pictures)}')
    for place, source in zip(empty, pictures, strict=False):
        sources[place] = source
    texts = [message.text.strip() for message in reversed(messages) if message.role == "user"]
    return Row(0, next(filter(None, texts), "(a picture)" if sources else ""), {}, tuple(sources), tuple(messages))


def read_message(message: Any, sources: list[Source | None], base: Path | None) -> Message:
    """Read a message, and append the sources of its pictures to `sources`."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, str | list | tuple) or message.get("role") not in ROLES:
        expected = f'{{"role": {" | ".join(ROLES)}, "content": text or a list of parts}}'
        raise ValueError(f"expected {expected}, got {short_repr(message, 40)}")
    if lost := [name for name in UNREAD_KEYS if message.get(name)]:
        raise ValueError(f"{lost[0]} is not read: write it into the content, as the policy would")
    parts: list[Part] = []
    for part in [content] if isinstance(content, str) else content:
        fields = part if isinstance(part, Mapping) else {"type": "text", "text": part}
        kind, text = fields.get("type"), fields.get("text")
        if kind in ("image", "image_url"):
            picture = next((fields[name] for name in _PICTURE_KEYS if fields.get(name) is not None), None)
            sources.append(None if picture is None else source_of(picture, base))
            parts.append(PICTURE)
        elif kind == "text" and isinstance(text, str):
            require_text(text)
            parts.append(text)
        else:
            raise ValueError(f'a part must be of type "text", with a text, or "image", got {short_repr(part, 40)}')
    return Message(message["role"], tuple(parts))


def read_content(content: object) -> tuple[tuple[Part, ...], list[Source]]:
    """Return the parts of a message's content, texts and `PICTURE`, and the sources of its pictures; ValueError."""
    if not isinstance(content, str | list | tuple):
        raise ValueError(f"got {short_repr(content)}")
    sources: list[Source | None] = []
    message = read_message({"role": "user", "content": content}, sources, None)
    if any(source is None for source in sources):
        raise ValueError('a part of type "image" needs its picture, as in {"type": "image", "image": …}')
    return message.parts, sources


def _scan(data: Data, columns: Mapping[str, str], subject: str, *, first: int = 0) -> Rows:
    """Parse every record once, and raise UserError for bad ones or none; `first` is added to the rows' ids."""
    if isinstance(data, Records):
        records = data
    elif not isinstance(data, str | Path):
        records = listed([*enumerate(map(dict, data))])
    elif subject in BUILTIN:
        records = _builtin(subject)
    else:
        records = read_records(subject)

    def parse(record: Record, number: int) -> tuple[Row, str | None]:
        assert isinstance(record, dict)
        others = {name: value for name, value in record.items() if name not in columns.values()}
        renamed = {new: record[old] for new, old in columns.items() if old in record}
        return _parse(others | renamed, number + first, records.base)

    facts = bytearray()
    problems = Problems()
    names: dict[str, None] = {}
    for place, (number, record) in enumerate(records.all()):
        if not isinstance(record, dict):
            if record is not None:
                problems.add(f"{records.unit} {number}: {record}")
            continue
        names |= dict.fromkeys(map(str, record))
        try:
            row, split = parse(record, number)
            known = facts_of(row, place, NO_SPLIT if split is None else SPLITS.index(split))
            facts += np.array([known], FACTS).tobytes()
        except ValueError as error:
            problems.add(f"{records.unit} {number}: {error}")
    if names:
        _check_columns(list(names), columns, subject)

    def make(place: int) -> Row:
        ((number, record),) = records.read(place, place + 1)
        return parse(record, number)[0]

    rows = Rows(make, np.frombuffer(facts, FACTS))
    _check_splits(rows.facts, first, records.unit, problems)
    problems.refuse(subject)
    if not len(rows):
        raise UserError(f"{subject}: expected at least one prompt")
    return rows


def _check_columns(names: Sequence[str], columns: Mapping[str, str], subject: str) -> None:
    """Raise UserError if no record has a prompt, or if a column of the config is missing."""
    has = f"{short_name(subject)} has {short_repr(', '.join(names), 120)}"
    for new, old in columns.items():
        if old not in names:
            raise UserError(f"data.columns.{new}: no such column, {short_repr(old)}; {has}")
    if "prompt" not in columns and "prompt" not in names:
        prompt = next((name for name in _PROMPT_COLUMNS if name in names), names[0])
        raise UserError(f'{has}, and no "prompt": say which one asks, as in --data.columns.prompt {short_name(prompt)}')


def _check_splits(facts: np.ndarray, first: int, unit: str, problems: Problems) -> None:
    """Report rows without a split beside rows with one, and prompts in two splits."""
    splits, numbers = facts["split"], facts["id"] - first
    named = np.flatnonzero(splits != NO_SPLIT)
    if not named.size:
        return
    _, once, ranks = np.unique(facts["digest"][named], return_index=True, return_inverse=True)
    before = np.arange(len(splits))
    before[named] = named[once][ranks]  # the first row of the same prompt
    for place in np.flatnonzero((splits == NO_SPLIT) | (splits != splits[before])).tolist():
        if splits[place] == NO_SPLIT:
            problems.add(f'{unit} {numbers[place]}: no "split", which other {unit}s have')
            continue
        this, other = SPLITS[splits[place]], SPLITS[splits[before[place]]]
        first_line = f"{unit} {numbers[before[place]]}"
        problems.add(f"{unit} {numbers[place]}: this {this} prompt is also a {other} prompt ({first_line})")


def _split(rows: Rows, subject: str, held_out: int | float) -> PromptSet:
    """Return the splits that the rows name, or hold some rows out."""
    splits = rows.facts["split"]
    if splits[0] == NO_SPLIT:
        places = split_places(rows.facts["digest"], held_out=held_out)
    else:
        places = tuple(np.flatnonzero(splits == split) for split in range(len(SPLITS)))
    parts = PromptSet(*map(rows.take, places))
    if not parts.train:
        raise UserError(f'{subject} has no line with "split": "train"')
    return parts
