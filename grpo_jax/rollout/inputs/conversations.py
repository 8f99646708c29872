"""What a row asks: a text, or chat messages as Hugging Face and TRL write them, with pictures among their parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.files import read_json, require_text
from grpo_jax.errors import UserError, shown
from grpo_jax.models.hf.chat import PICTURE, Fixed, Message, Part
from grpo_jax.rollout.inputs.pictures import File, Stored, source_of

ROLES = ("system", "user", "assistant")
MARK = "<image>"
"""In a prompt of plain text, the place of a picture: as often as there are pictures, or never."""
_MOST_PICTURES = 256


class Asked(NamedTuple):
    """A row's prompt: its text (of a conversation, what the user said last), pictures in order, and messages."""

    text: str
    pictures: tuple[Any, ...]
    messages: tuple[Message, ...]


def take_pictures(record: dict[str, Any], base: Path | None) -> list[Any]:
    """Takes `image` or `images` out of a record, as sources.

    Raises:
        ValueError: Saying what is wrong with them.
    """
    found = [(name, record.pop(name)) for name in ("image", "images") if name in record]
    found = [(name, value) for name, value in found if value is not None]
    if len(found) > 1:
        raise ValueError('it has "image" and "images": keep one of them')
    if not found:
        return []
    name, value = found[0]
    several = isinstance(value, list | tuple) and not isinstance(value, File | Stored)
    values = list(value) if several else [value]
    if len(values) > _MOST_PICTURES:
        raise ValueError(f'"{name}" holds {len(values)} pictures; a prompt takes {_MOST_PICTURES} at most')
    sources = []
    for place, one in enumerate(values):
        try:
            sources.append(source_of(one, base))
        except ValueError as error:
            raise ValueError(f'"{name}"{f" {place + 1}" if several else ""}: {error}') from error
    return sources


def read_prompt(value: Any, pictures: Sequence[Any], base: Path | None) -> Asked:
    """What a row's `prompt` asks, with the pictures of its column.

    Args:
        value: Text, or a list of messages {"role": …, "content": text or parts}.
        pictures: Sources; they take the places that parts {"type": "image"} without one of their own keep, or stand
            before the first text of the user.
        base: The folder that paths are relative to.

    Raises:
        ValueError: Saying what is wrong with it.
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError('"prompt" is empty')
        require_text(value)
        count = value.count(MARK)
        if pictures and count not in (0, len(pictures)):
            raise ValueError(f'"prompt" has {MARK} {count} times, and there are {len(pictures)} pictures')
        return Asked(value.strip(), tuple(pictures), ())
    if not isinstance(value, list | tuple):
        raise ValueError(f'"prompt" must be text or a list of messages, got {type(value).__name__}')
    if not value:
        raise ValueError('"prompt" is empty')
    return _conversation(value, list(pictures), base)


def _conversation(value: Sequence[Any], column: list[Any], base: Path | None) -> Asked:
    messages: list[tuple[str, list[Any]]] = []
    for number, message in enumerate(value):
        where = f'"prompt", message {number + 1}'
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise ValueError(
                f'{where}: expected {{"role": {" | ".join(ROLES)}, "content": …}}, got {shown(message, 40)}'
            )
        try:
            messages.append((message["role"], _parts(message.get("content"), base)))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if messages[-1][0] != "user":
        raise ValueError('"prompt": the last message must be the user\'s, which the policy answers')
    _fill(messages, column)
    pictures = tuple(part.source for _, parts in messages for part in parts if isinstance(part, _Shown))
    said = tuple(
        Message(role, tuple(PICTURE if isinstance(part, _Shown) else part for part in parts))
        for role, parts in messages
    )
    spoken = [message.text.strip() for message in reversed(said) if message.role == "user"]
    return Asked(next(filter(None, spoken), "(a picture)"), pictures, said)


class _Shown(NamedTuple):
    """A picture among the parts of a message; its source is None where the row's column has it."""

    source: Any


def _fill(messages: list[tuple[str, list[Any]]], column: list[Any]) -> None:
    """Puts the pictures of the row's column into the places that are kept for them."""
    places = [
        (parts, at)
        for _, parts in messages
        for at, part in enumerate(parts)
        if isinstance(part, _Shown) and part.source is None
    ]
    if not places and column:
        first = next(parts for role, parts in messages if role == "user")
        first[:0] = [_Shown(source) for source in column]
        return
    if len(places) != len(column):
        raise ValueError(f'"prompt" keeps {len(places)} places for pictures, and there are {len(column)}')
    for (parts, at), source in zip(places, column, strict=True):
        parts[at] = _Shown(source)


def _parts(content: Any, base: Path | None) -> list[Any]:
    if isinstance(content, str):
        require_text(content)
        return [content]
    if not isinstance(content, list | tuple):
        raise ValueError(f"content must be text or a list of parts, got {type(content).__name__}")
    return [_part(part, base) for part in content]


def _part(part: Any, base: Path | None) -> Any:
    if isinstance(part, str):
        require_text(part)
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise ValueError(f'a part of type "text" holds no text, got {shown(text, 40)}')
        require_text(text)
        return text
    if kind not in ("image", "image_url"):
        raise ValueError(f'a part must be of type "text" or "image", got {shown(kind or part, 40)}')
    held = ("image", "image_url", "base64", "url", "path")
    source = next((part[name] for name in held if part.get(name) is not None), None)
    return _Shown(None if source is None else source_of(source, base))


# ------------------------------------------------------------------------------------------------- to be encoded


def messages_of(row: Any, instruction: str = "", system: str = "") -> tuple[Message, ...]:
    """What a row asks as messages: its own, or the user's one with pictures, instruction and prompt.

    Args:
        row: A `Row`.
        instruction: Says {prompt} where the prompt goes; "" for the prompt alone.
        system: What is said before, unless the row's own messages begin with a system message; "" for nothing.

    Raises:
        ValueError: There is an instruction, and the row has messages.
    """
    before_all = (Message("system", (Fixed(system),)),) if system else ()
    if row.messages:
        if instruction:
            raise ValueError("it is a conversation, which has its own words: leave data.instruction empty")
        return row.messages if row.messages[0].role == "system" else (*before_all, *row.messages)
    marked = row.pictures and row.prompt.count(MARK) == len(row.pictures)
    prompt: list[Part] = _between(row.prompt.split(MARK), PICTURE) if marked else [row.prompt]
    before: list[Part] = [] if marked else [PICTURE] * len(row.pictures)
    if not instruction:
        return (*before_all, Message("user", (*before, *prompt)))
    pieces = [[Fixed(piece)] if piece else [] for piece in instruction.split("{prompt}")]
    if marked and len(pieces) > 2:
        raise ValueError(
            f"its pictures stand where it says {MARK}, and data.instruction says {{prompt}} more than once"
        )
    parts = pieces[0]
    for piece in pieces[1:]:
        parts = [*parts, *prompt, *piece]
    return (*before_all, Message("user", (*before, *parts)))


def tools_of(row: Any, column: str) -> str:
    """What a row's policy may call, its column of JSON schemas as JSON text; "" where it has none.

    Raises:
        UserError: It holds something else.
    """
    tools = row.columns.get(column)
    if isinstance(tools, str) and tools:
        try:
            tools = read_json(tools)
        except ValueError as error:
            raise UserError(f"row {row.id}, data.tools: column {column!r}: {error}") from error
    if not tools:
        return ""
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(
            f"row {row.id}, data.tools: column {column!r} must hold a list of JSON schemas, got {shown(tools, 40)}"
        )
    return json.dumps(_without_none([*tools]))


def _without_none(value: Any) -> Any:
    """Without what a table fills in where other rows' objects have a key."""
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list | tuple) else value


def _between(texts: Sequence[str], part: Part) -> list[Part]:
    parts: list[Part] = []
    for number, text in enumerate(texts):
        parts += [*([part] if number else []), *([text] if text else [])]
    return parts


def as_sent(row: Any) -> list[dict[str, Any]]:
    """A row's messages as chat messages, a picture being {"type": "image"}."""
    sent = []
    for message in messages_of(row):
        parts = [{"type": "image"} if part is PICTURE else {"type": "text", "text": part} for part in message.parts]
        sent.append({"role": message.role, "content": parts if PICTURE in message.parts else message.text})
    return sent
