"""The CLIP tokenizer of the miniature: every word of the world is one token, other words fall into letters."""

from __future__ import annotations

import json
import string

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from bridges.miniature import world

WINDOW = 16
"""Tokens of a caption, start and end included."""

START, END = "<|startoftext|>", "<|endoftext|>"


def canonical_words() -> set[str]:
    """Every word of the renderer's language."""
    fixed = {word for word in world.CANONICAL_FORM.split() if not word.startswith("{")}
    return fixed | {word for values in world.VALUES.values() for word in values}


def casual_words() -> set[str]:
    """Every word of the casual grammar that says an attribute."""
    return {word for pair in world.SYNONYMS.values() for word in pair}


def filler_words() -> set[str]:
    """Every other word of the casual grammar."""
    phrases = (*world.OPENINGS, *world.POSITION_PHRASES, *world.BACKGROUND_PHRASES)
    return {word for text in phrases for word in text.split() if word != "{}"}


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges under which each of ``words`` is one token."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=5000, min_frequency=1, end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def clip_tokenizer() -> CLIPTokenizer:
    """The tokenizer of the scorer and of both text encoders; the end token has the highest id.

    Letters and digits are in the vocabulary, so no word is unknown: what the world has no word for is spelt out.
    """
    words = sorted(canonical_words() | casual_words() | filler_words())
    letters = string.ascii_lowercase + string.digits + string.punctuation
    merges = _merges(words)
    pieces = [*letters, *(letter + "</w>" for letter in letters), *(a + b for a, b in merges)]
    tokens = [*dict.fromkeys(pieces), START, END]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=WINDOW)
