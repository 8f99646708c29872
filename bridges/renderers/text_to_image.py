"""Any text-to-image pipeline of diffusers: Stable Diffusion, SDXL, FLUX, Sana, PixArt and others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_jax.config.fields import may_change, require


@dataclass(frozen=True)
class TextToImage:
    """Draws pictures with any text-to-image pipeline of diffusers.

    Args:
        path: Folder or hub id of the pipeline, or "miniature".
        dtype: Type of its weights.
        size: Width and height in pixels; 0 takes the model's own.
        steps: Denoising steps in training.
        guidance: Guidance scale in training; 1 switches it off.
        eval_steps: Denoising steps in evaluation.
        eval_guidance: Guidance scale in evaluation.
        negative_prompt: What guidance leads away from, with guidance and eval_guidance above 1; empty is what the
            pipeline does without.
        max_sequence_length: Tokens that a text encoder without a window of its own reads; 0 takes the pipeline's.
        scheduler: Scheduler of diffusers, by its class; empty keeps the pipeline's.
        scheduler_options: Fields of the scheduler's config that differ from the pipeline's.
        lora: Folder, safetensors file or hub id of LoRA weights, which are added to the pipeline's; empty without.
        lora_scale: What they are multiplied by.
        batch_size: Pictures drawn at once.
        cache_megabytes: Memory for pictures kept by (prompt, seed, settings); 0 keeps none.
    """

    path: str = "miniature"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    size: int = 0
    steps: int = 10
    guidance: float = 1.0
    eval_steps: int = 10
    eval_guidance: float = 1.0
    negative_prompt: str = ""
    max_sequence_length: int = 0
    scheduler: str = ""
    scheduler_options: dict[str, Any] = field(default_factory=dict)
    lora: str = ""
    lora_scale: float = 1.0
    batch_size: int = may_change(8)
    cache_megabytes: int = may_change(256)

    def __post_init__(self) -> None:
        """Checks the ranges."""
        for name in ("steps", "eval_steps", "batch_size", "guidance", "eval_guidance"):
            require(getattr(self, name) >= 1, name, "a number >= 1", getattr(self, name))
        for name in ("size", "cache_megabytes"):
            require(getattr(self, name) >= 0, name, "a number >= 0", getattr(self, name))
        length = self.max_sequence_length
        require(0 <= length <= 512, "max_sequence_length", "a number from 0 to 512", length)

    def check(self) -> None:
        """Refuses what is not there, and what the pipeline cannot do; no weight is read."""
        from bridges import text_to_image

        text_to_image.check_abilities(
            self.path,
            guidance=(self.guidance, self.eval_guidance),
            negative_prompt=self.negative_prompt,
            length=self.max_sequence_length,
        )
        if self.scheduler or self.scheduler_options:
            _, index, _ = text_to_image.find_any(self.path)
            text_to_image.find_scheduler(self.scheduler or index["scheduler"][1], self.scheduler_options)
        if self.lora:
            text_to_image.find_lora(self.lora)

    def load(self, device: str) -> Any:
        """The pipeline on "cpu" or "gpu:N", as a `bridges.diffusion.ConfiguredRenderer`; it has drawn a picture."""
        from dataclasses import replace

        from bridges import text_to_image
        from bridges.diffusion import ConfiguredRenderer, RenderSettings

        self.check()
        renderer = text_to_image.load_any(
            self.path,
            device=device,
            dtype=self.dtype,
            length=self.max_sequence_length,
            scheduler=self.scheduler,
            scheduler_options=self.scheduler_options,
            lora=self.lora,
            lora_scale=self.lora_scale,
            cache_bytes=self.cache_megabytes * 2**20,
        )
        size, negative = self.size or renderer.default_size, self.negative_prompt or None
        training = RenderSettings(self.steps, self.guidance, size, batch_size=self.batch_size, negative_prompt=negative)
        evaluation = replace(training, steps=self.eval_steps, guidance=self.eval_guidance)
        text_to_image.try_out(renderer, max(training, evaluation, key=lambda settings: settings.guidance))
        return ConfiguredRenderer(renderer, training, evaluation, self.path, self._described(renderer))

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights from the config files, and the working memory of the VAE; LoRA weights are merged."""
        from bridges import shapes

        sizes, widths, edge = shapes.pipeline_sizes(self.path)
        return shapes.renderer_memory(
            sizes,
            widths,
            self.size or edge,
            dtype=self.dtype,
            batch_size=self.batch_size,
            cache_megabytes=self.cache_megabytes,
        )

    def savings(self) -> list[dict[str, Any]]:
        """Fields that can take less memory; working memory first."""
        return [{"batch_size": 1}, {"dtype": "bfloat16"}]

    def _described(self, renderer: Any) -> str:
        scheduler = type(renderer.pipeline.scheduler).__name__
        lora = f" and LoRA {self.lora} × {self.lora_scale:g}" if self.lora else ""
        return f"{renderer.about.kind} with {scheduler}{lora}"
