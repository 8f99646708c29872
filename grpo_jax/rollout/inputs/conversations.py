"""A row's prompt: a text, or chat messages as Hugging Face and TRL write them, with pictures among their parts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_jax.config.files import read_json, require_text
from grpo_jax.errors import UserError, shown
from grpo_jax.models.hf.chat import PICTURE, Fixed, Message, Part
from grpo_jax.rollout.inputs.pictures import File, Source, source_of

if TYPE_CHECKING:
    from grpo_jax.rollout.data import Row

ROLES = ("system", "user", "assistant")
MARK = "<image>"
"""In a prompt of plain text, the place of a picture: as often as there are pictures, or never."""
_MOST_PICTURES = 256
_PICTURE_KEYS = ("image", "image_url", "base64", "url", "path")


class Prompt(NamedTuple):
    """A row's prompt: its text (of a conversation, what the user said last), pictures in order, and messages."""

    text: str
    pictures: tuple[Source, ...]
    messages: tuple[Message, ...]


class _Picture(NamedTuple):
    """A picture among the parts of a message; its source is None where the row's column has it."""

    source: Source | None


def take_pictures(record: dict[str, Any], base: Path | None) -> list[Source]:
    """Take `image` or `images` out of a record, as sources.

    Raises:
        ValueError: Saying what is wrong with them.
    """
    columns = {name: record.pop(name) for name in ("image", "images") if name in record}
    columns = {name: value for name, value in columns.items() if value is not None}
    if len(columns) > 1:
        raise ValueError('it has "image" and "images": keep one of them')
    sources = []
    for name, value in columns.items():
        several = isinstance(value, list | tuple) and not isinstance(value, File)
        values = list(value) if several else [value]
        if len(values) > _MOST_PICTURES:
            raise ValueError(f'"{name}" holds {len(values)} pictures; a prompt takes {_MOST_PICTURES} at most')
        for number, picture in enumerate(values, 1):
            try:
                sources.append(source_of(picture, base))
            except ValueError as error:
                raise ValueError(f'"{name}"{f" {number}" if several else ""}: {error}') from error
    return sources


def read_prompt(value: Any, pictures: Sequence[Source], base: Path | None) -> Prompt:
    """Read a row's `prompt`, with the pictures of its column.

    Args:
        value: Text, or a list of messages {"role": …, "content": text or parts}.
        pictures: They take the places that parts {"type": "image"} without one of their own keep, or stand before the
            first text of the user.
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


def _read_message(number: int, message: Any, base: Path | None) -> tuple[str, list[str | _Picture]]:
    where = f'"prompt", message {number}'
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        expected = f'{{"role": {" | ".join(ROLES)}, "content": …}}'
        raise ValueError(f"{where}: expected {expected}, got {shown(message, 40)}")
    content = message.get("content")
    if not isinstance(content, str | list | tuple):
        raise ValueError(f"{where}: content must be text or a list of parts, got {type(content).__name__}")
    parts = [content] if isinstance(content, str) else content
    try:
        return message["role"], [_read_part(part, base) for part in parts]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read_part(part: Any, base: Path | None) -> str | _Picture:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" or isinstance(part, str):
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str):
            raise ValueError(f'a part of type "text" holds no text, got {shown(text, 40)}')
        require_text(text)
        return text
    if kind not in ("image", "image_url"):
        raise ValueError(f'a part must be of type "text" or "image", got {shown(kind or part, 40)}')
    picture = next((part[name] for name in _PICTURE_KEYS if part.get(name) is not None), None)
    return _Picture(None if picture is None else source_of(picture, base))


def _place_pictures(messages: Sequence[tuple[str, list[str | _Picture]]], column: Sequence[Source]) -> None:
    """Put the pictures of the row's column into the places that are kept for them."""
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


# ------------------------------------------------------------------------------------------------- to be encoded


def messages_of(row: Row, instruction: str = "", system: str = "") -> tuple[Message, ...]:
    """Return what a row asks as messages: its own, or the user's one with pictures, instruction and prompt.

    Args:
        row: Of the data.
        instruction: Says {prompt} where the prompt goes; "" for the prompt alone.
        system: What is said before, unless the row's own messages begin with a system message; "" for nothing.

    Raises:
        ValueError: There is an instruction, and the row has messages.
    """
    before = (Message("system", (Fixed(system),)),) if system else ()
    if row.messages:
        if instruction:
            raise ValueError("it is a conversation, which has its own words: leave data.instruction empty")
        return row.messages if row.messages[0].role == "system" else (*before, *row.messages)
    marked = bool(row.pictures) and row.prompt.count(MARK) == len(row.pictures)
    prompt: list[Part] = [row.prompt]
    if marked:
        if instruction.count("{prompt}") > 1:
            raise ValueError(
                f"its pictures stand where it says {MARK}, and data.instruction says {{prompt}} more than once"
            )
        prompt = [PICTURE if piece == MARK else piece for piece in re.split(f"({MARK})", row.prompt) if piece]
    parts: list[Part] = [] if marked else [PICTURE] * len(row.pictures)
    for piece in re.split(r"(\{prompt\})", instruction or "{prompt}"):
        if piece == "{prompt}":
            parts += prompt
        elif piece:
            parts.append(Fixed(piece))
    return (*before, Message("user", tuple(parts)))


def tools_of(row: Row, column: str) -> str:
    """Return what a row's policy may call, its column of JSON schemas as JSON text; "" where it has none.

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
    """Drop what a table fills in where other rows' objects have a key."""
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list | tuple) else value


def as_chat_messages(row: Row) -> list[dict[str, Any]]:
    """Return a row's messages as chat messages, a picture being {"type": "image"}."""
    chat = []
    for message in messages_of(row):
        parts = [{"type": "image"} if part is PICTURE else {"type": "text", "text": part} for part in message.parts]
        chat.append({"role": message.role, "content": parts if PICTURE in message.parts else message.text})
    return chat
