"""The miniature's renderer behind a hidden lens: only the picture shows how to correct the words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridges.judges import PipelineJudge
from bridges.miniature.world import lens_of, look, undone

if TYPE_CHECKING:
    from bridges.diffusion import Renderer


class HiddenLens(PipelineJudge):
    """Draw with the miniature's renderer, and show each picture through the lens of its seed.

    A prompt's pictures share their seed and lens, so one picture helps with the next.
    """

    def load(self, device: str) -> Renderer:
        """Load the pipeline on "cpu" or "gpu:N"."""
        from bridges.diffusion import load_stable_diffusion_3

        renderer = load_stable_diffusion_3(self, device)
        renderer.kind += " behind hidden lenses"
        renderer.change = lambda images, seeds: look(images, [lens_of(seed) for seed in seeds])
        return renderer

    def oracle(self, best: str, seed: int) -> str:
        """Return the best words for a request under the lens of its seed; `best` are those without a lens."""
        return undone(best, lens_of(seed))
