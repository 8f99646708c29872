"""The miniature's renderer behind a hidden lens: only the picture shows how to correct the words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridges.miniature.world import lens_of, look, undone
from grpo_jax.config.fields import PositiveCount, resume_mutable
from grpo_jax.config.judge import Judge

if TYPE_CHECKING:
    from bridges.diffusion import Renderer


class HiddenLens(Judge):
    """Draws with the miniature's renderer and shows each picture through the lens of its seed.

    A prompt's pictures share their seed, hence their lens: one of them helps with the next.
    """

    steps: PositiveCount = 2
    """Denoising steps in training."""
    eval_steps: PositiveCount = 4
    """Denoising steps in evaluation."""
    batch_size: PositiveCount = resume_mutable(64)
    """Pictures drawn at once."""

    def load(self, device: str) -> Renderer:
        """Load the miniature's pipeline on "cpu" or "gpu:N"."""
        from bridges.diffusion import RenderSettings, load_stable_diffusion_3

        renderer = load_stable_diffusion_3(
            "miniature",
            device,
            RenderSettings(self.steps, 1.0, batch_size=self.batch_size),
            RenderSettings(self.eval_steps, 1.0, batch_size=self.batch_size),
        )
        renderer.kind += " behind hidden lenses"
        renderer.change = lambda images, seeds: look(images, [lens_of(seed) for seed in seeds])
        return renderer

    def oracle(self, best: str, seed: int) -> str:
        """The best words for a request, given the lens of its seed and those that are best without."""
        return undone(best, lens_of(seed))

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights from the config files, and the cache."""
        from bridges import loading

        sizes, _, _ = loading.pipeline_sizes("miniature")
        return [
            ("pipeline", loading.ITEM_BYTES["float32"] * sum(sizes.values()), "float32"),
            ("picture cache", 2**28, "once full"),
        ]
