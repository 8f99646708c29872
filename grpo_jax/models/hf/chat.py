"""Conversations to tokens, with pictures and with an environment's replies, through the chat template."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from grpo_jax.errors import UserError, short_name, short_repr
from grpo_jax.models.hf import templates
from grpo_jax.models.hf.templates import Json
from grpo_jax.models.hf.tokens import Tokenizer, failures_named, messages_renderer, text_marks, texts_encoder
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


class _Tools:
    """Tools for a template, and the texts in them that look like marks."""

    def __init__(self, tools: Sequence[Mapping[str, Json]], marks: Sequence[str]):
        signs = {sign for mark in marks for sign in mark if not (sign.isalnum() or sign in "_ ")}
        self._tools = tools
        self._mark = _any_of(marks)
        self.marks: list[str] = []

        def note(match: re.Match[str]) -> str:
            self.marks.append(match.group())
            return match.group()

        self._replaced(self._mark, note)
        self.harmless = self._replaced(_any_of(signs), lambda _: " ")
        """Without any sign of which marks are made: not even texts that a template puts together become one."""

    def showing(self, texts: Iterator[str]) -> Json:
        return self._replaced(self._mark, lambda _: next(texts))

    def _replaced(self, pattern: re.Pattern[str], by: Callable[[re.Match[str]], str]) -> Json:
        def replaced(value: Json) -> Json:
            if isinstance(value, str):
                return pattern.sub(by, value)
            if isinstance(value, Mapping):
                return {replaced(key): replaced(entry) for key, entry in value.items()}
            return [replaced(entry) for entry in value] if isinstance(value, list | tuple) else value

        return replaced(self._tools)


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """A pattern of any of these texts, the longest first; of none it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


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
    UserError as of `texts_encoder`, where the template drops a picture, or where pictures come and the model sees
    none (`tokens` None).

    Without `chat` there is one message, and its text is continued. `switches` are variables of the template beside
    the messages; in `tools` text that looks like a mark is text.
    """
    listed_tools = switches.pop("tools", None)
    render = messages_renderer(tokenizer, **switches) if chat else _continued
    names = [] if tokens is None else tokenizer.convert_ids_to_tokens(list(tokens[:3]))
    mark = "".join(names)
    knows_pictures = chat and tokens is not None and _shows_pictures(render, names[1])
    further = () if tokens is None else tokens
    tools = None
    if listed_tools:
        tools = _Tools(listed_tools, tokenizer.convert_ids_to_tokens(sorted(text_marks(tokenizer).union(further))))
    marks_in_tools = tools.marks if tools else []
    encoders: dict[tuple[object, ...], Callable[[Sequence[str]], list[int]]] = {}

    def content(parts: Sequence[Part]) -> Json:
        if knows_pictures and PICTURE in parts:
            return _content_parts(parts)
        return "".join(mark if part is PICTURE else _text_of(part) for part in parts)

    def encoder_of(messages: Sequence[Message], count: int) -> Callable[[Sequence[str]], list[int]]:
        def rendered(texts: Sequence[str], harmless: bool = False) -> str:
            rest = iter(texts)
            turns = []
            for message in messages:
                parts = [next(rest) if isinstance(part, str) else part for part in message.parts]
                turns.append({"role": message.role, "content": content(parts)})
            if tools is None:
                return render(turns)
            return render(turns, tools=tools.harmless if harmless else tools.showing(rest))

        return texts_encoder(
            tokenizer,
            rendered,
            count + len(marks_in_tools),
            add_special_tokens=not chat,
            vocab_size=vocab_size,
            further_marks=further,
            harmless=None if tools is None else functools.partial(rendered, harmless=True),
        )

    def encode(messages: Sequence[Message], lengths: Sequence[int] = ()) -> list[int]:
        parts = [part for message in messages for part in message.parts]
        texts = [part for part in parts if isinstance(part, str)]
        if len(lengths) != parts.count(PICTURE):
            raise ValueError(f"lengths: expected one for each of {parts.count(PICTURE)} pictures, got {len(lengths)}")
        if lengths and tokens is None:
            raise UserError("the prompts hold pictures, and the policy has no vision tower: choose a Qwen-VL folder")
        # Texts of a conversation change from row to row, its form does not.
        form = tuple((message.role, *("" if isinstance(p, str) else p for p in message.parts)) for message in messages)
        if form not in encoders:
            encoders[form] = encoder_of(messages, len(texts))
        ids = encoders[form]([*texts, *marks_in_tools])
        return ids if tokens is None else _expanded(ids, tokens.picture, lengths, texts)

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


def _shows_pictures(render: Callable[..., str], picture: str) -> bool:
    """Whether a template writes a placeholder for a picture and keeps the text beside it."""
    try:
        text = render([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _PROBE}]}])
    except UserError:
        return False
    return text.count(picture) == 1 and text.count(_PROBE) == 1 and "{'type'" not in text


def _expanded(ids: Sequence[int], picture: int, lengths: Sequence[int], texts: Sequence[str]) -> list[int]:
    """Repeat each picture's placeholder as often as the picture has tokens; refuse other numbers of pictures."""
    if ids.count(picture) != len(lengths):
        raise UserError(
            f"prompt {short_repr(max(texts, key=len, default=''))} has {len(lengths)} pictures, and the policy's chat "
            f"template writes {ids.count(picture)} placeholders: mend or replace it"
        )
    return _repeated(ids, picture, lengths)


def answer_encoder(
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
        try:
            text = templates.render(tokenizer, [{"role": who, "content": what} for who, what in turns], **switches)
        except templates.TemplateFailed as error:
            raise UserError(
                f"the chat template of {short_name(tokenizer.name_or_path or 'the policy')} failed on a conversation "
                f"({error}): mend it, or leave sampling.turns at 1"
            ) from error
        return text.partition(_WRITTEN)[2]

    def knows_pictures(count: int) -> bool:
        try:
            return tail_of(_content_parts([PICTURE] * count + [_ANSWERED])).count(names[1]) == count
        except UserError:  # it takes texts alone
            return False

    @functools.cache
    def framed(count: int, messages: int) -> tuple[Callable[[Sequence[str]], list[int]], bool]:
        """The encoder of so many messages with so many pictures, and whether it closes the policy's text first."""
        marks = "".join(names) * count
        encoder = functools.partial(
            texts_encoder, tokenizer, count=messages, add_special_tokens=False, vocab_size=vocab_size
        )
        if not getattr(tokenizer, "chat_template", None):
            return encoder(render=lambda texts: marks + "\n".join(texts)), False
        in_parts = count > 0 and knows_pictures(count)

        def render(texts: Sequence[str]) -> str:
            first = _content_parts([PICTURE] * count + [texts[0]]) if in_parts else marks + texts[0]
            return tail_of(first, *texts[1:])

        head, answer, _ = render([_ANSWERED] * messages).partition(_ANSWERED)
        if not answer:
            raise UserError(
                f"the chat template of {short_name(tokenizer.name_or_path or 'the policy')} shows no second turn of a "
                f"{role}: sampling.turns must be 1"
            )
        with failures_named(tokenizer):
            before = tokenizer(head, add_special_tokens=False)["input_ids"]
        return encoder(render=render), not set(eos_ids).isdisjoint(before)

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
