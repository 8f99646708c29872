"""Make the initial policy of the miniature's harder world: as `train_policy`, with the words of `scenes`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from bridges.miniature import scenes
from scripts.miniature import speech_scenes, train_policy, vocabulary
from scripts.miniature.train_policy import beliefs, meaning

_KEPT, _ADDED = 0.9, 0.75
"""How often a lesson's caption says what was asked for, and what was left to it."""


def make_lesson(rng: np.random.Generator) -> Callable[[], tuple[str, str]]:
    """Return what gives lessons: a casual prompt of the training split, and a half-right, often incomplete caption."""
    groups = (scenes.SHAPES, scenes.COLOURS, scenes.NUMBERS, scenes.PLACES)
    right = {word: value for value, words in speech_scenes.SYNONYMS.items() for word in words}
    right |= {
        speech_scenes.plural(word): right[word] for shape in scenes.SHAPES for word in speech_scenes.SYNONYMS[shape]
    }
    synonyms = {value: tuple(word for word in right if right[word] == value) for value in speech_scenes.SYNONYMS}
    wrong = beliefs(rng, groups, synonyms)
    values = {value: group for group in groups for value in group}

    def lesson() -> tuple[str, str]:
        split = None
        while split != "train":
            text, requested, split = speech_scenes.casual_prompt(rng, str(rng.choice(scenes.KINDS)))
        said = [word for word in text.split() if word in right]
        parts = []
        for word in speech_scenes.canonical_caption(requested).split():  # both languages have the same order
            if word == "a":
                parts.append(word)
                continue
            asked = bool(said) and right[said[0]] == word
            heard = meaning(rng, values[word], said.pop(0), word, wrong) if asked else str(rng.choice(values[word]))
            if rng.random() < (_KEPT if asked else _ADDED):
                parts.append(heard)
        return text, " ".join(parts)

    return lesson


def train(folder: Path, *, steps: int = 2500) -> None:
    """Train the start and write its Hugging Face folder.

    The steps are what it takes until the rarer words too, those of colours and numbers, are told from each other: after
    1000 it knows of a colour's word that it is some colour, and the right one may have a chance of .11.
    """
    train_policy.train(folder, steps=steps, words=vocabulary.scene_words(), lessons_of=make_lesson)
