"""Pictures drawn from pictures: img2img, instructed editing (InstructPix2Pix, FLUX Kontext) through diffusers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from bridges.pipeline_judge import PipelineJudge
from grpo_jax.config.fields import require
from grpo_jax.errors import UserError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from bridges.diffusion import Renderer


@dataclass(frozen=True)
class ImageToImage(PipelineJudge):
    """Draws each picture from the row's, as the text says: any image-to-image pipeline of diffusers.

    Args:
        strength: How far a picture is led away from the row's, which is also the share of the denoising steps that are
            taken; for pipelines of img2img alone.
        image_guidance: Guidance towards the row's picture, InstructPix2Pix's alone.
    """

    strength: float = 0.6
    image_guidance: float = 1.5

    takes_pictures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.strength <= 1, "strength", "a number above 0 and at most 1", self.strength)
        require(self.image_guidance >= 1, "image_guidance", "a number >= 1", self.image_guidance)

    def check(self) -> None:
        """Refuse what is not there, what the pipeline cannot do, and so few steps that none would be taken."""
        import inspect

        super().check()
        if "strength" in inspect.signature(self.find()[2].__call__).parameters:
            fewest = min(self.steps, self.eval_steps)
            if int(fewest * self.strength) < 1:
                raise UserError(f"strength {self.strength:g} of {fewest} steps takes none: raise one of them")

    def find(self) -> tuple[Path | str, dict, type[DiffusionPipeline]]:
        """Find the pipeline, its table of contents and its class; no weight is read.

        A folder of a text-to-image pipeline is taken as that of its family's img2img, whose parts are the same.
        """
        from bridges.diffusion import find_pipeline
        from bridges.loading import quiet_loading

        with quiet_loading():  # it imports all pipelines, with what they warn of
            import diffusers
            from diffusers.pipelines import auto_pipeline

            instructed = (
                diffusers.StableDiffusionInstructPix2PixPipeline,
                diffusers.StableDiffusionXLInstructPix2PixPipeline,
            )
        ours = auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING
        texts = auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING
        kinds = {texts[family].__name__: kind for family, kind in ours.items() if family in texts}
        kinds |= {kind.__name__: kind for kind in (*ours.values(), *instructed)}
        source, index = find_pipeline(self.path, *kinds, called="image-to-image")
        return source, index, kinds[index["_class_name"]]

    def prepare(self, renderer: Renderer) -> None:
        """Have it take pictures, with what the pipeline takes of the fields besides."""
        renderer.takes_pictures = True
        own = {"strength": self.strength, "image_guidance_scale": self.image_guidance}
        renderer.options = {name: value for name, value in own.items() if name in renderer.about.takes}
