"""Encode prompts for a policy: messages through the chat template to tokens of one width, pictures among them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grpo_jax.config.sections import TODAY, DataSection
from grpo_jax.errors import UserError, short_repr
from grpo_jax.models.hf.chat import (
    PICTURE,
    Fixed,
    Message,
    Part,
    conversation_encoder,
    knows_option,
    picture_tokens,
)
from grpo_jax.models.hf.image_processor import PictureSettings, make_preparer, read_settings
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Picture, Pictures, PictureStates, pack_rows
from grpo_jax.rollout.data import PICTURE_MARK, Row, map_pictures, row_sizes
from grpo_jax.rollout.pictures import Source, read_rgb, size_of
from grpo_jax.rollout.tools import template_options
from grpo_jax.sampling.sampler import bucket_size

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

TokensOf = Callable[[Row, Sequence[int]], list[int]]
"""(row, tokens of each of its pictures) → the prompt's tokens."""
PictureInput = Pictures | PictureStates
"""Pictures as the update takes them: their states where the vision tower is frozen, else to be encoded again."""
_LONGEST = 4096
"""Rows that are encoded beforehand, at most, unless they could be too long."""
_TEMPLATE_MARGIN = 8
_BYTES_PER_TOKEN = 100  # more than texts have, even those of spaces
_COMPARED = 256
"""Prompts whose tokens are compared: a tokenizer or a template that loses prompts loses all of them."""


class Encoded(NamedTuple):
    """Prompts as token ids, on the host: i32 [P, L], left-padded, and their mask bool [P, L].

    A picture stands among the tokens as its placeholders; `pictures` [P, I, ..] is None where the data set has none.
    """

    tokens: np.ndarray
    mask: np.ndarray
    pictures: Pictures | None = None


class ImageProcessor(NamedTuple):
    """The image processor of a policy's folder: pictures of Pillow → patches and grids."""

    vision: VisionConfig
    settings: PictureSettings
    prepare: Callable[[Sequence[Image]], list[Picture]]


def load_image_processor(folder: Path, vision: VisionConfig, size: int | None) -> ImageProcessor:
    """Load it; `size` is data.picture_size."""
    settings = read_settings(folder, vision, size)
    return ImageProcessor(vision, settings, make_preparer(folder, settings))


def make_encode(
    tokenizer: PreTrainedTokenizerBase,
    section: DataSection,
    *,
    pad_id: int,
    vocab_size: int | None = None,
    rows: Sequence[Row] = (),
    image_processor: Callable[[], ImageProcessor] | None = None,
    context_length: int | None = None,
    completion_tokens: int = 0,
) -> Callable[[Sequence[Row]], Encoded]:
    """Make encode(rows) → `Encoded`.

    The user's text stays text: marks of the tokenizer, and places of pictures, come from template and instruction
    alone. UserError for a prompt that is too long, prompts without tokens or all the same, or a picture that cannot
    be used.

    Args:
        section: Form, instruction, and the most tokens of a prompt, its pictures' included.
        pad_id: Fills up on the left.
        vocab_size: V, the model's; a token beyond it is refused.
        rows: Rows whose longest sets L, and whose pictures set the sizes, so that all batches have few shapes. Of
            more than 4096 without pictures only those with the most text, and all that could be too long, are encoded
            beforehand; a batch with a longer one is wider.
        image_processor: Called where a row has pictures.
        context_length: The most tokens of a prompt with its completion (max_position_embeddings).
        completion_tokens: The most tokens behind a prompt.
    """
    sizes = row_sizes(rows)
    processor = image_processor() if image_processor is not None and sizes["pictures"].any() else None
    vision = None if processor is None else processor.vision
    tokens_of = _make_tokens_of(tokenizer, section, vision, vocab_size)

    def tokens_within_limits(row: Row, grids: Sequence[tuple[int, int]]) -> list[int]:
        if row.pictures and vision is None:
            raise UserError("the prompts hold pictures, and the policy has no vision tower: choose a Qwen-VL folder")
        lengths = [] if vision is None else [height * width // vision.merged for height, width in grids]
        size = int(row_sizes([row])["text_bytes"][0])
        if size > _BYTES_PER_TOKEN * section.max_prompt_tokens:  # before it is encoded, which takes seconds a megabyte
            raise UserError(
                f"prompt {short_repr(row.prompt)} has {size:,} bytes, too many for data.max_prompt_tokens "
                f"({section.max_prompt_tokens}): shorten it or raise the limit"
            )
        ids = tokens_of(row, lengths)
        prompt = f"prompt {short_repr(row.prompt)} takes {len(ids)} tokens"
        if len(ids) > section.max_prompt_tokens:
            pictures = f", {sum(lengths)} of them for pictures" if lengths else ""
            smaller = " (or lower data.picture_size)" if lengths else ""
            raise UserError(
                f"{prompt} with its instruction{pictures}; data.max_prompt_tokens is {section.max_prompt_tokens}: "
                f"shorten it or raise the limit{smaller}"
            )
        positions = len(ids) + completion_tokens
        if vision is not None:  # the tokens of a picture share positions, as many as its longer side has
            positions += sum(max(grid) // vision.merge for grid in grids) - sum(lengths)
        if context_length is not None and positions > context_length:
            raise UserError(
                f"{prompt}, and what is written behind it up to {completion_tokens}: {positions} positions, and the "
                f"policy has {context_length} (max_position_embeddings in its config.json): lower "
                "sampling.max_new_tokens or shorten the prompt"
            )
        return ids

    longest, slots, patches = 1, 0, 0
    compared: dict[str, list[int]] = {}
    for place in _measured(sizes, tokens_of, section):
        row = rows[place]
        grids = []
        if processor is not None:
            grids = map_pictures(row, lambda source: processor.settings.grid(*size_of(source)))
        ids = tokens_within_limits(row, grids)
        if len(compared) < _COMPARED:
            compared[" ".join([row.prompt, *(message.text for message in row.messages)])] = ids
        longest, slots = max(longest, len(ids)), max(slots, len(grids))
        patches = max([patches, *(height * width for height, width in grids)])
    if len(compared) > 1 and len(set(map(tuple, compared.values()))) == 1:  # a policy would learn nothing
        one, other = map(short_repr, [*compared][:2])
        raise UserError(
            f"the tokenizer in {getattr(tokenizer, 'name_or_path', '') or 'the policy folder'}, or its chat template, "
            f"makes the same {longest} tokens of all prompts, of {one} as of {other}: copy the model's tokenizer files "
            "(tokenizer.json, chat_template.jinja) again"
        )

    def encode(rows: Sequence[Row]) -> Encoded:
        prepared: list[list[Picture]] = [[] for _ in rows] if processor is None else prepare_rows(rows, processor)
        ids = [
            tokens_within_limits(row, [picture.grid for picture in pictures])
            for row, pictures in zip(rows, prepared, strict=True)
        ]
        pictures = None if vision is None else pack_rows(prepared, vision, slots=slots, patches=patches)
        width = bucket_size(max(longest, *map(len, ids)), smallest=8)
        return Encoded(*pad_left(ids, width, pad_id), pictures)

    return encode


def _measured(sizes: np.ndarray, tokens_of: TokensOf, section: DataSection) -> Sequence[int]:
    """Choose the rows that are encoded beforehand: no tokenizer makes more tokens of a text than it has bytes."""
    if len(sizes) <= _LONGEST:
        return range(len(sizes))
    try:
        template = len(tokens_of(Row(0, "x"), [])) + _TEMPLATE_MARGIN
    except UserError:  # a template that takes no prompt by itself
        template = section.max_prompt_tokens
    repeats = max(1, section.instruction.count("{prompt}"))
    most = sizes["text_bytes"] * repeats + template * np.maximum(sizes["messages"], 1)
    measured = (most > section.max_prompt_tokens) | (sizes["pictures"] > 0)
    measured[np.argsort(-sizes["text_bytes"], kind="stable")[:_LONGEST]] = True
    return np.flatnonzero(measured).tolist()


def prepare_rows(rows: Sequence[Row], processor: ImageProcessor) -> list[list[Picture]]:
    """Return the patches of each row's pictures; a picture of several rows is prepared once."""
    opened: dict[int, Image] = {}

    def open_once(source: Source) -> None:
        if id(source) not in opened:
            opened[id(source)] = read_rgb(source)

    for row in rows:
        map_pictures(row, open_once)
    prepared = dict(zip(opened, processor.prepare(list(opened.values())), strict=True))
    return [[prepared[id(source)] for source in row.pictures] for row in rows]


def pad_left(encoded: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token lists as one array i32 [P, width] and its mask bool [P, width]; none is longer."""
    mask = np.arange(width) >= width - np.array([len(tokens) for tokens in encoded])[:, None]
    array = np.full(mask.shape, pad_id, np.int32)
    array[mask] = [*itertools.chain.from_iterable(encoded)]
    return array, mask


def _make_tokens_of(
    tokenizer: PreTrainedTokenizerBase, section: DataSection, vision: VisionConfig | None, vocab_size: int | None
) -> TokensOf:
    """Make tokens_of(row, tokens of each of its pictures).

    The form "append" continues the prompt itself. Otherwise it goes through the tokenizer's chat template, with the
    answer left open; a tokenizer without one gets the instruction as plain text. UserError for an option that the
    template would pass over: jinja ignores a name that a template does not use.
    """
    chat = section.form != "append" and bool(getattr(tokenizer, "chat_template", None))
    called = {TODAY: "strftime_now"}
    options = {f"data.chat_template_options.{name}": called.get(name, name) for name in section.chat_template_options}
    options |= {"data.tools": "tools"} if section.tools else {}
    for field, name in options.items():
        if not (chat and knows_option(tokenizer, name)):
            raise UserError(f"{field}: the policy has no chat template that knows {name!r}: leave it out")
    encode = conversation_encoder(
        tokenizer,
        chat=chat,
        tokens=None if vision is None else picture_tokens(vision),
        vocab_size=vocab_size,
        **template_options(section),
    )
    instruction = "" if section.form == "append" else section.instruction
    return lambda row, lengths: encode(messages_of(row, instruction, section.system_prompt), lengths)


def messages_of(row: Row, instruction: str = "", system: str = "") -> tuple[Message, ...]:
    """Return a row's messages, or its pictures, instruction and prompt as one of the user, behind a system message.

    The instruction says {prompt} where the prompt goes; a row with a form of its own excludes it (UserError). The
    system message is added unless the row begins with one.
    """
    before = (Message("system", (Fixed(system),)),) if system else ()
    if row.messages:
        if instruction:
            raise UserError(f"row {row.id} is a conversation, which has its own words: leave data.instruction empty")
        return row.messages if row.messages[0].role == "system" else (*before, *row.messages)
    parts: list[Part] = [PICTURE] * len(row.pictures)
    prompt: list[Part] = [row.prompt]
    if row.pictures and row.prompt.count(PICTURE_MARK) == len(row.pictures) and instruction.count("{prompt}") <= 1:
        pieces = re.split(f"({PICTURE_MARK})", row.prompt)
        prompt = [PICTURE if piece == PICTURE_MARK else piece for piece in pieces if piece]
        parts = []
    for piece in re.split(r"(\{prompt\})", instruction or "{prompt}"):
        if piece == "{prompt}":
            parts += prompt
        elif piece:
            parts.append(Fixed(piece))
    return (*before, Message("user", tuple(parts)))


def as_chat_messages(row: Row) -> list[dict[str, object]]:
    """Return a row's messages as chat messages; a picture is {"type": "image"}."""
    chat = []
    for message in messages_of(row):
        parts = [{"type": "image"} if part is PICTURE else {"type": "text", "text": part} for part in message.parts]
        chat.append({"role": message.role, "content": parts if PICTURE in message.parts else message.text})
    return chat
