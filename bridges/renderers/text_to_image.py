"""Any text-to-image pipeline of diffusers: Stable Diffusion, SDXL, FLUX, Sana, PixArt and others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridges.pipeline_judge import PipelineJudge

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class TextToImage(PipelineJudge):
    """Draws pictures with any text-to-image pipeline of diffusers."""

    def find(self) -> tuple[Path | str, dict, type[DiffusionPipeline]]:
        """Find the pipeline, its table of contents and its class; no weight is read."""
        from bridges.diffusion import find_pipeline
        from bridges.loading import quiet_loading

        with quiet_loading():  # it imports all pipelines, with what they warn of
            from diffusers.pipelines.auto_pipeline import AUTO_TEXT2IMAGE_PIPELINES_MAPPING
        kinds = {kind.__name__: kind for kind in AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values()}
        source, index = find_pipeline(self.path, *kinds)
        return source, index, kinds[index["_class_name"]]
