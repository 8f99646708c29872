"""Conversations to tokens, with pictures and with an environment's replies, through the chat template."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpo_jax.errors import UserError, short_name, short_repr
from grpo_jax.models.hf.tokens import Json, Tokenizer, failing, failures_named, render, texts_encoder
from grpo_jax.models.vision.config import VisionConfig

PICTURE = None  # among the parts of a message

# Placeholders of texts in the search for a template's frame: digits, which templates leave alone.
_PROBE = "7316940582"
_WRITTEN = "2850491637"
_ANSWERED = "6081527394"


class Fixed(NamedTuple):
    """Text of an instruction: unlike in a user's text, what looks like a mark in it is one."""

    text: str


Part = str | Fixed | None  # of a message: text, an instruction's text, or a picture


class Message(NamedTuple):
    """One turn of a conversation: the role (system, user, assistant), and its parts in order."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The texts of all parts, without pictures."""
        return "".join(map(_text_of, self.parts))


def _text_of(part: Part) -> str:
    return part.text if isinstance(part, Fixed) else part or ""


class PictureTokens(NamedTuple):
    """The tokens around a picture, and those in the place of each of its merged tokens."""

    start: int
    picture: int
    end: int
    video: int


def picture_tokens(vision: VisionConfig) -> PictureTokens:
    """The tokens that a tower's config names."""
    return PictureTokens(vision.vision_start_token, vision.image_token, vision.vision_end_token, vision.video_token)


def conversation_encoder(
    tokenizer: Tokenizer,
    *,
    chat: bool,
    tokens: PictureTokens | None = None,
    vocab_size: int | None = None,
    **switches: Json,
) -> Callable[[Sequence[Message], Sequence[int]], list[int]]:
    """encode(messages, tokens of each picture) → the tokens that the answer starts from.

    Placed as transformers' processor places them: where the template puts a picture, which then stands for as many
    placeholders as the picture has merged tokens. A template that knows no pictures gets them as text before it.
    UserError as of `texts_encoder`, or where the template drops a picture.

    Without `chat` there is one message, and its text is continued. `switches` are variables of the template beside
    the messages.
    """
    as_text: Callable[..., str] = functools.partial(render, tokenizer, **switches) if chat else _continued
    names = [] if tokens is None else tokenizer.convert_ids_to_tokens(list(tokens[:3]))
    mark = "".join(names)
    knows_pictures = (
        chat
        and tokens is not None
        and _shows_pictures(lambda content: as_text([{"role": "user", "content": content}]), names[1])
    )
    further = () if tokens is None else tokens
    encoders: dict[tuple[object, ...], Callable[[Sequence[str]], list[int]]] = {}

    def content(parts: Sequence[Part]) -> Json:
        if knows_pictures and PICTURE in parts:
            return _content_parts(parts)
        return "".join(mark if part is PICTURE else _text_of(part) for part in parts)

    def encoder_of(messages: Sequence[Message], count: int) -> Callable[[Sequence[str]], list[int]]:
        def rendered(texts: Sequence[str]) -> str:
            rest = iter(texts)
            turns = []
            for message in messages:
                parts = [next(rest) if isinstance(part, str) else part for part in message.parts]
                turns.append({"role": message.role, "content": content(parts)})
            return as_text(turns)

        return texts_encoder(
            tokenizer,
            rendered,
            count,
            add_special_tokens=not chat,
            vocab_size=vocab_size,
            further_marks=further,
        )

    def encode(messages: Sequence[Message], lengths: Sequence[int] = ()) -> list[int]:
        parts = [part for message in messages for part in message.parts]
        texts = [part for part in parts if isinstance(part, str)]
        # Texts of a conversation change from row to row, its form does not.
        form = tuple((message.role, *("" if isinstance(p, str) else p for p in message.parts)) for message in messages)
        if form not in encoders:
            encoders[form] = encoder_of(messages, len(texts))
        ids = encoders[form](texts)
        if tokens is None:
            return ids
        if ids.count(tokens.picture) != len(lengths):
            raise UserError(
                f"prompt {short_repr(max(texts, key=len, default=''))} has {len(lengths)} pictures, and the policy's "
                f"chat template writes {ids.count(tokens.picture)} placeholders: fix or replace it"
            )
        return _repeated(ids, tokens.picture, lengths)

    return encode


def knows_option(tokenizer: Tokenizer, name: str) -> bool:
    """Whether a chat template names an option at all."""
    template = tokenizer.get_chat_template(tools=[{}] if name == "tools" else None)
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _continued(messages: Sequence[dict[str, Json]]) -> str:
    if len(messages) > 1:
        raise UserError("a prompt of several messages needs a chat template, and the policy's tokenizer has none")
    return messages[0]["content"]


def _content_parts(parts: Sequence[Part]) -> list[dict[str, Json]]:
    """A message's content as templates take pictures in it; texts that touch are one."""
    content: list[dict[str, Json]] = []
    for part in parts:
        if part is PICTURE:
            content.append({"type": "image"})
        elif content and content[-1]["type"] == "text":
            content[-1]["text"] += _text_of(part)
        else:
            content.append({"type": "text", "text": _text_of(part)})
    return content


def _shows_pictures(render: Callable[[Json], str], picture: str, count: int = 1) -> bool:
    """Return whether a template writes a placeholder for each of some pictures and keeps the text behind them."""
    try:
        text = render(_content_parts([PICTURE] * count + [_ANSWERED]))
    except UserError:  # it takes texts alone
        return False
    return text.count(picture) == count and text.count(_ANSWERED) == 1 and "{'type'" not in text


def observation_encoder(
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    *,
    vocab_size: int | None = None,
    picture: Sequence[int] = (),
    role: str = "user",
    **switches: Json,
) -> Callable[[str | Sequence[str], bool, Sequence[int]], list[int]]:
    """encode(answer, ended, pictures) → the tokens between a text of the policy's and its next one.

    An answer is a message of `role`, or several, one after another. All of it is text, whatever it says. The tokens
    follow the end token that the policy wrote; where it was cut off before one (not `ended`) they begin with it. A
    tokenizer without a chat template gets the answer as plain text. UserError where the template fails or does not
    show such a message, or as of `texts_encoder`.

    `picture` are the tokens before, of and behind a picture, () for a model that sees none; the second stands as
    often as `pictures` says of each, and they all come before the text. `switches` are variables of the template.
    """
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id in eos_ids else list(eos_ids)[:1]
    names = tokenizer.convert_ids_to_tokens(list(picture))

    def tail_of(*contents: Json) -> str:
        """The template's text behind the policy's where this is said then."""
        turns = (("user", _PROBE), ("assistant", _WRITTEN), *((role, content) for content in contents))
        messages = [{"role": who, "content": what} for who, what in turns]
        return render(tokenizer, messages, **switches).partition(_WRITTEN)[2]

    @functools.cache
    def framed(count: int, messages: int) -> tuple[Callable[[Sequence[str]], list[int]], bool]:
        """The encoder of so many messages with so many pictures, and whether it closes the policy's text first."""
        marks = "".join(names) * count
        encoder = functools.partial(
            texts_encoder, tokenizer, count=messages, add_special_tokens=False, vocab_size=vocab_size
        )
        if not getattr(tokenizer, "chat_template", None):
            return encoder(render=lambda texts: marks + "\n".join(texts)), False
        in_parts = count > 0 and _shows_pictures(tail_of, names[1], count)

        def rendered(texts: Sequence[str]) -> str:
            first = _content_parts([PICTURE] * count + [texts[0]]) if in_parts else marks + texts[0]
            return tail_of(first, *texts[1:])

        head, answer, _ = rendered([_ANSWERED] * messages).partition(_ANSWERED)
        if not answer:
            raise UserError(
                f"the chat template of {short_name(tokenizer.name_or_path or 'the policy')} shows no second turn of a "
                f"{role}: sampling.turns must be 1"
            )
        with failures_named(failing(tokenizer)):
            before = tokenizer(head, add_special_tokens=False)["input_ids"]
        return encoder(render=rendered), not set(eos_ids).isdisjoint(before)

    def encode(answer: str | Sequence[str], ended: bool, pictures: Sequence[int] = ()) -> list[int]:
        messages = (answer,) if isinstance(answer, str) else answer
        encode_text, closes = framed(len(pictures), len(messages))
        ids = encode_text(messages)
        opened = next(place for place, token in enumerate(ids) if token in eos_ids) + 1 if closes else 0
        closing = [] if ended else ids[:opened] or end
        return [*closing, *_repeated(ids[opened:], picture[1] if picture else None, pictures)]

    framed(0, 1)  # a template that cannot do it is refused before anything slow
    return encode


def _repeated(ids: Sequence[int], picture: int | None, lengths: Sequence[int]) -> list[int]:
    rest = iter(lengths)
    return [token for one in ids for token in ([one] * next(rest) if one == picture else [one])]
