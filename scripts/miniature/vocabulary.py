"""The CLIP tokenizer of the miniature: every word of the world is one token, other words become letters."""

from __future__ import annotations

import json
import string
from collections.abc import Collection

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from bridges.miniature import scenes, world
from scripts.miniature import speech, speech_scenes

WINDOW = 16
"""Tokens of a caption, start and end included."""

START, END = "<|startoftext|>", "<|endoftext|>"


def canonical_words() -> set[str]:
    """Every word of the renderer's language."""
    fixed = {word for word in speech.CANONICAL_FORM.split() if not word.startswith("{")}
    return fixed | {word for values in world.VALUES.values() for word in values}


def casual_words() -> set[str]:
    """Every word of the casual grammar that says an attribute."""
    return {word for pair in speech.SYNONYMS.values() for word in pair}


def filler_words() -> set[str]:
    """Every other word of the casual grammar."""
    phrases = (*speech.OPENINGS, *speech.POSITION_PHRASES, *speech.BACKGROUND_PHRASES)
    return {word for text in phrases for word in text.split() if word != "{}"}


def world_words() -> set[str]:
    """Every word of the first world."""
    return canonical_words() | casual_words() | filler_words()


def scene_words() -> set[str]:
    """Every word of the world of `scenes`."""
    nouns = {word for shape in scenes.SHAPES for word in speech_scenes.SYNONYMS[shape]}
    texts = (*speech.OPENINGS, *speech_scenes.JOINERS, *map(speech_scenes.plural, nouns))
    casual = {word for pair in speech_scenes.SYNONYMS.values() for word in pair}
    return {"a", *speech_scenes.SYNONYMS, *casual, *(word for text in texts for word in text.split())}


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges under which each of ``words`` is one token."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=5000, min_frequency=1, end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def clip_tokenizer(words: Collection[str] | None = None) -> CLIPTokenizer:
    """The tokenizer of scorer and text encoders for words, the first world's by default; the end token's id is highest.

    Letters and digits are in the vocabulary, so no word is unknown: what the world has no word for is spelt out.
    """
    words = sorted(world_words() if words is None else words)
    letters = string.ascii_lowercase + string.digits + string.punctuation
    merges = _merges(words)
    pieces = [*letters, *(letter + "</w>" for letter in letters), *(a + b for a, b in merges)]
    tokens = [*dict.fromkeys(pieces), START, END]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=WINDOW)
