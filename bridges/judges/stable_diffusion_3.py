"""Stable Diffusion 3 (Esser et al. 2024, arXiv:2403.03206) through diffusers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridges.judges import PipelineJudge, RendererTraining

if TYPE_CHECKING:
    from bridges.diffusion import Renderer


class StableDiffusion3(PipelineJudge):
    """Draw pictures with a `StableDiffusion3Pipeline`."""

    use_t5: bool = True
    """Load the third text encoder; without it prompts end at CLIP's window of 77 tokens."""
    train: RendererTraining | None = None
    """Training of the renderer (docs/renderer.md); null for none."""

    def check(self) -> None:
        """Refuse a missing pipeline, or one of another kind, without reading weights."""
        from bridges.diffusion import find_pipeline

        find_pipeline(self.path)
        if self.train:
            from bridges.trainable import check_training

            check_training(self)

    def memory(self) -> list[tuple[str, int, str]]:
        """Return the pipeline's memory, and that of its training."""
        parts = super().memory()
        if self.train:
            from bridges.trainable import training_memory

            parts += training_memory(self, self.train)
        return parts

    def load(self, device: str) -> Renderer:
        """Load the pipeline on "cpu" or "gpu:N", only from safetensors and without running its code."""
        from bridges.diffusion import load_stable_diffusion_3

        return load_stable_diffusion_3(self, device, use_t5=self.use_t5)
