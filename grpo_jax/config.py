"""What a run is made of: frozen dataclasses, their checks, YAML files and the command line.

Every field has its help line in the docstring of its class; `python -m grpo_jax.train --help` prints them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_jax.errors import UserError

Dtype = Literal["float32", "bfloat16", "float16"]


def _require(condition: bool, name: str, expected: str, came: object) -> None:
    if not condition:
        raise UserError(f"{name}: expected {expected}, got {came!r}")


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685); rank 0 trains every weight.

    Args:
        rank: Rank of the adapters; 0 switches them off and trains all weights.
        alpha: Adapters are scaled by alpha / rank.
        targets: Projections that get an adapter.
    """

    rank: int = 0
    alpha: float = 32.0
    targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])

    def __post_init__(self) -> None:
        """Checks the ranges."""
        _require(self.rank >= 0, "policy.lora.rank", "a number >= 0", self.rank)
        _require(self.alpha > 0, "policy.lora.alpha", "a number > 0", self.alpha)
        _require(bool(self.targets), "policy.lora.targets", "at least one projection", self.targets)


@dataclass(frozen=True)
class PolicySection:
    """The policy that is trained.

    Args:
        path: Hugging Face folder of a Qwen2, Qwen2.5, Qwen3, Llama or Qwen2-VL model, or "miniature".
        compute_dtype: Type of the activations.
        frozen_dtype: Type of weights that are not trained (with LoRA); trained weights are float32.
        remat: Recompute layer activations in the backward pass instead of keeping them.
        lora: Low-rank adapters.
    """

    path: str = "miniature"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    frozen_dtype: Dtype = "float32"
    remat: bool = True
    lora: LoraSection = field(default_factory=LoraSection)


@dataclass(frozen=True)
class DataSection:
    """Prompts.

    Args:
        prompts: "miniature", "builtin", "builtin:plain", "builtin:attributes", "builtin:crowded",
            or a .jsonl/.txt file.
        held_out: Share of a file's prompts kept apart for testing (and as many for validation) if it has no
            "split" column.
        form: "rewrite" asks the policy for a new prompt; "append" lets it continue the user's.
        instruction: What a chat policy is told in the rewrite form; {prompt} stands for the user's prompt.
            Empty: the chat template alone.
        max_prompt_tokens: Longest prompt in policy tokens, instruction included; a longer one is an error.
        allowed_tokens: "all", or "english" to sample printable ASCII tokens alone.
    """

    prompts: str = "miniature"
    held_out: float = 0.2
    form: Literal["rewrite", "append"] = "rewrite"
    instruction: str = ""
    max_prompt_tokens: int = 256
    allowed_tokens: Literal["all", "english"] = "all"

    def __post_init__(self) -> None:
        """Checks the ranges."""
        _require(0 < self.held_out < 0.5, "data.held_out", "a share between 0 and 0.5", self.held_out)
        _require(self.max_prompt_tokens > 0, "data.max_prompt_tokens", "a number > 0", self.max_prompt_tokens)


@dataclass(frozen=True)
class SamplingSection:
    """How completions are drawn.

    Args:
        group_size: Completions per prompt (G).
        max_new_tokens: Longest completion (T).
        temperature: Softmax temperature of the trained distribution.
        top_k: Draw among the k likeliest tokens; 0 for all.
        top_p: Draw within the smallest set of this probability; 1 for all.
        min_p: Drop tokens below this share of the likeliest token's probability; 0 for none.
    """

    group_size: int = 8
    max_new_tokens: int = 32
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        _require(self.group_size >= 2, "sampling.group_size", "at least 2 (a group is compared)", self.group_size)
        _require(self.max_new_tokens >= 1, "sampling.max_new_tokens", "a number >= 1", self.max_new_tokens)
        _require(self.temperature > 0, "sampling.temperature", "a number > 0", self.temperature)
        _require(self.top_k >= 0, "sampling.top_k", "a number >= 0", self.top_k)
        _require(0 < self.top_p <= 1, "sampling.top_p", "a number in (0, 1]", self.top_p)
        _require(0 <= self.min_p < 1, "sampling.min_p", "a number in [0, 1)", self.min_p)


@dataclass(frozen=True)
class AlgorithmSection:
    """Advantages and loss.

    Args:
        preset: Loss preset: grpo, dr_grpo, dapo, bnpo, gspo, cispo or sapo.
        advantage: "gdpo" normalises each reward in its group; "grpo" the weighted sum; "rloo" leaves one out.
        whiten: What GDPO whitens over the batch: "sequence", "token" or "none".
        clip_low: Lower clip bound; null takes the preset's.
        clip_high: Upper clip bound; null takes the preset's.
        kl_coef: Weight of the KL term against the reference; 0 never runs the reference.
        kl_estimator: KL estimator.
        kl_corrected: Weigh the KL term by the policy ratio, which makes its gradient unbiased.
        entropy_coef: Weight of the entropy bonus.
        update_ref_every: Refresh the reference every so many iterations; 0 keeps the start.
        mask_truncated: Leave completions that hit max_new_tokens out of the loss.
    """

    preset: Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo"] = "grpo"
    advantage: Literal["gdpo", "grpo", "rloo"] = "gdpo"
    whiten: Literal["sequence", "token", "none"] = "sequence"
    clip_low: float | None = None
    clip_high: float | None = None
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_corrected: bool = False
    entropy_coef: float = 0.0
    update_ref_every: int = 0
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        """Checks the ranges."""
        for name in ("kl_coef", "entropy_coef", "update_ref_every"):
            value = getattr(self, name)
            _require(value >= 0, f"algorithm.{name}", "a number >= 0", value)
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"algorithm.{name}", "null or a number > 0", value)
            unclipped = self.preset in ("cispo", "sapo")
            _require(
                value is None or not unclipped,
                f"algorithm.{name}",
                f"null with preset {self.preset!r}, which has no clip bounds",
                value,
            )
        low = self.clip_low
        _require(low is None or low <= 1, "algorithm.clip_low", "null or a number <= 1", low)


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW and its schedule.

    Args:
        learning_rate: Peak learning rate.
        schedule: Learning-rate schedule after the warm-up.
        warmup_steps: Updates of linear warm-up.
        weight_decay: Decoupled weight decay.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        max_grad_norm: Gradients are scaled down to this global norm; 0 for never.
    """

    learning_rate: float = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        _require(self.learning_rate > 0, "optimizer.learning_rate", "a number > 0", self.learning_rate)
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            _require(value >= 0, f"optimizer.{name}", "a number >= 0", value)
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name}", "a number in [0, 1)", getattr(self, name))


@dataclass(frozen=True)
class TrainingSection:
    """The loop.

    Args:
        prompts_per_batch: Prompts of one iteration (P).
        max_steps: Iterations in all; 0 leaves it to num_epochs.
        num_epochs: Passes over the training prompts when max_steps is 0.
        inner_epochs: Passes over one sampled batch.
        minibatches: Optimizer updates per pass.
        accumulation: Micro-batches per update, to save memory; the gradient stays the same.
        chunk_prompts: Prompts that travel together through sampling, rendering and scoring; 0 for all.
        save_every: Iterations between checkpoints; 0 for the end only.
        keep_checkpoints: Checkpoints kept beside best and final.
    """

    prompts_per_batch: int = 12
    max_steps: int = 100
    num_epochs: int = 1
    inner_epochs: int = 1
    minibatches: int = 1
    accumulation: int = 1
    chunk_prompts: int = 0
    save_every: int = 25
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        """Checks the ranges and that batches divide."""
        for name in ("prompts_per_batch", "num_epochs", "inner_epochs", "minibatches", "accumulation"):
            _require(getattr(self, name) >= 1, f"training.{name}", "a number >= 1", getattr(self, name))
        for name in ("max_steps", "chunk_prompts", "save_every"):
            _require(getattr(self, name) >= 0, f"training.{name}", "a number >= 0", getattr(self, name))
        _require(self.keep_checkpoints >= 1, "training.keep_checkpoints", "a number >= 1", self.keep_checkpoints)
        parts = self.minibatches * self.accumulation
        _require(
            self.prompts_per_batch % parts == 0,
            "training.prompts_per_batch",
            f"a multiple of minibatches x accumulation = {parts}",
            self.prompts_per_batch,
        )


@dataclass(frozen=True)
class RendererSection:
    """The diffusion model that draws the pictures.

    Args:
        path: Folder or hub id of a StableDiffusion3Pipeline, or "miniature".
        dtype: Type of its weights.
        use_t5: Load the third text encoder; without it prompts end at CLIP's window of 77 tokens.
        size: Width and height in pixels; 0 takes the model's own.
        steps: Denoising steps in training.
        guidance: Classifier-free guidance scale in training; 1 switches it off.
        eval_steps: Denoising steps in evaluation.
        eval_guidance: Guidance scale in evaluation.
        batch_size: Pictures drawn at once.
        cache_megabytes: Memory for pictures kept by (prompt, seed, settings); 0 keeps none.
    """

    path: str = "miniature"
    dtype: Dtype = "float32"
    use_t5: bool = True
    size: int = 0
    steps: int = 10
    guidance: float = 1.0
    eval_steps: int = 10
    eval_guidance: float = 1.0
    batch_size: int = 32
    cache_megabytes: int = 256

    def __post_init__(self) -> None:
        """Checks the ranges."""
        for name in ("steps", "eval_steps", "batch_size"):
            _require(getattr(self, name) >= 1, f"renderer.{name}", "a number >= 1", getattr(self, name))
        for name in ("guidance", "eval_guidance"):
            _require(getattr(self, name) >= 1, f"renderer.{name}", "a number >= 1", getattr(self, name))
        for name in ("size", "cache_megabytes"):
            _require(getattr(self, name) >= 0, f"renderer.{name}", "a number >= 0", getattr(self, name))


@dataclass(frozen=True)
class ScorerSection:
    """The CLIP model that judges the pictures.

    Args:
        model: open_clip model name, a local folder, or "miniature".
        pretrained: Tag of the weights for a model name, such as laion2b_s34b_b79k.
        dtype: Type of its weights.
        quality_head: Safetensors file of an aesthetic head on the picture features, for the quality reward.
        watch_model: A second CLIP that is logged and never trained on; null for none.
        watch_pretrained: Tag of its weights.
    """

    model: str = "miniature"
    pretrained: str | None = None
    dtype: Dtype = "float32"
    quality_head: str | None = None
    watch_model: str | None = None
    watch_pretrained: str | None = None


@dataclass(frozen=True)
class RewardSection:
    """One reward: an objective of its own, never summed before the advantages.

    Args:
        name: alignment, alignment_gain, faithfulness, length, quality, or package.module:function or
            file.py:function.
        weight: Its weight among the objectives.
        condition_on: Count this reward only where the named one (of an import path, the function) reaches the
            threshold. Left out: always, but quality only where alignment_gain reaches 0 or, without it in the list,
            alignment 0.25. "none": always, quality too.
        threshold: The threshold of a condition_on that names a reward.
        options: Keyword options of a built-in reward.
    """

    name: str = "alignment"
    weight: float = 1.0
    condition_on: str | None = None
    threshold: float = 0.0
    options: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the ranges."""
        _require(bool(self.name), "rewards.name", "a name", self.name)
        _require(math.isfinite(self.weight), "rewards.weight", "a finite number", self.weight)

    @property
    def label(self) -> str:
        """What metrics call it: its name, of an import path the function alone."""
        return self.name.rpartition(":")[2]


@dataclass(frozen=True)
class EvaluationSection:
    """Held-out measurement.

    Args:
        prompts: Test prompts measured before and after; 0 for all of them.
        validation_prompts: Validation prompts on which the best checkpoint is chosen.
        every: Iterations between validations; 0 for never.
        gallery: Prompts shown in the before/after gallery.
        sampled: Measure sampled completions beside the greedy ones.
    """

    prompts: int = 128
    validation_prompts: int = 32
    every: int = 25
    gallery: int = 12
    sampled: bool = True

    def __post_init__(self) -> None:
        """Checks the ranges."""
        for name in ("prompts", "validation_prompts", "every", "gallery"):
            _require(getattr(self, name) >= 0, f"evaluation.{name}", "a number >= 0", getattr(self, name))


@dataclass(frozen=True)
class DeviceSection:
    """Where each part runs.

    Args:
        policy: "auto", "cpu" or "gpu:N".
        renderer: "auto", "cpu" or "gpu:N".
        scorer: "auto", "cpu" or "gpu:N".
    """

    policy: str = "auto"
    renderer: str = "auto"
    scorer: str = "auto"


@dataclass(frozen=True)
class Config:
    """A run of grpo_jax.

    Args:
        task: "prompt_enhancement" judges pictures drawn from the text; "text" judges the text itself.
        seed: Seed of everything random.
        run_dir: Folder of the run; null makes runs/TASK-TIME.
        resume: Continue the run in run_dir from its last checkpoint.
        deterministic: Ask GPUs for repeatable kernels (slower); the CPU always is.
        debug: Show tracebacks of user errors.
        report_to: Metric writers beside metrics.jsonl.
        on_judge_error: "stop" saves and ends the run; "missing" gives that completion no reward.
        judge_timeout: Seconds one chunk may spend in the renderer or the scorer; 0 for no limit.
        policy: The policy that is trained.
        data: Prompts.
        sampling: How completions are drawn.
        algorithm: Advantages and loss.
        optimizer: AdamW and its schedule.
        training: The loop.
        renderer: The diffusion model (prompt_enhancement).
        scorer: The CLIP model (prompt_enhancement).
        rewards: The objectives; empty takes the task's default.
        watch: Rewards that are logged and never trained on.
        evaluation: Held-out measurement.
        devices: Where each part runs.
    """

    task: Literal["prompt_enhancement", "text"] = "prompt_enhancement"
    seed: int = 0
    run_dir: str | None = None
    resume: bool = False
    deterministic: bool = False
    debug: bool = False
    report_to: list[Literal["tensorboard", "wandb"]] = field(default_factory=lambda: ["tensorboard"])
    on_judge_error: Literal["stop", "missing"] = "stop"
    judge_timeout: float = 0.0
    policy: PolicySection = field(default_factory=PolicySection)
    data: DataSection = field(default_factory=DataSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    renderer: RendererSection = field(default_factory=RendererSection)
    scorer: ScorerSection = field(default_factory=ScorerSection)
    rewards: list[RewardSection] = field(default_factory=list)
    watch: list[str] = field(default_factory=list)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    devices: DeviceSection = field(default_factory=DeviceSection)

    def __post_init__(self) -> None:
        """Checks what no section can check alone."""
        _require(0 <= self.seed < 2**63, "seed", "a number in [0, 2^63)", self.seed)
        _require(self.judge_timeout >= 0, "judge_timeout", "a number >= 0", self.judge_timeout)
        labels = [reward.label for reward in self.rewards]
        _require(len(set(labels)) == len(labels), "rewards", "each reward once, no two of one function name", labels)
        for reward in self.rewards:
            target, others = reward.condition_on, [label for label in labels if label != reward.label]
            _require(
                target in (None, "none", *others), f"rewards.{reward.label}.condition_on", f"one of {others}", target
            )
        chunk = self.training.chunk_prompts
        _require(
            chunk == 0 or self.training.prompts_per_batch % chunk == 0,
            "training.chunk_prompts",
            f"a divisor of prompts_per_batch = {self.training.prompts_per_batch}",
            chunk,
        )


def from_dict(values: dict[str, Any]) -> Config:
    """Builds a `Config` from nested plain values (as `to_dict` gives them); unknown fields are errors."""
    sections = {
        name: kind for name, kind in _SECTIONS.items() if name in values and not dataclasses.is_dataclass(values[name])
    }
    built = dict(values)
    for name, kind in sections.items():
        built[name] = _build(kind, values[name] or {}, name)
    built["rewards"] = [
        reward if isinstance(reward, RewardSection) else _build(RewardSection, reward, "rewards")
        for reward in values.get("rewards") or []
    ]
    return _build(Config, built, "")


_SECTIONS: dict[str, type] = {
    "policy": PolicySection,
    "data": DataSection,
    "sampling": SamplingSection,
    "algorithm": AlgorithmSection,
    "optimizer": OptimizerSection,
    "training": TrainingSection,
    "renderer": RendererSection,
    "scorer": ScorerSection,
    "evaluation": EvaluationSection,
    "devices": DeviceSection,
}


def _build(kind: type, values: dict[str, Any], name: str) -> Any:
    known = {member.name for member in dataclasses.fields(kind)}
    for key in values:
        _require(key in known, f"{name}.{key}".strip("."), f"one of {sorted(known)}", key)
    values = dict(values)
    if kind is PolicySection and isinstance(values.get("lora"), dict):
        values["lora"] = _build(LoraSection, values["lora"], "policy.lora")
    return kind(**values)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values of a `Config`, for YAML and JSON."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """A `Config` as YAML that `--config` reads back."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
