"""Texts to tokens, so that marks such as ``<|im_end|>`` come from a folder's template and never from what a user wrote.

A tokenizer reads its marks wherever they stand in a text. A prompt whose marks are those of its template is encoded as
a whole, as transformers does. Any other holds text that looks like a mark: its own text is then encoded apart, with the
marks switched off.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.errors import UserError, one_line, short_repr

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = object

Json = Any

_PLACEHOLDER = "7316940582"
"""Placeholder of a text; templates that trim, capitalise or escape leave digits alone."""
_UNKNOWN = "\ue000 \U00012000 qzxwvkj"
"""Words that no vocabulary has: of nobody's script, of cuneiform, of Latin letters."""


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
    with failures_named(failing(tokenizer)):
        unknown_ids = tokenizer(_UNKNOWN, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return frozenset(mark for mark in special_ids(tokenizer) if mark != unknown or mark not in unknown_ids)


def plain_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text by itself; what looks like a mark in it is text."""
    marks = text_marks(tokenizer)
    with failures_named(failing(tokenizer)):
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if marks.isdisjoint(ids):
            return ids
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    # A tokenizer of whole words finds marks among its words: they are unknown ones then.
    unknown = [] if tokenizer.unk_token_id in (None, *marks) else [tokenizer.unk_token_id]
    return [piece for token in ids for piece in (unknown if token in marks else [token])]


_DATE = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")


def render(
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
    one of `further_marks`. UserError where the tokenizer fails, a text has no tokens or one beyond `vocab_size`, or
    text like a mark stands inside a template that does not keep it apart.
    """
    marks = text_marks(tokenizer) | frozenset(further_marks)

    def tokens_of(text: str, *, special: bool) -> list[int]:
        with failures_named(failing(tokenizer)):
            return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    def marks_in(ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in marks]

    fillers = [f"{_PLACEHOLDER}{number:04d}" for number in range(count)]
    frame = render(fillers)
    whole_frame = tokens_of(frame, special=add_special_tokens)
    expected = marks_in(whole_frame)

    def apart(text: str, texts: Sequence[str]) -> list[int] | None:
        """Encode the texts by themselves; None where the template does not show them as they are."""
        cut = _around(frame, fillers, text, texts)
        if cut is None:
            return None
        before, after = _added(whole_frame, tokens_of(frame, special=False))
        ids = list(before)
        for place, part in enumerate(cut):
            ids += plain_tokens(tokenizer, part) if place % 2 else tokens_of(part, special=False)
        ids += after
        return ids if marks_in(ids) == expected else None

    def encode(texts: Sequence[str]) -> list[int]:
        text = render(texts)
        ids: list[int] | None = tokens_of(text, special=add_special_tokens)
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


@contextmanager
def as_user_error(start: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise UserError("start: error") in place of errors of these kinds."""
    try:
        yield
    except kinds as error:
        raise UserError(f"{start}: {error}") from error


@contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Make a tokenizer's failure a UserError that begins so; in Rust it is a panic, which is no ``Exception``."""
    try:
        yield
    except BaseException as error:
        failure = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not failure or isinstance(error, ModuleNotFoundError):
            raise
        reason = f"{type(error).__name__}: {one_line(error, 120) or 'no reason given'}"
        raise UserError(f"{what} ({reason}); copy its files again") from error


def failing(tokenizer: Tokenizer) -> str:
    """Say which tokenizer failed, for `failures_named`."""
    return f"the tokenizer of {_folder(tokenizer)} failed"


def _folder(tokenizer: Tokenizer) -> str:
    return getattr(tokenizer, "name_or_path", "") or "the policy"


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte by itself, in SentencePiece's way
_CHECKS = 16  # random texts that must come out as their tokens say
_CHECKED = 24  # tokens of each


class Pieces(NamedTuple):
    """Bytes by token id, V of each; special tokens and ids without a token add nothing.

    `first` are those of a token that begins a text, `later` of a token behind others.
    """

    first: list[bytes]
    later: list[bytes]


def token_pieces(tokenizer: Tokenizer, vocab_size: int) -> Pieces | None:
    """Bytes that tokens add to the text that decoding them gives (special tokens skipped, no spaces cleaned up).

    A byte-level tokenizer's tokens, and SentencePiece's bytes, may hold parts of a character: hence bytes. V is the
    model's, which may exceed the tokenizer's. None for a tokenizer whose texts are not their tokens' one after
    another.
    """
    special = special_ids(tokenizer)
    size = min(len(tokenizer), vocab_size)
    names = tokenizer.convert_ids_to_tokens(list(range(size)))
    ordinary = [token for token in range(size) if token not in special and names[token] is not None]
    byte_level = "ByteLevel" in str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
    pieces = Pieces([b""] * vocab_size, [b""] * vocab_size)
    if byte_level:
        of_character = _byte_alphabet()
        for token in ordinary:
            name = names[token]
            spelled = all(character in of_character for character in name)
            piece = bytes(map(of_character.__getitem__, name)) if spelled else name.encode()
            pieces.first[token] = pieces.later[token] = piece
    else:
        _read_pieces(tokenizer, ordinary, names, pieces)
    # Bytes that are no character together come out as decoders like, each in its own way.
    whole = ordinary if byte_level else [token for token in ordinary if not _BYTE.fullmatch(names[token])]
    return pieces if whole and _holds(tokenizer, whole, pieces) else None


def _read_pieces(tokenizer: Tokenizer, ordinary: Sequence[int], names: Sequence[str], pieces: Pieces) -> None:
    anchor = next((token for token in ordinary if names[token].isascii() and names[token].isalpha()), ordinary[0])
    start = _decoded(tokenizer, [anchor])
    for token in ordinary:
        if byte := _BYTE.fullmatch(names[token]):
            pieces.first[token] = pieces.later[token] = bytes([int(byte.group(1), 16)])
        else:
            pieces.first[token] = _decoded(tokenizer, [token]).encode()
            pieces.later[token] = _decoded(tokenizer, [anchor, token]).removeprefix(start).encode()


def _holds(tokenizer: Tokenizer, ordinary: Sequence[int], pieces: Pieces) -> bool:
    """Whether random texts are the pieces of their tokens, one after another."""
    random = np.random.default_rng(0)
    for _ in range(_CHECKS):
        tokens = random.choice(np.asarray(ordinary), _CHECKED).tolist()
        text = pieces.first[tokens[0]] + b"".join(pieces.later[token] for token in tokens[1:])
        if _decoded(tokenizer, tokens) != text.decode(errors="replace"):
            return False
    return True


def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
