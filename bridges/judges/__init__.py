"""Judges: one module each, with one pydantic model and without heavy imports before `load`.

Its fields are the judge's config (`judges.NAME.FIELD`), each with its help. `grpo_jax.config.judge` is the protocol.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from grpo_jax.config.fields import Count, OneOrMore, PositiveCount, resume_mutable
from grpo_jax.config.judge import Judge

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from bridges.diffusion import RenderSettings


class ModelJudge(Judge):
    """Base class of a judge that is a model of transformers.

    Attributes:
        auto: Its Auto class.
        working_bytes: Allowance for a batch.
    """

    auto: ClassVar[str]
    working_bytes: ClassVar[int]

    path: str
    """Folder or hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of its weights."""

    def check(self) -> None:
        """Refuse a missing or an unsuitable folder, without reading weights."""
        from bridges.loading import load_config, local_folder

        if local_folder(self.path) is not None:
            self.check_config(load_config(self.path))

    def check_config(self, config: PretrainedConfig) -> None:
        """Raise UserError if the model's config does not suit the judge."""

    def memory(self) -> list[tuple[str, int, str]]:
        """Return the weights, and an allowance for a batch."""
        from bridges.loading import DTYPES, model_size

        weights = model_size(self.path, self.auto) * DTYPES[self.dtype].itemsize
        return [("model", weights, self.dtype), ("batch", self.working_bytes, "allowance")]


class PipelineJudge(Judge):
    """Base class of a renderer that is a pipeline of diffusers."""

    path: str = "miniature"
    """Folder or hub id of the pipeline, or "miniature"."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of its weights."""
    size: Count = 0
    """Width and height in pixels; 0 takes the model's own."""
    steps: PositiveCount = 10
    """Denoising steps in training."""
    guidance: OneOrMore = 1.0
    """Classifier-free guidance scale in training; 1 switches it off."""
    eval_steps: PositiveCount = 10
    """Denoising steps in evaluation."""
    eval_guidance: OneOrMore = 1.0
    """Guidance scale in evaluation."""
    cache_megabytes: Count = resume_mutable(256)
    """Memory for pictures kept by (prompt, seed, settings); 0 keeps none."""
    batch_size: PositiveCount = resume_mutable(32)
    """Pictures per batch."""

    def memory(self) -> list[tuple[str, int, str]]:
        """Return the weights, from the config files, and the working memory of the VAE; LoRA weights are merged."""
        from bridges.loading import renderer_memory

        return renderer_memory(self)

    def settings(self, negative_prompt: str | None = None) -> tuple[RenderSettings, RenderSettings]:
        """Return the settings of training and of evaluation."""
        from bridges.diffusion import RenderSettings

        training = RenderSettings(self.steps, self.guidance, self.size, self.batch_size, negative_prompt)
        return training, replace(training, steps=self.eval_steps, guidance=self.eval_guidance)
