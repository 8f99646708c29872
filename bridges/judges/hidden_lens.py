"""The miniature's renderer behind a hidden lens: only the picture shows how to correct the words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridges.judges.stable_diffusion_3 import StableDiffusion3
from bridges.miniature.world import lens_of, look, undone

if TYPE_CHECKING:
    from bridges.diffusion import Renderer


class HiddenLens(StableDiffusion3):
    """Draws with the miniature's renderer and shows each picture through the lens of its seed.

    A prompt's pictures share their seed, hence their lens: what one of them shows helps with the next.
    """

    def load(self, device: str) -> Renderer:
        """Load the pipeline on "cpu" or "gpu:N"."""
        renderer = super().load(device)
        renderer.kind += " behind hidden lenses"
        renderer.change = lambda images, seeds: look(images, [lens_of(seed) for seed in seeds])
        return renderer

    def oracle(self, best: str, seed: int) -> str:
        """The best words for a request, given the lens of its seed and those that are best without."""
        return undone(best, lens_of(seed))
