"""Conversations to tokens, with pictures and with an environment's replies, through the chat template.

Marks such as ``<|im_end|>`` come from a folder's template and never from what a user wrote. A tokenizer reads its marks
wherever they stand in a text. A prompt whose marks are those of its template is encoded as a whole, as transformers
does. Any other holds text that looks like a mark: its own text is then encoded apart, with the marks switched off.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_jax.errors import UserError, one_line, short_name, short_repr
from grpo_jax.models.hf_config import failures_named
from grpo_jax.models.vision.config import VisionConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = object

Json = Any
PICTURE = None  # among the parts of a message

# Placeholders of texts in the search for a template's frame: digits, which templates that trim, capitalise or escape
# leave alone.
_PROBE = "7316940582"
_WRITTEN = "2850491637"
_ANSWERED = "6081527394"
_UNKNOWN = "\ue000 \U00012000 qzxwvkj"
"""Words that no vocabulary has: of nobody's script, of cuneiform, of Latin letters."""


class Fixed(NamedTuple):
    """Text of an instruction: marks in it are marks, unlike in a user's text."""

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


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of all marks: those with a name, and reserved ones, chat marks and the like."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {token for token, what in added if what.special}


def text_marks(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special ids that no text may become.

    That is all but one that the tokenizer gives for unknown words. Some tokenizers name one and never give it: those
    of bytes, to which no text is unknown.
    """
    unknown, ends = tokenizer.unk_token_id, (tokenizer.bos_token_id, tokenizer.eos_token_id)
    if unknown is None or unknown in ends:
        return special_ids(tokenizer)
    unknown_ids = _encode(tokenizer, _UNKNOWN, split_special_tokens=True)
    return frozenset(mark for mark in special_ids(tokenizer) if mark != unknown or mark not in unknown_ids)


def plain_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text by itself; marks in it are text."""
    marks, ids = text_marks(tokenizer), _encode(tokenizer, text)
    if marks.isdisjoint(ids):
        return ids
    ids = _encode(tokenizer, text, split_special_tokens=True)
    # A tokenizer of whole words finds marks among its words: they are unknown ones then.
    unknown = [] if tokenizer.unk_token_id in (None, *marks) else [tokenizer.unk_token_id]
    return [piece for token in ids for piece in (unknown if token in marks else [token])]


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False, **options: bool) -> list[int]:
    with failures_named(f"the tokenizer of {_folder(tokenizer)} failed"):
        return list(tokenizer(text, add_special_tokens=add_special_tokens, **options)["input_ids"])


_DATE = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Json]], *, today: date | None = None, **switches: Json
) -> str:
    """Render a conversation by the chat template in jinja's sandbox, with the answer left open.

    A template that writes the date writes `today`, if given. `switches` are variables of the template. UserError if it
    fails or writes nothing.
    """
    where = f"the chat template of {_folder(tokenizer)} (chat_template.jinja, or in tokenizer_config.json)"
    try:
        template = tokenizer.get_chat_template(tools=switches.get("tools"))
        if today is not None:
            template = _DATE.sub(lambda call: repr(today.strftime(call[2])), template)
        text = tokenizer.apply_chat_template(
            [*messages], chat_template=template, tokenize=False, add_generation_prompt=True, **switches
        )
    except Exception as error:  # a template raises what it likes
        raise UserError(f"{where} failed ({type(error).__name__}: {one_line(error)}): fix or replace it") from error
    if not text.strip():
        raise UserError(f"{where} writes nothing for a user's turn: fix or replace it")
    return text


def texts_encoder(
    tokenizer: Tokenizer,
    render: Callable[[Sequence[str]], str],
    count: int,
    *,
    add_special_tokens: bool,
    vocab_size: int | None = None,
    further_marks: Collection[int] = (),
) -> Callable[[Sequence[str]], list[int]]:
    """Return encode(texts) → the tokens of ``render(texts)``, with the marks of the frame around the texts alone.

    `render` puts `count` texts into their frame: a chat template, an instruction. No text becomes a special token or
    one of `further_marks`. UserError if the tokenizer fails, a text has no tokens or one beyond `vocab_size`, or
    text like a mark stands inside a template that does not keep it apart.
    """
    marks = text_marks(tokenizer) | frozenset(further_marks)

    def marks_in(ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in marks]

    fillers = [f"{_PROBE}{number:04d}" for number in range(count)]
    frame = render(fillers)
    whole_frame = _encode(tokenizer, frame, add_special_tokens=add_special_tokens)
    expected = marks_in(whole_frame)

    def apart(text: str, texts: Sequence[str]) -> list[int] | None:
        """Encode the texts by themselves; None if the template does not show them as they are."""
        cut = _around(frame, fillers, text, texts)
        if cut is None:
            return None
        before, after = _added(whole_frame, _encode(tokenizer, frame))
        parts = [plain_tokens(tokenizer, part) if i % 2 else _encode(tokenizer, part) for i, part in enumerate(cut)]
        ids = [*before, *itertools.chain.from_iterable(parts), *after]
        return ids if marks_in(ids) == expected else None

    def encode(texts: Sequence[str]) -> list[int]:
        text = render(texts)
        ids: list[int] | None = _encode(tokenizer, text, add_special_tokens=add_special_tokens)
        if marks_in(ids or ()) != expected:
            ids = apart(text, texts)
        prompt = f"prompt {short_repr(max(texts, key=len, default=''))}"
        if ids is None:
            raise UserError(
                f"{prompt} holds text that the tokenizer of {_folder(tokenizer)} reads as a mark, and "
                "its template does not keep them apart: take it out"
            )
        if not ids:
            raise UserError(f"{prompt} has no tokens in the tokenizer of {_folder(tokenizer)}")
        if vocab_size is not None and max(ids) >= vocab_size:
            raise UserError(
                f"the tokenizer of {_folder(tokenizer)} gives token {max(ids)}, and the model has {vocab_size} "
                "(config.json, vocab_size): it is another model's tokenizer"
            )
        return ids

    return encode


def _around(frame: str, fillers: Sequence[str], text: str, texts: Sequence[str]) -> list[str] | None:
    """Split a rendered text into frame, text, frame, …; None unless each text stands there once, perhaps stripped."""
    any_filler = "|".join(fillers) or r"(?!)"
    shown = re.findall(any_filler, frame)
    if sorted(shown) != [*fillers]:
        return None
    given = [texts[fillers.index(filler)] for filler in shown]
    frames = [f"({re.escape(part)})" for part in re.split(any_filler, frame)]
    parts = [f"({re.escape(one)}|{re.escape(one.strip())})" for one in given]
    match = re.fullmatch("".join(map("".join, itertools.zip_longest(frames, parts, fillvalue=""))), text)
    return None if match is None else [*match.groups()]


def _added(whole: list[int], bare: list[int]) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and behind a text."""
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _folder(tokenizer: Tokenizer) -> str:
    return getattr(tokenizer, "name_or_path", "") or "the policy"


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
    as_text: Callable[..., str] = functools.partial(render_chat, tokenizer, **switches) if chat else _continued
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
    tokenizer without a chat template gets the answer as plain text. UserError if the template fails or does not
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
        return render_chat(tokenizer, messages, **switches).partition(_WRITTEN)[2]

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
        return encoder(render=rendered), not set(eos_ids).isdisjoint(_encode(tokenizer, head))

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
