"""The text that each token of a tokenizer adds, as bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.models.hf.tokens import Tokenizer, special_ids

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
