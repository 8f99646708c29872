"""A judge of your own in one file: the brightness of pictures, without a model.

    python -m grpo_jax.train --judges.brightness examples/own_judge/brightness.py:Brightness \
        --rewards '[{"name": "alignment"}, {"name": "examples/own_judge/brightness.py:dark", "weight": 0.5}]'

The `load` of a renderer returns an object with `draw(texts, seeds, *, evaluation)`, `device`, `count_tokens(texts)` and
`window`.
"""

from dataclasses import dataclass
from typing import Any

from grpo_jax import Judge


class Brightness(Judge):
    """Score pictures by their mean value."""

    red: float = 0.299
    """Weight of red in brightness; green and blue share the rest in their usual ratio."""

    def load(self, device: str) -> "LoadedBrightness":
        """Return the argument `brightness` of rewards; a real judge puts its model on `device` here."""
        rest = (1 - self.red) / (0.587 + 0.114)
        return LoadedBrightness((self.red, 0.587 * rest, 0.114 * rest))

    def memory(self) -> list[tuple[str, int, str]]:
        """Return (name, bytes, note) of each part for --plan."""
        return [("brightness", 0, "no model")]


@dataclass(frozen=True)
class LoadedBrightness:
    """The loaded judge."""

    weights: tuple[float, float, float]

    def __str__(self) -> str:
        return f"mean brightness, weights {self.weights}"

    def of(self, images: Any) -> list[float]:
        """Return the brightness of pictures, float [B, 3, H, W] in [0, 1]."""
        means = images.mean(dim=(2, 3))
        return (means * means.new_tensor(self.weights)).sum(-1).tolist()


def dark(prompts, completions, *, images, brightness, **columns):
    """Reward dark pictures, in [0, 1]. The argument `brightness` is the loaded judge."""
    return [1 - value for value in brightness.of(images)]
