"""Stable Diffusion 3 (Esser et al. 2024, arXiv:2403.03206) through diffusers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridges.trainable_pipeline import TrainablePipeline

if TYPE_CHECKING:
    from bridges.diffusion import Renderer


class StableDiffusion3(TrainablePipeline):
    """Draw pictures with a `StableDiffusion3Pipeline`."""

    use_t5: bool = True
    """Load the third text encoder; without it prompts end at CLIP's window of 77 tokens."""

    def load(self, device: str) -> Renderer:
        """Load the pipeline on "cpu" or "gpu:N", only from safetensors and without running its code."""
        from bridges.diffusion import load_stable_diffusion_3

        return load_stable_diffusion_3(self, device, use_t5=self.use_t5)
