"""Encode conversations, with pictures and observations, through the chat template.

Special tokens such as ``<|im_end|>`` come only from the template, never from a user's text, although a tokenizer
recognises them anywhere in a string. If the special tokens of a rendered prompt are those of its template, it is
encoded as a whole, as transformers does. Otherwise the user's texts are encoded separately, without special tokens.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.errors import UserError, one_line, short_name, short_repr
from grpo_jax.models.hf_config import failures_named
from grpo_jax.models.vision.config import VisionConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = object

Json = Any
PICTURE = None  # a part of a message

# Filler texts to find a template's frame: digits, which templates that trim, capitalise or escape leave unchanged.
_PROBE = "7316940582"
_WRITTEN = "2850491637"
_ANSWERED = "6081527394"
_UNKNOWN = "\ue000 \U00012000 qzxwvkj"
"""Words that no vocabulary has: of nobody's script, of cuneiform, of Latin letters."""
_DATE = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")


class Fixed(NamedTuple):
    """Text of an instruction; unlike in a user's text, special tokens in it are recognised."""

    text: str


Part = str | Fixed | None  # part of a message: text, an instruction's text, or a picture


class Message(NamedTuple):
    """A message of a conversation: its role (system, user, assistant), and its parts in order."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """Return the text of all parts, without pictures."""
        return "".join(map(_text_of, self.parts))


def _text_of(part: Part) -> str:
    return part.text if isinstance(part, Fixed) else part or ""


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of all special tokens: named ones, reserved ones, chat markers and the like."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {token for token, what in added if what.special}


def text_marks(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special ids that no text may be encoded to.

    These are all special ids but the one for unknown words. Byte-level tokenizers may name such a token, but never
    produce it.
    """
    unknown, ends = tokenizer.unk_token_id, (tokenizer.bos_token_id, tokenizer.eos_token_id)
    if unknown is None or unknown in ends:
        return special_ids(tokenizer)
    unknown_ids = _encode(tokenizer, _UNKNOWN, split_special_tokens=True)
    return frozenset(mark for mark in special_ids(tokenizer) if mark != unknown or mark not in unknown_ids)


def plain_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text separately; special tokens in it stay text."""
    marks, ids = text_marks(tokenizer), _encode(tokenizer, text)
    if marks.isdisjoint(ids):
        return ids
    ids = _encode(tokenizer, text, split_special_tokens=True)
    # A tokenizer of whole words finds special tokens among its words: encode them as unknown words.
    unknown = [] if tokenizer.unk_token_id in (None, *marks) else [tokenizer.unk_token_id]
    return [piece for token in ids for piece in (unknown if token in marks else [token])]


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False, **options: bool) -> list[int]:
    with failures_named(f"the tokenizer of {_folder(tokenizer)} failed"):
        return list(tokenizer(text, add_special_tokens=add_special_tokens, **options)["input_ids"])


def decoded(tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray) -> str:
    """Return the text of tokens, without special ones and without clean-up of spaces."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def pad(
    encoded: Sequence[Sequence[int]], width: int, pad_id: int, *, left: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Pad token lists to one array i32 [N, width] and its mask bool [N, width]; none may be longer."""
    mask = np.arange(width) < np.array([len(tokens) for tokens in encoded])[:, None]
    mask = mask[:, ::-1] if left else mask
    array = np.full(mask.shape, pad_id, np.int32)
    array[mask] = [*itertools.chain.from_iterable(encoded)]
    return array, mask


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Json]], *, today: date | None = None, **switches: Json
) -> str:
    """Render a conversation with the chat template in jinja's sandbox, with a generation prompt.

    A template that writes the date writes `today`, if given. `switches` are variables of the template. UserError if it
    fails or renders nothing.
    """
    where = f"the chat template of {_folder(tokenizer)} (chat_template.jinja, or in tokenizer_config.json)"
    try:
        template = tokenizer.get_chat_template(tools=switches.get("tools"))
        if today is not None:
            template = _DATE.sub(lambda call: repr(today.strftime(call[2])), template)
        text = tokenizer.apply_chat_template(
            [*messages], chat_template=template, tokenize=False, add_generation_prompt=True, **switches
        )
    except Exception as error:  # a template may raise any type
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
    """Make encode(texts) → the tokens of ``render(texts)``, with special tokens only from the frame around the texts.

    `render` inserts `count` texts into their frame: a chat template, an instruction. Tokens that the tokenizer adds at
    the end, such as EOS, are left out: a completion follows. No text becomes a special token or one of `further_marks`.
    UserError if the tokenizer fails, or a text has no tokens or one beyond `vocab_size`. UserError too for text like a
    special token in a template that alters the text.
    """
    marks = text_marks(tokenizer) | frozenset(further_marks)

    def marks_in(ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in marks]

    fillers = [f"{_PROBE}{number:04d}" for number in range(count)]
    frame = render(fillers)
    whole_frame = _encode(tokenizer, frame, add_special_tokens=add_special_tokens)
    before, after = _added(whole_frame, _encode(tokenizer, frame))
    expected = marks_in(whole_frame)

    def apart(text: str, texts: Sequence[str]) -> list[int] | None:
        """Encode the texts separately; None if the template alters them."""
        cut = _around(frame, fillers, text, texts)
        if cut is None:
            return None
        parts = [plain_tokens(tokenizer, part) if i % 2 else _encode(tokenizer, part) for i, part in enumerate(cut)]
        ids = [*before, *itertools.chain.from_iterable(parts), *after]
        return ids if marks_in(ids) == expected else None

    def encode(texts: Sequence[str]) -> list[int]:
        text = render(texts)
        ids: list[int] | None = _encode(tokenizer, text, add_special_tokens=add_special_tokens)
        if marks_in(ids or ()) != expected:
            ids = apart(text, texts)
        ids = ids and ids[: len(ids) - len(after)]
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
    """Split a rendered string into frame, text, frame, …; None unless each text occurs once, perhaps stripped."""
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
    """Return the tokens that a tokenizer adds before and after a text."""
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
    vision: VisionConfig | None = None,
    vocab_size: int | None = None,
    **switches: Json,
) -> Callable[[Sequence[Message], Sequence[int]], list[int]]:
    """Make encode(messages, tokens of each picture) → the tokens of the prompt; pictures need `vision`.

    As in transformers' processor, the template places each picture, which becomes one placeholder per merged token. If
    the template does not support pictures, their placeholders precede the text. UserError as in `texts_encoder`, or if
    the template drops a message or a picture.

    Without `chat` there is one message, and the completion continues its text. `switches` are further variables of the
    template.
    """
    as_text: Callable[..., str] = functools.partial(render_chat, tokenizer, **switches) if chat else _continued
    marks = () if vision is None else vision.picture_tokens
    names = tokenizer.convert_ids_to_tokens(list(marks[:3]))
    mark, in_parts = "".join(names), False
    if chat and vision is not None:
        in_parts = _shows_pictures(lambda content: as_text([{"role": "user", "content": content}]), names[1])

    @functools.cache
    def encoder_of(form: tuple[Message, ...], count: int) -> Callable[[Sequence[str]], list[int]]:
        """Make the encoder of `count` texts in conversations of this form, whose own texts are empty."""

        def rendered(texts: Sequence[str], form: tuple[Message, ...] = form) -> str:
            rest = iter(texts)
            turns = []
            for message in form:
                parts = [next(rest) if isinstance(part, str) else part for part in message.parts]
                text = "".join(mark if part is PICTURE else _text_of(part) for part in parts)
                content = _content_parts(parts) if in_parts and PICTURE in parts else text
                turns.append({"role": message.role, "content": content})
            return as_text(turns)

        roles = [message.role for message in form for part in message.parts if part is not PICTURE]
        plain = tuple(Message(m.role, tuple(part and "" for part in m.parts)) for m in form)
        usual = [_PROBE] * len(roles)
        whole = rendered(usual, plain)
        for place, role in enumerate(roles):
            if rendered([*usual[:place], _WRITTEN, *usual[place + 1 :]], plain) == whole:
                why = f"leaves out a message of the role {role}: fix it, or drop the message"
                raise UserError(f"the chat template of {_folder(tokenizer)} {why}")
        return texts_encoder(
            tokenizer, rendered, count, add_special_tokens=not chat, vocab_size=vocab_size, further_marks=marks
        )

    def encode(messages: Sequence[Message], lengths: Sequence[int] = ()) -> list[int]:
        texts = [part for message in messages for part in message.parts if isinstance(part, str)]
        # The texts of a conversation change from row to row, its form does not.
        form = tuple(Message(m.role, tuple("" if isinstance(p, str) else p for p in m.parts)) for m in messages)
        ids = encoder_of(form, len(texts))(texts)
        if vision is None:
            return ids
        if ids.count(vision.image_token) != len(lengths):
            raise UserError(
                f"prompt {short_repr(max(texts, key=len, default=''))} has {len(lengths)} pictures, and the policy's "
                f"chat template writes {ids.count(vision.image_token)} placeholders: fix or replace it"
            )
        return _repeated(ids, vision.image_token, lengths)

    return encode


def knows_option(tokenizer: Tokenizer, name: str, switches: Mapping[str, Json]) -> bool:
    """Return whether a chat template uses an option; whether it writes the tools among `switches`."""
    if name != "tools":
        return re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()) is not None
    talk = [{"role": "user", "content": _PROBE}]  # some templates take tools from a system message only
    return render_chat(tokenizer, talk, **switches) != render_chat(tokenizer, talk, **{**switches, name: None})


def written_call(tokenizer: Tokenizer, name: str, switches: Mapping[str, Json]) -> str:
    """Return the call of a tool without arguments as a chat template writes it; "" if it writes none."""
    call = {"id": "000000000", "type": "function", "function": {"name": name, "arguments": {}}}
    answers: list[dict[str, Json]] = [{"content": _PROBE}, {"content": "", "tool_calls": [call]}]
    talks = [[{"role": "user", "content": _PROBE}, {"role": "assistant", **answer}] for answer in answers]
    try:
        answered, called = (render_chat(tokenizer, talk, **switches) for talk in talks)
    except UserError:  # the template takes other calls, or none
        return ""
    differs = (place for place, pair in enumerate(zip(answered, called, strict=False)) if len({*pair}) == 2)
    return called[next(differs) :] if name in called else ""


def _continued(messages: Sequence[dict[str, Json]]) -> str:
    if len(messages) > 1:
        raise UserError("a prompt of several messages needs a chat template, and the policy's tokenizer has none")
    return messages[0]["content"]


def _content_parts(parts: Sequence[Part]) -> list[dict[str, Json]]:
    """Return a message's content as a list of parts for templates; adjacent texts are merged."""
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
    """Return whether a template writes a placeholder for each picture and keeps the text after them."""
    try:
        text = render(_content_parts([PICTURE] * count + [_ANSWERED]))
    except UserError:  # the template accepts only strings
        return False
    return text.count(picture) == count and text.count(_ANSWERED) == 1 and "{'type'" not in text


@functools.lru_cache(maxsize=8)
def end_of_turn(tokenizer: Tokenizer, eos_ids: tuple[int, ...], template: str) -> int:
    """Return the EOS with which the chat template closes an answer; without one the tokenizer's own, or the first."""
    talk = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _WRITTEN}]
    ids = [tokenizer.eos_token_id]
    with suppress(UserError):  # a template may take no answer
        ids = _encode(tokenizer, render_chat(tokenizer, talk).partition(_WRITTEN)[2] if template else "") + ids
    return next((token for token in ids if token in eos_ids), eos_ids[0])


def observation_encoder(
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    *,
    vocab_size: int | None = None,
    picture: Sequence[int] = (),
    role: str = "user",
    **switches: Json,
) -> Callable[[str | Sequence[str], bool, Sequence[int]], list[int]]:
    """Make encode(observation, ended, pictures) → the tokens between two completions of the policy.

    An observation is one message of `role`, or several in sequence. Special tokens in it stay text. The tokens follow
    the policy's EOS; if the completion was truncated (not `ended`), they begin with EOS. A tokenizer without a chat
    template gets the observation as plain text. UserError if the template fails or does not render such a message, or
    as in `texts_encoder`.

    `picture` are the tokens before, of and after a picture, () for a model without pictures. `pictures` counts the
    placeholders of each picture; pictures precede the text. `switches` are variables of the template.
    """
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id in eos_ids else list(eos_ids)[:1]
    names = tokenizer.convert_ids_to_tokens(list(picture))

    def tail_of(*contents: Json) -> str:
        """Return the template's text after the completion, for these observations."""
        turns = (("user", _PROBE), ("assistant", _WRITTEN), *((role, content) for content in contents))
        messages = [{"role": who, "content": what} for who, what in turns]
        return render_chat(tokenizer, messages, **switches).partition(_WRITTEN)[2]

    @functools.cache
    def framed(count: int, messages: int) -> tuple[Callable[[Sequence[str]], list[int]], bool]:
        """Return the encoder for so many messages and pictures, and whether it first closes the completion."""
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

    framed(0, 1)  # refuse an unsuitable template before anything slow
    return encode


def _repeated(ids: Sequence[int], picture: int | None, lengths: Sequence[int]) -> list[int]:
    rest = iter(lengths)
    return [token for one in ids for token in ([one] * next(rest) if one == picture else [one])]
