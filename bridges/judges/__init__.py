"""Judges: one module each, with one pydantic model and without heavy imports before `load`.

Its fields are the judge's config (`judges.NAME.FIELD`), each with its help. `grpo_jax.config.judge` is the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from grpo_jax.config.fields import (
    Coefficient,
    Count,
    NonNegative,
    OneOrMore,
    Positive,
    PositiveCount,
    Section,
    Share,
    Words,
    resume_mutable,
)
from grpo_jax.config.judge import Judge

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ModelJudge(Judge):
    """Base class of a judge that is a model of transformers."""

    auto: ClassVar[str]  # its Auto class
    working_bytes: ClassVar[int]  # allowance for a batch

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


@dataclass(frozen=True)
class RenderSettings:
    """Rendering settings."""

    steps: int
    guidance: float  # classifier-free guidance scale; 1 disables it, at half the cost
    size: int = 0  # height and width in pixels; 0 for the model's default
    batch_size: int = 1  # the last batch of a call is padded to it
    negative_prompt: str | None = None  # None takes the pipeline's own
    weights: str = ""  # LoRA weights that draw, of a renderer that has any; empty for none


class RendererLora(Section):
    """LoRA weights of the renderer's transformer."""

    rank: PositiveCount = 32
    """Rank of the matrices."""
    alpha: Positive = 64.0
    """The matrices' product is scaled by alpha / rank."""
    targets: Words = [*("to_q", "to_k", "to_v", "to_out.0"), *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")]
    """Layers with LoRA; by default the projections of attention."""


class OldDecay(Section):
    """Share d of the old weights that an iteration keeps: d = min(factor · updates, maximum)."""

    factor: NonNegative = 0.001
    """Growth of the share per update."""
    maximum: Share = 0.5
    """Largest share."""


class RendererTraining(Section):
    """Training of a renderer on its own judged pictures by DiffusionNFT (arXiv:2509.16117), with its constants."""

    lora: RendererLora = RendererLora()
    credit: Literal["prompt", "text"] = "prompt"
    """Pictures whose rewards are compared: all of a prompt, or those of equal texts."""
    advantage_scale: Literal["batch", "group"] = "batch"
    """Standard deviation that advantages are divided by: of all rewards of the batch, or of the compared ones."""
    advantage_clip: Positive = 5.0
    """Bound of the advantages."""
    beta: Positive = 1.0
    """Strength of DiffusionNFT's implicit guidance; published .1 for OCR."""
    reference_coef: Coefficient = 1.0e-4
    """Weight of the distance from the renderer without LoRA; 0 saves a forward pass."""
    old_decay: OldDecay = OldDecay()
    updates: PositiveCount = 1
    """Optimizer steps per iteration, each with new noise and times."""
    times: PositiveCount = 1
    """Different times of the sampler at which a step trains each picture, at most all; published: all but one."""
    learning_rate: Positive = 3.0e-4
    """Constant rate of AdamW."""
    weight_decay: NonNegative = 1.0e-4
    """Decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""
    micro_batch: PositiveCount = resume_mutable(8)
    """Pictures per forward pass; changes memory, not the result."""
    autocast: bool = False
    """Compute the transformer in bfloat16, also to draw, with the weights in `dtype`."""


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
    eval_steps: PositiveCount | None = None
    """Denoising steps in evaluation; null takes `steps`."""
    eval_guidance: OneOrMore | None = None
    """Guidance scale in evaluation; null takes `guidance`."""
    cache_megabytes: Count = resume_mutable(256)
    """Memory for pictures kept by (prompt, seed, settings); 0 keeps none."""
    batch_size: PositiveCount = resume_mutable(32)
    """Pictures per batch."""
    pictures: PositiveCount = 1
    """Pictures of each text in training, of different noise; its rewards are their means (docs/renderer.md)."""

    def memory(self) -> list[tuple[str, int, str]]:
        """Return the weights, from the config files, and the working memory of the VAE; LoRA weights are merged.

        A judge with `use_t5` notes whether the third text encoder is loaded. The VAE, which dominates, holds three
        full-size activations of its second widest features: before, within and after its last block.
        """
        from bridges.loading import DTYPES, pipeline_sizes

        use_t5 = getattr(self, "use_t5", None)
        sizes, widths, edge = pipeline_sizes(self.path)
        edge = self.size or edge
        item = DTYPES[self.dtype].itemsize
        network, called = ("transformer", "transformer") if "transformer" in sizes else ("unet", "U-Net")
        encoders = {name: size for name, size in sizes.items() if name.startswith("text_encoder")}
        note = self.dtype
        if use_t5 is False:
            encoders.pop("text_encoder_3", None)
        if use_t5 is not None:
            note += ", with T5" if "text_encoder_3" in encoders else ", without T5"
        features = 3 * self.batch_size * widths[:2][-1] * edge * edge * item
        return [
            (f"{called} and VAE", item * (sizes[network] + sizes["vae"]), self.dtype),
            ("text encoders", item * sum(encoders.values()), note),
            ("drawing", features, f"estimate: {self.batch_size} pictures of {edge} x {edge} in the VAE"),
            ("picture cache", self.cache_megabytes * 2**20, "cache_megabytes, once full"),
        ]

    def settings(self, negative_prompt: str | None = None) -> tuple[RenderSettings, RenderSettings]:
        """Return the settings of training and of evaluation."""
        training = RenderSettings(self.steps, self.guidance, self.size, self.batch_size, negative_prompt)
        steps, guidance = self.eval_steps or self.steps, self.eval_guidance or self.guidance
        return training, replace(training, steps=steps, guidance=guidance)
