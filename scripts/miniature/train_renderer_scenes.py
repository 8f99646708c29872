"""Train the renderer of the miniature's harder world (`scenes`), from the first world's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bridges import bundled
from bridges.miniature import scenes
from scripts.miniature import drawing, speech_scenes, train_renderer, vocabulary


def _found(pictures: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """What the checker finds right, by layout: [n, 8], NaN where a row has another."""
    right = scenes.pixel_accuracy(pictures, [drawing.request_of(row) for row in rows])
    return np.where(rows[:, :1] == np.arange(len(scenes.LAYOUTS)), right[:, None], np.nan)


SCENES = train_renderer.Subject(
    vocabulary.scene_words(),
    lambda row: speech_scenes.canonical_caption(drawing.request_of(row)),
    drawing.sample_scenes,
    drawing.draw_scenes,
    _found,
)


def train(folder: Path, *, steps: int = 900) -> None:
    """Train and write the pipeline to ``folder``."""
    train_renderer.train(folder, steps=steps, subject=SCENES, blocks=3, start_from=bundled("miniature", "renderer"))
