"""Prompts to what a policy reads: tokens of one width, and the pictures that stand among them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config.files import read_json
from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError, shown
from grpo_jax.models.hf.chat import (
    PICTURE,
    Fixed,
    Message,
    Part,
    conversation_encoder,
    default_system_prompt,
    knows_option,
    picture_tokens,
)
from grpo_jax.models.hf.image_processor import PictureSettings, make_prepare, read_settings
from grpo_jax.models.vision.pictures import Picture, pack_rows
from grpo_jax.rollout.data import PICTURE_MARK, Row, row_sizes
from grpo_jax.rollout.pictures import picture_error, read_rgb, size_of
from grpo_jax.sampling.sampler import bucket_size

TokensOf = Callable[[Row, Sequence[int]], list[int]]
"""(row, tokens of each of its pictures) → the tokens that its completions start from."""
_LONGEST, _MARGIN = 4096, 8
_COMPARED = 256
"""Prompts whose tokens are compared: where a tokenizer or a template loses them, it loses all."""


class Encoded(NamedTuple):
    """Prompts as a policy reads them, on the host.

    Attributes:
        tokens: i32 [P, L], left-padded; a picture stands in them as its placeholders.
        mask: bool [P, L].
        pictures: `Pictures` [P, I, ..], or None where the data set has none.
    """

    tokens: np.ndarray
    mask: np.ndarray
    pictures: Any = None


class Eyes(NamedTuple):
    """What prepares pictures for a policy.

    Attributes:
        vision: Its tower's config.
        settings: Of its folder.
        prepare: Pictures of Pillow → patches and grids.
    """

    vision: Any
    settings: PictureSettings
    prepare: Callable[[Sequence[Any]], list[Picture]]


def load_eyes(folder: Path, vision: Any, size: int | None) -> Eyes:
    """What prepares pictures as the processor of a policy's folder does.

    Args:
        folder: The policy's.
        vision: Its tower's config.
        size: data.picture_size.

    Raises:
        UserError: As `read_settings` and `make_prepare`.
    """
    settings = read_settings(folder, vision, size)
    return Eyes(vision, settings, make_prepare(folder, settings))


def make_encode(
    tokenizer: Any,
    section: DataSection,
    *,
    pad_id: int,
    vocab_size: int | None = None,
    rows: Sequence[Row] = (),
    eyes: Callable[[], Eyes] | None = None,
    context_length: int | None = None,
    completion_tokens: int = 0,
) -> Callable[[Sequence[Row]], Encoded]:
    """encode(rows) → `Encoded`.

    What the user wrote is text, whatever it says: marks of the tokenizer, and places of pictures, come from template
    and instruction alone.

    Args:
        tokenizer: The policy's.
        section: Form, instruction, and the most tokens of a prompt, its pictures' included.
        pad_id: Fills up on the left.
        vocab_size: V, the model's; a token beyond it is refused.
        rows: Rows whose longest sets L, and whose pictures set the sizes, so that all batches have few shapes. Of more
            than 4096 without pictures those are looked at that have the most text, and all that could be too long; a
            batch with a longer one than they are is wider.
        eyes: Of a policy that sees; asked for where a row has pictures.
        context_length: The most tokens of a prompt with its completion (max_position_embeddings); None for any number.
        completion_tokens: The most tokens behind a prompt.

    Raises:
        UserError: A prompt is longer than data.max_prompt_tokens, or than the context leaves room for; the prompts
            leave no tokens, or all the same; a picture cannot be used, or as `conversation_encoder`.
    """
    sizes = row_sizes(rows)
    some = bool(sizes["pictures"].any())
    if some and eyes is None:
        raise UserError(_BLIND)
    seeing = eyes() if some and eyes is not None else None
    tokens_of = _tokens_of(tokenizer, section, None if seeing is None else seeing.vision, vocab_size)

    def checked(row: Row, grids: Sequence[tuple[int, int]]) -> list[int]:
        if row.pictures and seeing is None:
            raise UserError(_BLIND)
        lengths = [h * w // seeing.vision.merged for h, w in grids] if seeing is not None else []
        ids = tokens_of(row, lengths)
        if len(ids) > section.max_prompt_tokens:
            pictures, limit = f", {sum(lengths)} of them for pictures" if lengths else "", section.max_prompt_tokens
            raise UserError(
                f"prompt {shown(row.prompt)} takes {len(ids)} tokens with its instruction{pictures}; "
                f"data.max_prompt_tokens is {limit}: shorten it or raise the limit"
                + (" (or lower data.picture_size)" if lengths else "")
            )
        # The tokens of a picture share positions, as many as its longer side has.
        shared = [h * w // seeing.vision.merged - max(h, w) // seeing.vision.merge for h, w in grids] if seeing else []
        positions = len(ids) - sum(shared) + completion_tokens
        if context_length is not None and positions > context_length:
            raise UserError(
                f"prompt {shown(row.prompt)} takes {len(ids)} tokens, and what is written behind it up to "
                f"{completion_tokens}: {positions} positions, and the policy has {context_length} "
                "(max_position_embeddings in its config.json): lower sampling.max_new_tokens or shorten the prompt"
            )
        return ids

    longest, slots, patches = 1, 0, 0
    first: list[tuple[Row, list[int]]] = []
    for place in _measured(sizes, tokens_of, section):
        row = rows[place]
        grids = [] if seeing is None else _grids(row, seeing.settings)
        ids = checked(row, grids)
        if len(first) < _COMPARED:
            first.append((row, ids))
        longest, slots = max(longest, len(ids)), max(slots, len(grids))
        patches = max([patches, *(h * w for h, w in grids)])
    _require_told_apart(tokenizer, first, tokens_of)

    def encode(rows: Sequence[Row]) -> Encoded:
        prepared = [[] for _ in rows] if seeing is None else prepare_rows(rows, seeing)
        ids = [checked(row, [picture.grid for picture in own]) for row, own in zip(rows, prepared, strict=True)]
        tokens, mask = pad_left(ids, bucket_size(max(longest, *map(len, ids)), smallest=8), pad_id)
        if seeing is None:
            return Encoded(tokens, mask)
        return Encoded(tokens, mask, pack_rows(prepared, seeing.vision, slots=slots, patches=patches))

    return encode


def _require_told_apart(tokenizer: Any, encoded: Sequence[tuple[Row, list[int]]], tokens_of: TokensOf) -> None:
    """Refuses a tokenizer or a chat template that loses the prompts: a policy would learn from nothing.

    Prompts are lost where different ones all become the same tokens (a template that ignores them, a tokenizer without
    words), or one the same tokens as no prompt at all (a normaliser that deletes its characters). Prompts that differ
    in case, spaces or Unicode's forms alone may become the same.

    Args:
        tokenizer: The policy's.
        encoded: Rows, and the tokens that their completions start from.
        tokens_of: Gives these tokens.

    Raises:
        UserError: Naming prompts.
    """
    where = f"the tokenizer in {getattr(tokenizer, 'name_or_path', '') or 'the policy folder'}, or its chat template,"
    mend = "copy the model's tokenizer files (tokenizer.json, chat_template.jinja) again"
    different = {_plain(row): row.prompt for row, _ in encoded}
    if len(different) > 1 and len({tuple(ids) for _, ids in encoded}) == 1:
        one, other = map(shown, list(different.values())[:2])
        raise UserError(
            f"{where} makes the same {len(encoded[0][1])} tokens of all prompts, of {one} as of {other}: {mend}"
        )
    plain = [(row, ids) for row, ids in encoded if row.prompt.strip() and not (row.messages or row.pictures)]
    if not plain:
        return
    try:
        nothing = tokens_of(dataclasses.replace(plain[0][0], prompt=""), [])
    except UserError:  # no tokens without a prompt: none is lost
        return
    for row, ids in plain:
        if ids == nothing:
            raise UserError(
                f"{where} makes no token of the prompt {shown(row.prompt)}: {mend}, or leave the prompt out"
            )


def _plain(row: Row) -> str:
    """What a row says, without case, spaces and Unicode's forms."""
    said = [row.prompt, *(message.text for message in row.messages)]
    return " ".join(unicodedata.normalize("NFKC", " ".join(said)).casefold().split())


def _measured(sizes: np.ndarray, tokens_of: TokensOf, section: DataSection) -> Sequence[int]:
    """The places of rows that are encoded beforehand: no tokenizer makes more tokens of a text than it has bytes."""
    count = len(sizes)
    if count <= _LONGEST or isinstance(section.tools, str):  # a column's tools are no part of the text
        return range(count)
    try:
        frame = len(tokens_of(Row(0, "x"), [])) + _MARGIN
    except UserError:  # a template that takes no prompt by itself
        frame = section.max_prompt_tokens
    repeats = max(1, section.instruction.count("{prompt}"))
    most = sizes["text_bytes"] * repeats + frame * np.maximum(sizes["messages"], 1)
    looked_at = (most > section.max_prompt_tokens) | (sizes["pictures"] > 0)
    looked_at[np.argsort(-sizes["text_bytes"], kind="stable")[:_LONGEST]] = True
    return np.flatnonzero(looked_at).tolist()


def _tokens_of(tokenizer: Any, section: DataSection, vision: Any, vocab_size: int | None) -> TokensOf:
    """tokens_of(row, tokens of each of its pictures) → the tokens that its completions start from.

    In the form "append" the prompt itself is continued. Otherwise it goes through the tokenizer's chat template, with
    the answer left open; a tokenizer without one gets the instruction as plain text.
    """
    instruction = "" if section.form == "append" else section.instruction
    if instruction and "{prompt}" not in instruction:
        raise UserError("data.instruction must contain {prompt}, the place of the user's prompt")
    _check_options(tokenizer, section)

    def encoder(tools: str) -> Callable[[Sequence[Message], Sequence[int]], list[int]]:
        return conversation_encoder(
            tokenizer,
            chat=_chats(tokenizer, section),
            tokens=None if vision is None else picture_tokens(vision),
            vocab_size=vocab_size,
            **section.template_options,
            **({"tools": json.loads(tools)} if tools else {}),
        )

    known = functools.lru_cache(maxsize=64)(encoder)

    def tokens_of(row: Row, lengths: Sequence[int]) -> list[int]:
        tools = tools_of(row, section.tools) if isinstance(section.tools, str) else ""
        return known(tools)(_messages(row, instruction, section.system_prompt), lengths)

    return tokens_of


def _check_options(tokenizer: Any, section: DataSection) -> None:
    """Refuses what the chat template would pass over: jinja says nothing of a name that a template has not.

    Raises:
        UserError: Naming the option.
    """
    given = {f"data.chat_template_options.{name}": name for name in section.chat_template_options}
    given |= {"data.tools": "tools"} if section.tools else {}
    for field, name in given.items():
        if not _chats(tokenizer, section):
            raise UserError(f"{field}: expected nothing, the policy's tokenizer has no chat template")
        if not knows_option(tokenizer, name):
            raise UserError(
                f"{field}: the policy's chat template knows no {name!r}, and would pass it over: leave it out"
            )


def _chats(tokenizer: Any, section: DataSection) -> bool:
    """Whether prompts go through a chat template."""
    return section.form != "append" and bool(getattr(tokenizer, "chat_template", None))


def check_tools(section: DataSection, rows: Sequence[Row]) -> None:
    """Refuses a name of data.tools that is no column of any row."""
    column = section.tools
    if isinstance(column, str) and column and not any(column in row.columns for row in rows):
        raise UserError(f"data.tools: expected a list of JSON schemas or a column of the data, got {shown(column)}")


def tell_system_prompt(
    tokenizer: Any, section: DataSection, rows: Sequence[Row], say: Callable[[str, str], None]
) -> None:
    """Says what the chat template tells the policy before prompts that nobody gave a system prompt.

    And that it has no switch for thinking, where that is switched on.
    """
    if not _chats(tokenizer, section):
        return
    if section.enable_thinking and not knows_option(tokenizer, "enable_thinking"):
        say("template", "has no switch for thinking: data.enable_thinking changes nothing")
    if section.system_prompt or row_sizes(rows)["has_system"].all():
        return
    told = default_system_prompt(tokenizer, **section.template_options)
    if told:
        say("template", f"tells the policy {shown(told, 100)} before each prompt; data.system_prompt replaces it")


def format_prompt(
    tokenizer: Any, prompt: str, *, form: str = "rewrite", instruction: str = "", vocab_size: int | None = None
) -> list[int]:
    """The tokens that a completion of a prompt of plain text starts from, as `make_encode` has them.

    Raises:
        UserError: A non-empty instruction does not say where the prompt goes, or as `conversation_encoder`.
    """
    section = DataSection(form=form, instruction=instruction)  # type: ignore[arg-type]
    return _tokens_of(tokenizer, section, None, vocab_size)(Row(0, prompt), [])


_BLIND = "the prompts hold pictures, and the policy has no vision tower: choose a Qwen-VL folder, or take them out"


def _messages(row: Row, instruction: str, system: str) -> tuple[Message, ...]:
    try:
        messages = messages_of(row, instruction, system)
    except ValueError as error:
        raise UserError(f"row {row.id}: {error}") from error
    shows = sum(message.parts.count(PICTURE) for message in messages)
    if shows != len(row.pictures):
        raise UserError(f"row {row.id}: its messages show {shows} pictures, and it has {len(row.pictures)}")
    return messages


def _grids(row: Row, settings: PictureSettings) -> list[tuple[int, int]]:
    grids = []
    for place, source in enumerate(row.pictures):
        try:
            grids.append(settings.grid(*size_of(source)))
        except ValueError as error:
            raise picture_error(row, place, error) from error
    return grids


def prepare_rows(rows: Sequence[Row], eyes: Eyes) -> list[list[Picture]]:
    """The patches of each row's pictures; one that stands in several rows is prepared once.

    Raises:
        UserError: One cannot be used.
    """
    opened: dict[int, Any] = {}
    for row in rows:
        for place, source in enumerate(row.pictures):
            if id(source) in opened:
                continue
            try:
                opened[id(source)] = read_rgb(source)
            except ValueError as error:
                raise picture_error(row, place, error) from error
    made = dict(zip(opened, eyes.prepare(list(opened.values())), strict=True))
    return [[made[id(source)] for source in row.pictures] for row in rows]


def pad_left(encoded: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Token lists of different lengths as one array: i32[P, width] and its mask bool[P, width].

    Raises:
        ValueError: If a list is longer than `width`.
    """
    array = np.full((len(encoded), width), pad_id, np.int32)
    mask = np.zeros((len(encoded), width), bool)
    for i, tokens in enumerate(encoded):
        if len(tokens) > width:
            raise ValueError(f"width must be at least the longest prompt's {len(tokens)} tokens, got {width}")
        array[i, width - len(tokens) :] = tokens
        mask[i, width - len(tokens) :] = True
    return array, mask


def plain_rows(prompts: Iterable[str]) -> list[Row]:
    """Prompts of plain text as rows."""
    return [Row(place, prompt) for place, prompt in enumerate(prompts)]


# ------------------------------------------------------------------------------------------------ conversations


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
    marked = bool(row.pictures) and row.prompt.count(PICTURE_MARK) == len(row.pictures)
    prompt: list[Part] = [row.prompt]
    if marked:
        if instruction.count("{prompt}") > 1:
            raise ValueError(
                f"its pictures stand where it says {PICTURE_MARK}, and data.instruction says {{prompt}} more than once"
            )
        prompt = [
            PICTURE if piece == PICTURE_MARK else piece for piece in re.split(f"({PICTURE_MARK})", row.prompt) if piece
        ]
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
