"""Any pipeline of diffusers' `AutoPipelineForText2Image`: SDXL, FLUX, Sana, PixArt and others."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridges.trainable_pipeline import TrainablePipeline
from grpo_jax.config.fields import PositiveCount, require, resume_mutable
from grpo_jax.errors import UserError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from bridges.diffusion import Renderer


class TextToImage(TrainablePipeline):
    """Draw pictures with any text-to-image pipeline of diffusers."""

    negative_prompt: str = ""
    """Negative prompt, with guidance and eval_guidance above 1; empty for the pipeline's default."""
    max_sequence_length: int = 0
    """Longest text of a text encoder without its own window, in tokens; 0 for the pipeline's."""
    lora: str = ""
    """Folder, safetensors file or hub id of LoRA weights to add to the pipeline's; empty for none."""
    batch_size: PositiveCount = resume_mutable(8)
    """Pictures per batch."""

    def __post_init__(self) -> None:
        length = self.max_sequence_length
        require(0 <= length <= 512, "max_sequence_length", "a number from 0 to 512", length)
        guided = not self.negative_prompt or min(one.guidance for one in self.settings()) > 1
        require(guided, "negative_prompt", "empty, or guidance and eval_guidance above 1", self.negative_prompt)

    def check(self) -> None:
        """Refuse a missing pipeline, one of another kind, and fields that it ignores, without reading weights."""
        from bridges.loading import local_folder

        _, _, kind = self._find()
        takes = inspect.signature(kind.__call__).parameters
        for name in ("negative_prompt", "max_sequence_length"):
            default = not getattr(self, name) or name in takes
            require(default, name, f"its default, as a {kind.__name__} takes none", getattr(self, name))
        if self.lora and not Path(self.lora).expanduser().is_file():
            local_folder(self.lora)
        super().check()

    def _find(self) -> tuple[Path | str, dict, type[DiffusionPipeline]]:
        """Find the pipeline, its table of contents and its class, without reading weights."""
        from bridges.diffusion import find_pipeline
        from bridges.loading import quiet_loading

        with quiet_loading():  # it imports all pipelines, some of which warn
            from diffusers.pipelines.auto_pipeline import AUTO_TEXT2IMAGE_PIPELINES_MAPPING
        kinds = {kind.__name__: kind for kind in AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values()}
        source, index = find_pipeline(self.path, *kinds)
        return source, index, kinds[index["_class_name"]]

    def load(self, device: str) -> Renderer:
        """Load the pipeline on "cpu" or "gpu:N", and render a test picture in two steps.

        It reads only safetensors and runs no code of the folder. Parts that check or mark pictures (safety checker,
        watermark) are omitted, since they would change the judged picture. UserError if there is no such pipeline or
        LoRA, or weights are missing, broken, gated or incompatible.
        """
        from bridges.diffusion import Renderer, RenderError, denoiser, load_pipeline
        from bridges.loading import DTYPES, torch_device

        self.check()
        target = torch_device(device)
        source, index, kind = self._find()
        pipeline = load_pipeline(kind, source, target, DTYPES[self.dtype], **_left_out(kind, index))
        most = max(one.guidance for one in self.settings())
        if "true_cfg_scale" in inspect.signature(kind.__call__).parameters:  # FLUX: its network reads guidance, or none
            guided = most == 1 or denoiser(pipeline).config.get("guidance_embeds")
            require(guided, "guidance, eval_guidance", f"1, as {self.path} draws without guidance", most)
            negative = self.negative_prompt
            require(not negative, "negative_prompt", f"none, as {self.path} reads none", negative)
        if self.lora:
            _merge_lora(pipeline, self.lora)
        renderer = Renderer(
            pipeline,
            target,
            *self.settings(self.negative_prompt or None),
            name=self.path,
            cache_megabytes=self.cache_megabytes,
            length=self.max_sequence_length or None,
        )
        try:  # a test picture shows unsuitable sizes and schedulers before training
            renderer.render([""], [0], replace(renderer.training, steps=2, guidance=most))
        except RenderError as error:
            raise UserError(f"{kind.__name__}: {error}") from error
        renderer.kind += f" and LoRA {self.lora}" if self.lora else ""
        return renderer


def _left_out(kind: type[DiffusionPipeline], index: dict) -> dict[str, object]:
    """Return replacements of parts that the folder lacks or that would alter the pictures."""
    parts: dict[str, object] = {name: None for name, value in index.items() if value == [None, None]}
    painting = {"safety_checker": None, "requires_safety_checker": False, "add_watermarker": False}
    takes = inspect.signature(kind.__init__).parameters
    return parts | {name: value for name, value in painting.items() if name in takes}


def _merge_lora(pipeline: DiffusionPipeline, path: str) -> None:
    """Merge LoRA weights into the pipeline's."""
    from bridges.loading import loading

    require(hasattr(pipeline, "load_lora_weights"), "lora", f"none, as a {type(pipeline).__name__} takes none", path)
    with loading(f"LoRA weights from {path}"):
        pipeline.load_lora_weights(str(Path(path).expanduser()), use_safetensors=True)
        fitting = pipeline.get_list_adapters()
        require(fitting, f"lora {path}", f"weights of a {type(pipeline).__name__}", "those of another")
        pipeline.fuse_lora(components=list(fitting))  # the default omits FLUX's text encoder
        pipeline.unload_lora_weights()
