"""Stable Diffusion 3 (Esser et al. 2024, arXiv:2403.03206) through diffusers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridges.judges import PipelineJudge

if TYPE_CHECKING:
    from bridges.diffusion import Renderer

KIND = "StableDiffusion3Pipeline"


class StableDiffusion3(PipelineJudge):
    """Draws pictures with a `StableDiffusion3Pipeline`."""

    use_t5: bool = True
    """Load the third text encoder; without it prompts end at CLIP's window of 77 tokens."""

    def check(self) -> None:
        """Refuse a pipeline that is not there or of another kind; no weight is read."""
        from bridges.diffusion import find_pipeline

        find_pipeline(self.path, KIND)

    def load(self, device: str) -> Renderer:
        """Load the pipeline on "cpu" or "gpu:N"; only safetensors are read, and no code beside them is run."""
        from diffusers import StableDiffusion3Pipeline

        from bridges.diffusion import Renderer, find_pipeline, load_pipeline
        from bridges.loading import DTYPES, torch_device

        target = torch_device(device)
        source, index = find_pipeline(self.path, KIND)
        has_t5 = (index.get("text_encoder_3") or [None, None])[1] is not None
        absent = {} if self.use_t5 and has_t5 else {"text_encoder_3": None, "tokenizer_3": None}
        pipeline = load_pipeline(StableDiffusion3Pipeline, source, target, DTYPES[self.dtype], **absent)
        renderer = Renderer(pipeline, target, *self.settings(), name=self.path, cache_megabytes=self.cache_megabytes)
        renderer.kind = "Stable Diffusion 3"
        return renderer

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights from the config files, and the working memory of the VAE."""
        from bridges.loading import renderer_memory

        return renderer_memory(self, use_t5=self.use_t5)
