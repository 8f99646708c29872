"""The sections of a run's config, one frozen dataclass each; what the algorithm is made of has its own module.

Every field has its help line in the docstring of its class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from grpo_jax.errors import UserError

Dtype = Literal["float32", "bfloat16", "float16"]


def require(condition: bool, name: str, expected: str, came: object) -> None:
    """Raises UserError naming the field, what was expected and what came, unless `condition` holds."""
    if not condition:
        raise UserError(f"{name}: expected {expected}, got {came!r}")


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685; docs/lora.md); rank 0 trains every weight.

    Args:
        rank: Rank of the adapters; 0 switches them off and trains all weights.
        alpha: Adapters are scaled by alpha / rank.
        targets: Projections that get an adapter, such as q_proj (GPT-2: c_attn, attn_c_proj, c_fc, mlp_c_proj); empty
            for all of them.
        path: Folder of a PEFT adapter to start from; rank, alpha and targets are then its own.
    """

    rank: int = 0
    alpha: float = 32.0
    targets: list[str] = field(default_factory=list)
    path: str | None = None

    def __post_init__(self) -> None:
        """Checks the ranges."""
        require(self.rank >= 0, "policy.lora.rank", "a number >= 0", self.rank)
        require(self.alpha > 0, "policy.lora.alpha", "a number > 0", self.alpha)
        if self.path is not None:
            given = {"rank": self.rank, "alpha": self.alpha, "targets": self.targets}
            alone = given == {"rank": 0, "alpha": 32.0, "targets": []}
            require(alone, "policy.lora.path", "no rank, alpha or targets beside it: the adapter has its own", given)

    @property
    def used(self) -> bool:
        """Whether adapters are trained rather than all weights."""
        return self.rank > 0 or self.path is not None


@dataclass(frozen=True)
class NewPolicySection:
    """A small policy with random weights, made from the words of a catalogue (policy.path "new").

    Args:
        architecture: "llama", or "gpt2": learned positions, of which there are `window`.
        width: Of the hidden states.
        layers: Decoder layers.
        heads: Attention heads; they divide the width into even parts.
        vocabulary: Most frequent words of the titles that become tokens; 0 for all of them.
        window: Longest text in tokens.
    """

    architecture: Literal["llama", "gpt2"] = "llama"
    width: int = 96
    layers: int = 2
    heads: int = 4
    vocabulary: int = 0
    window: int = 256

    def __post_init__(self) -> None:
        """Checks the ranges."""
        for name in ("width", "layers", "heads", "window"):
            require(getattr(self, name) >= 1, f"policy.new.{name}", "a number >= 1", getattr(self, name))
        require(self.vocabulary >= 0, "policy.new.vocabulary", "a number >= 0", self.vocabulary)
        even = self.width % self.heads == 0 and self.width // self.heads % 2 == 0
        require(even, "policy.new.heads", f"a number that divides width = {self.width} into even parts", self.heads)


@dataclass(frozen=True)
class MeshSection:
    """Several devices for the policy (docs/scaling.md); 1 x 1 is a single one.

    Args:
        fsdp: Parts that weights are stored in and a batch's prompts are shared out to.
        tensor: Parts that heads, MLP and vocabulary are cut into.
    """

    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        """Checks the ranges."""
        for name in ("fsdp", "tensor"):
            require(getattr(self, name) >= 1, f"policy.mesh.{name}", "a number >= 1", getattr(self, name))

    @property
    def size(self) -> int:
        """Devices it takes."""
        return self.fsdp * self.tensor


@dataclass(frozen=True)
class PolicySection:
    """The policy that is trained.

    Args:
        path: Hugging Face folder of a Qwen2, Qwen2.5, Qwen3, Llama, GPT-2 or Qwen-VL model, "miniature", or "new".
        new: The small untrained policy that "new" makes (recommendation).
        compute_dtype: Type of the activations; float16 comes with a dynamic scale of the loss.
        frozen_dtype: Type of weights that are not trained (with LoRA); trained weights are float32.
        quantised: Bits of the frozen layers' weights (with LoRA, one device; docs/lora.md).
        remat: What the backward pass computes again to save memory: "none"; "products", attention and all that is
            elementwise, while results of products with weights are kept; "layer", whole layers.
        lora: Low-rank adapters.
        mesh: Several devices.
    """

    path: str = "miniature"
    new: NewPolicySection = field(default_factory=NewPolicySection)
    compute_dtype: Dtype = "float32"
    frozen_dtype: Dtype = "float32"
    quantised: Literal["none", "int8", "int4"] = "none"
    remat: Literal["none", "products", "layer"] = "products"
    lora: LoraSection = field(default_factory=LoraSection)
    mesh: MeshSection = field(default_factory=MeshSection)


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
        require(0 < self.held_out < 0.5, "data.held_out", "a share between 0 and 0.5", self.held_out)
        require(self.max_prompt_tokens > 0, "data.max_prompt_tokens", "a number > 0", self.max_prompt_tokens)


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
        require(self.group_size >= 1, "sampling.group_size", "a number >= 1", self.group_size)
        require(self.max_new_tokens >= 1, "sampling.max_new_tokens", "a number >= 1", self.max_new_tokens)
        require(self.temperature > 0, "sampling.temperature", "a number > 0", self.temperature)
        require(self.top_k >= 0, "sampling.top_k", "a number >= 0", self.top_k)
        require(0 < self.top_p <= 1, "sampling.top_p", "a number in (0, 1]", self.top_p)
        require(0 <= self.min_p < 1, "sampling.min_p", "a number in [0, 1)", self.min_p)


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW and its schedule.

    Args:
        learning_rate: Peak learning rate.
        schedule: Learning-rate schedule after the warm-up.
        warmup_steps: Updates of linear warm-up.
        weight_decay: Decoupled weight decay of projections and adapters; norms, biases, embeddings, the unembedding and
            the value head do not decay.
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
        require(self.learning_rate > 0, "optimizer.learning_rate", "a number > 0", self.learning_rate)
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            require(value >= 0, f"optimizer.{name}", "a number >= 0", value)
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}", "a number in [0, 1)", getattr(self, name))


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
        memory_budget_gib: Memory that an update may take beside weights and optimizer state; `accumulation` is raised
            until it does. 0 leaves it as given.
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
    memory_budget_gib: float = 0.0
    chunk_prompts: int = 0
    save_every: int = 25
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        """Checks the ranges and that batches divide."""
        for name in ("prompts_per_batch", "num_epochs", "inner_epochs", "minibatches", "accumulation"):
            require(getattr(self, name) >= 1, f"training.{name}", "a number >= 1", getattr(self, name))
        for name in ("max_steps", "memory_budget_gib", "chunk_prompts", "save_every"):
            require(getattr(self, name) >= 0, f"training.{name}", "a number >= 0", getattr(self, name))
        require(self.keep_checkpoints >= 1, "training.keep_checkpoints", "a number >= 1", self.keep_checkpoints)
        parts = self.minibatches * self.accumulation
        require(
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
            require(getattr(self, name) >= 1, f"renderer.{name}", "a number >= 1", getattr(self, name))
        for name in ("guidance", "eval_guidance"):
            require(getattr(self, name) >= 1, f"renderer.{name}", "a number >= 1", getattr(self, name))
        for name in ("size", "cache_megabytes"):
            require(getattr(self, name) >= 0, f"renderer.{name}", "a number >= 0", getattr(self, name))


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
        name: alignment, alignment_gain, faithfulness, length, quality; for recommendation ndcg, hit, mrr, mixed, soft;
            or package.module:function or file.py:function.
        weight: Its weight among the objectives.
        condition_on: Count this reward only where the named one (of an import path, the function) reaches the
            threshold. Left out: always, but quality only where alignment_gain reaches 0 or, without it in the list,
            alignment 0.25. "none": always, quality too.
        threshold: The threshold of a condition_on that names a reward.
        options: Keyword options of a built-in reward; of ndcg, hit, mrr and mixed the cut-off k, 0 for none.
    """

    name: str = "alignment"
    weight: float = 1.0
    condition_on: str | None = None
    threshold: float = 0.0
    options: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the ranges."""
        require(bool(self.name), "rewards.name", "a name", self.name)
        require(math.isfinite(self.weight), "rewards.weight", "a finite number", self.weight)

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
            require(getattr(self, name) >= 0, f"evaluation.{name}", "a number >= 0", getattr(self, name))


@dataclass(frozen=True)
class DeviceSection:
    """Where each part runs.

    Args:
        policy: "auto", "cpu", "gpu:N", or the cards of a mesh as "gpu:0,gpu:1" ("auto": the first ones).
        renderer: "auto", "cpu" or "gpu:N".
        scorer: "auto", "cpu" or "gpu:N".
    """

    policy: str = "auto"
    renderer: str = "auto"
    scorer: str = "auto"
