"""A renderer seen through hidden lenses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridges.miniature import lens


@dataclass(frozen=True)
class Looking:
    """What draws with another renderer and shows the pictures through the lenses of their seeds."""

    renderer: Any

    @property
    def device(self) -> Any:
        """Where it draws, and where its pictures are."""
        return self.renderer.device

    @property
    def window(self) -> int:
        """Tokens of a prompt that reach the picture."""
        return self.renderer.window

    @property
    def summary(self) -> str:
        """One line for the opening of a run."""
        return f"{self.renderer.summary}, behind hidden lenses"

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Tokens of each text, uncut."""
        return self.renderer.count_tokens(texts)

    def draw(self, texts: list[str], seeds: list[int], *, evaluation: bool) -> Any:
        """What comes out: float [B, 3, H, W] in [0, 1]."""
        images = self.renderer.draw(texts, seeds, evaluation=evaluation)
        return lens.look(images, [lens.lens_of(seed) for seed in seeds])
