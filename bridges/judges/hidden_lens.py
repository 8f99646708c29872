"""The miniature's renderer behind a hidden lens: only the picture shows how to correct the words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridges.judges import PipelineJudge
from bridges.miniature.world import lens_of, look, undone

if TYPE_CHECKING:
    from bridges.diffusion import Renderer


class HiddenLens(PipelineJudge):
    """Draws with the miniature's renderer and shows each picture through the lens of its seed.

    A prompt's pictures share their seed, hence their lens: one of them helps with the next.
    """

    def load(self, device: str) -> Renderer:
        """Load the pipeline on "cpu" or "gpu:N"."""
        from bridges.diffusion import load_stable_diffusion_3

        own = {"dtype": self.dtype, "cache_megabytes": self.cache_megabytes}
        renderer = load_stable_diffusion_3(self.path, device, *self.settings(), **own)
        renderer.kind += " behind hidden lenses"
        renderer.change = lambda images, seeds: look(images, [lens_of(seed) for seed in seeds])
        return renderer

    def oracle(self, best: str, seed: int) -> str:
        """Return the best words for a request under the lens of its seed; `best` are those without a lens."""
        return undone(best, lens_of(seed))

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights from the config files, and the working memory of the VAE."""
        from bridges.loading import renderer_memory

        return renderer_memory(self)
