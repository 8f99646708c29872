"""Encode prompts to tokens, and decode tokens to completions.

The chat template turns messages, with their pictures, into tokens of one width. Completions are decoded and parsed.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.config.sections import TODAY, DataSection
from grpo_jax.core.trie import Trie, make_trie
from grpo_jax.errors import UserError, one_line, short_repr
from grpo_jax.models.hf.chat import conversation_encoder, decoded, knows_option, pad, render_chat
from grpo_jax.models.hf.folder import PolicyFolder
from grpo_jax.models.hf.image_processor import PictureSettings, make_preparer, read_settings
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Picture, Pictures, PictureStates, pack_rows
from grpo_jax.rollout.data import Encoded, Row, map_pictures, messages_of, row_facts, text_bytes
from grpo_jax.rollout.pictures import Source, read_rgb, size_of
from grpo_jax.rollout.tools import toolboxes
from grpo_jax.sampling.sampler import bucket_size
from grpo_jax.sampling.samplers import completion_tokens

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

TokensOf = Callable[[Row, Sequence[int]], list[int]]
"""(row, tokens of each of its pictures) → the prompt's tokens."""
PictureInput = Pictures | PictureStates
"""Pictures as the update takes them: their states where the vision tower is frozen, else to be encoded again."""
_LONGEST = 4096  # most rows that are encoded beforehand; rows that could be too long are always encoded
_TEMPLATE_MARGIN = 8
_BYTES_PER_TOKEN = 100  # an upper bound, even for runs of spaces
_COMPARED = 256  # prompts whose tokens are compared; a tokenizer or template that drops prompts drops all of them


class ImageProcessor(NamedTuple):
    """The image processor of a policy's folder: PIL images → patches and grids."""

    vision: VisionConfig
    settings: PictureSettings
    prepare: Callable[[Sequence[Image]], list[Picture]]


def load_image_processor(folder: Path, vision: VisionConfig, size: int | None) -> ImageProcessor:
    """Load the image processor; `size` is data.picture_size."""
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

    The user's text stays text: only template and instruction may add special tokens and picture placeholders. The
    longest of `rows` sets L, and their pictures set the sizes, so all batches have few shapes. Beyond 4096 rows without
    pictures, only the longest texts, and all that could exceed a limit, are encoded beforehand; a batch with a longer
    row is wider. `image_processor` is called if a row has pictures.

    UserError for a prompt that is too long (data.max_prompt_tokens, or with `completion_tokens` the `context_length`),
    has no tokens or one beyond `vocab_size`, for prompts that are all equal, or for an unusable picture.
    """
    facts = row_facts(rows)
    processor = image_processor() if image_processor is not None and facts["pictures"].any() else None
    vision = None if processor is None else processor.vision
    tokens_of = _make_tokens_of(tokenizer, section, vision, vocab_size)

    def tokens_within_limits(row: Row, grids: Sequence[tuple[int, int]]) -> list[int]:
        if row.pictures and vision is None:
            raise UserError("the prompts hold pictures, and the policy has no vision tower: choose a Qwen-VL folder")
        lengths = [] if vision is None else [height * width // vision.merged for height, width in grids]
        size = text_bytes(row)
        if size > _BYTES_PER_TOKEN * section.max_prompt_tokens:  # check first: encoding takes seconds per megabyte
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
        if vision is not None:  # a picture takes only as many positions as its longer side has tokens
            positions += sum(max(grid) // vision.merge for grid in grids) - sum(lengths)
        if context_length is not None and positions > context_length:
            raise UserError(
                f"{prompt} and its {completion_tokens} completion tokens take {positions} positions, but the "
                f"policy has {context_length} (max_position_embeddings in its config.json): lower "
                "sampling.max_new_tokens or shorten the prompt"
            )
        return ids

    longest, slots, patches = 1, 0, 0
    compared: dict[str, list[int]] = {}
    for place in _measured(facts, tokens_of, section):
        row = rows[place]
        grids = []
        if processor is not None:
            grids = map_pictures(row, lambda source: processor.settings.grid(*size_of(source)))
        ids = tokens_within_limits(row, grids)
        if len(compared) < _COMPARED:
            compared[" ".join([row.prompt, *(message.text for message in row.messages)])] = ids
        longest, slots = max(longest, len(ids)), max(slots, len(grids))
        patches = max([patches, *(height * width for height, width in grids)])
    if len(compared) > 1 and len(set(map(tuple, compared.values()))) == 1:  # the policy could learn nothing
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
        return Encoded(*pad(ids, width, pad_id, left=True), pictures)

    return encode


def _measured(facts: np.ndarray, tokens_of: TokensOf, section: DataSection) -> Sequence[int]:
    """Choose the rows to encode beforehand: no tokenizer makes more tokens than a text has bytes."""
    if len(facts) <= _LONGEST:
        return range(len(facts))
    try:
        template = len(tokens_of(Row(0, "x"), [])) + _TEMPLATE_MARGIN
    except UserError:  # the template does not accept a bare prompt
        template = section.max_prompt_tokens
    repeats = max(1, section.instruction.count("{prompt}"))
    most = facts["text_bytes"] * repeats + template * np.maximum(facts["messages"], 1)
    measured = (most > section.max_prompt_tokens) | (facts["pictures"] > 0)
    measured[np.argsort(-facts["text_bytes"], kind="stable")[:_LONGEST]] = True
    return np.flatnonzero(measured).tolist()


def prepare_rows(rows: Sequence[Row], processor: ImageProcessor) -> list[list[Picture]]:
    """Return the patches of each row's pictures; a picture shared by rows is prepared once."""
    opened: dict[int, Image] = {}

    def open_once(source: Source) -> None:
        if id(source) not in opened:
            opened[id(source)] = read_rgb(source)

    for row in rows:
        map_pictures(row, open_once)
    prepared = dict(zip(opened, processor.prepare(list(opened.values())), strict=True))
    return [[prepared[id(source)] for source in row.pictures] for row in rows]


def _make_tokens_of(
    tokenizer: PreTrainedTokenizerBase, section: DataSection, vision: VisionConfig | None, vocab_size: int | None
) -> TokensOf:
    """Make tokens_of; UserError for an option that the chat template does not use, since jinja ignores it silently."""
    chat = section.form != "append" and bool(getattr(tokenizer, "chat_template", None))
    called = {TODAY: "strftime_now"}
    options = {f"data.chat_template_options.{name}": called.get(name, name) for name in section.chat_template_options}
    options |= {"data.tools": "tools"} if section.tools else {}
    for field, name in options.items():
        if not (chat and knows_option(tokenizer, name, template_options(section))):
            unsupported = f"the policy's chat template does not support {name}"
            raise UserError(f"{unsupported}; remove {field} or use another policy")
    encoders = {
        name: conversation_encoder(
            tokenizer, chat=chat, vision=vision, vocab_size=vocab_size, **template_options(section, name)
        )
        for name in (None, *section.tool_classes)
    }
    instruction = "" if section.form == "append" else section.instruction

    def tokens_of(row: Row, lengths: Sequence[int]) -> list[int]:
        name = row.columns.get("environment") if section.tool_classes else None
        return encoders[name](messages_of(row, instruction, section.system_prompt), lengths)

    return tokens_of


def template_options(section: DataSection, environment: str | None = None) -> dict[str, Any]:
    """Return the options of the chat template for rows of an environment; None for all tools."""
    options = {"enable_thinking": False, **section.chat_template_options}
    if TODAY in options:
        options[TODAY] = datetime.date.fromisoformat(options[TODAY])
    boxes = toolboxes(section)
    chosen = [*boxes.values()] if environment is None else [boxes[environment]]
    schemas = [*section.tool_schemas, *(schema for box in chosen for schema in box.schemas)]
    different = [schema for place, schema in enumerate(schemas) if schema not in schemas[:place]]
    return options | ({"tools": different} if different else {})


class ParsedCompletion(NamedTuple):
    """A parsed completion, which the rewards judge."""

    text: str  # the completion, as the task reads it
    valid: bool  # whether it parsed; false if a fallback replaces it


def as_is(completion: str, prompt: str) -> ParsedCompletion:
    """Parse a completion as itself."""
    return ParsedCompletion(completion, True)


def continued(completion: str, prompt: str) -> ParsedCompletion:
    """Parse to the prompt plus the first line of its continuation; to the prompt, invalid, if that is empty."""
    line = completion.partition("\n")[0]
    if not any(character.isalnum() for character in line):
        return ParsedCompletion(prompt, False)
    return ParsedCompletion(" ".join(f"{prompt}{line}".split()), True)


def policy_tokens(config: Config, folder: PolicyFolder) -> np.ndarray | None:
    """Return the mask bool [V] of all tokens except data.forbidden_tokens; None allows every token.

    A policy with a vision tower never generates a picture placeholder, since it would have no picture.
    """
    forbidden, size, ends = config.data.forbidden_tokens, folder.config.vocab_size, list(folder.eos_ids)
    vision = getattr(folder.config, "vision", None)
    if not forbidden and vision is None:
        return None
    allowed = np.ones(size, bool)
    for entry in forbidden:
        ids = [entry] if isinstance(entry, int) else folder.tokenizer(entry, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or not 0 <= ids[0] < size or ids[0] in ends:
            raise UserError(
                f"data.forbidden_tokens: {one_line(repr(entry), 60)} is {list(ids)}: name one token by text or "
                f"by id, in [0, {size}), that ends no completion"
            )
        allowed[ids[0]] = False
    if not np.delete(allowed, ends).any():
        raise UserError("data.forbidden_tokens: no token is left to write")
    if vision is not None:
        allowed[list(vision.picture_tokens)] = False
    return allowed


def choices_trie(config: Config, texts: Sequence[str] | None, folder: PolicyFolder) -> Trie | None:
    """Return the trie of a task's choices, to which completions are constrained; None without choices.

    If choices have the same tokens, the first counts. UserError if a choice exceeds sampling.max_new_tokens or has no
    token.
    """
    if texts is None:
        return None
    default = "its default: the task lists the possible texts"
    config.require(not config.data.forbidden_tokens, "data.forbidden_tokens", default)
    config.require(not config.sampling.stop, "sampling.stop", default)
    most, plain = config.sampling.max_new_tokens, follows_text(config, folder.tokenizer)
    unknown = folder.tokenizer.unk_token_id
    numbers: dict[tuple[int, ...], int] = {}
    for number, text in enumerate(texts):
        ids = completion_tokens(folder.tokenizer, text, folder.eos_ids, plain=plain, gap=plain)
        words = f"at least {len(ids)}, the tokens of {one_line(repr(text), 60)}, which may be written"
        require(len(ids) <= most, "sampling.max_new_tokens", words, most)
        if all(token == unknown for token in ids[:-1]):
            raise UserError(f"{one_line(repr(text), 60)} may be written, and the policy's tokenizer has no word of it")
        numbers.setdefault(tuple(ids), number)
    trie = make_trie(list(numbers), vocab_size=folder.config.vocab_size)
    first, text = np.array(list(numbers.values())), np.asarray(trie.text)
    return trie._replace(text=jnp.asarray(np.where(text >= 0, first[text], -1), jnp.int32))


def follows_text(config: Config, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether completions follow plain text rather than a special token of the chat template."""
    return not getattr(tokenizer, "chat_template", None) or config.data.form != "rewrite"


def make_decode(
    tokenizer: PreTrainedTokenizerBase, section: DataSection, *, read: Callable[[str, str], ParsedCompletion]
) -> Callable[[Sequence[int] | np.ndarray, str], tuple[str, ParsedCompletion]]:
    """Return decode(token ids, user's prompt) → (raw completion, parsed completion), without special tokens.

    In the form "append" a completion continues its prompt. A parser also reads the <think> that a template ends with.
    """
    chat = section.form == "rewrite" and read is not as_is and getattr(tokenizer, "chat_template", None)
    frame = render_chat(tokenizer, [{"role": "user", "content": "?"}], **template_options(section)) if chat else ""
    opened = "<think>" if frame.rstrip().endswith("<think>") else ""

    def decode(tokens: Sequence[int] | np.ndarray, prompt: str) -> tuple[str, ParsedCompletion]:
        ids = [int(token) for token in tokens]
        text = decoded(tokenizer, ids)
        if section.form == "append":  # keep the space before the first word, which a tokenizer drops
            start = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            head, whole = decoded(tokenizer, start), decoded(tokenizer, start + ids)
            text = whole[len(head) :] if whole.startswith(head) else text
        return text, read(opened + text, prompt)

    return decode


def completion_statistics(
    prompts: Sequence[str], texts: Sequence[Sequence[str]], valid: Sequence[Sequence[bool]]
) -> dict[str, float]:
    """Measure the completions `[P][G]` of one batch, to detect reward hacking.

    Returns:
        "words": mean number; "growth": words more than the prompt has; "duplicates": share that repeat an earlier
        completion of the prompt; "unchanged": share that equal their prompt; "invalid": share that did not parse.
    """
    pairs = [(prompt, text) for prompt, group in zip(prompts, texts, strict=True) for text in group]
    words = sum(len(_words(text)) for _, text in pairs)
    counts = {
        "words": words,
        "growth": words - sum(len(_words(prompt)) for prompt, _ in pairs),
        "duplicates": sum(len(group) - len(set(group)) for group in texts),
        "unchanged": sum(text == prompt for prompt, text in pairs),
        "invalid": sum(not flag for group in valid for flag in group),
    }
    return {name: count / len(pairs) for name, count in counts.items()}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", text.casefold())
