"""Train the renderer that errs: the harder world's, made to draw wrong numbers and colours by chance.

The other renderers draw every canonical caption right, so training has nothing to correct. This script continues the
training of `renderer_scenes` on captions with wrong numbers and colours, and interpolates between the two. The noise
decides whether a picture is wrong: no words correct it, but a reward can. The transformer's weights have eight bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bridges import bundled
from bridges.miniature import scenes
from scripts.miniature import drawing, speech_scenes, train_renderer
from scripts.miniature.train_renderer_scenes import SCENES

_WRONG_NUMBER, _WRONG_COLOUR = 0.5, 0.35
_SHARE = 0.5
"""Weight of the parameters that learned wrong captions, in the interpolation with those of `renderer_scenes`."""


def wrong_captions(seed: int) -> Callable[[np.ndarray], str]:
    """Return a function from a row to its canonical caption, with wrong numbers and colours by chance."""
    rng = np.random.default_rng(seed)
    chances = ((scenes.NUMBERS, _WRONG_NUMBER), (tuple(scenes.COLOURS), _WRONG_COLOUR))

    def caption(row: np.ndarray) -> str:
        words = speech_scenes.canonical_caption(drawing.request_of(row)).split()
        for place, word in enumerate(words):
            for values, chance in chances:
                if word in values and rng.random() < chance:
                    words[place] = str(rng.choice([value for value in values if value != word]))
        return " ".join(words)

    return caption


def train(folder: Path, *, steps: int = 300) -> None:
    """Train and write the pipeline to ``folder``."""
    shipped, subject = bundled("miniature_scenes", "renderer"), SCENES._replace(caption=wrong_captions(1))
    assert shipped is not None
    options = {"seed": 1, "learning_rate": 1e-3, "blocks": 3, "start_from": shipped}
    train_renderer.train(folder, steps=steps, subject=subject, **options)
    for path in folder.rglob("*.safetensors"):
        weak, strong = load_file(path), load_file(shipped / path.relative_to(folder))
        mixed = {name: torch.lerp(strong[name].float(), weak[name].float(), _SHARE) for name in weak}
        dtype = torch.float8_e4m3fn if path.parent.name == "transformer" else torch.float16
        save_file({name: value.to(dtype) for name, value in mixed.items()}, path, metadata={"format": "pt"})
