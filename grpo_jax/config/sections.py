"""Sections of the config that all tasks share. The docstrings are the text of --help."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeGuard

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BeforeValidator, Field, model_validator

from grpo_jax.config.fields import (
    COEFFICIENT,
    LENGTH,
    WIDTH,
    Coefficient,
    Count,
    KeyOf,
    Length,
    NonNegative,
    Options,
    Positive,
    PositiveCount,
    Section,
    Share,
    Texts,
    Words,
    require,
    resume_mutable,
)
from grpo_jax.config.named import name_tools
from grpo_jax.errors import short_repr

TODAY = "today"
"""Key of data.chat_template_options for the date in a chat template."""

Dtype = Literal["float32", "bfloat16"]
Precision = Literal["default", "high", "highest", "bfloat16"]
Bound = Annotated[float, Gt(1)]


class LoraSection(Section):
    """Low-rank adapters; rank 0 trains all weights (Hu et al. 2021, arXiv:2106.09685; docs/lora.md)."""

    rank: Annotated[int, Ge(0), Le(WIDTH)] = 0
    """Rank of the adapters; 0 for none, which trains all weights."""
    alpha: Positive = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: Annotated[Words, BeforeValidator(lambda value: [] if value == "all-linear" else value)] = []
    """Projections with an adapter, such as q_proj, or c_attn and attn_c_proj of GPT-2; empty or "all-linear" for
    all."""
    vision: bool = False
    """Add adapters to all projections of the vision tower's layers."""
    path: str | None = None
    """Folder of a PEFT adapter to start from, with its own rank, alpha, targets and vision."""

    def __post_init__(self) -> None:
        beside = self.model_dump(exclude_defaults=True, exclude={"path"})
        alone = self.path is None or not beside
        require(alone, "path", "no rank, alpha or targets beside it, nor vision: the adapter has its own", beside)
        adapted = self.used or not self.vision
        self.require(adapted, "vision", "false without adapters (policy.lora.rank 0; policy.vision train)")

    @property
    def used(self) -> bool:
        """Return whether adapters are trained rather than all weights."""
        return self.rank > 0 or self.path is not None


# of peft.LoraConfig: the read ones, and those that change no weight
_LORA_FIELDS = ("r", "lora_alpha", "target_modules", "task_type", "inference_mode", "fan_in_fan_out", "auto_mapping")
_LORA_FIELDS += ("base_model_name_or_path", "peft_version", "revision")


def lora_fields(value: Any) -> Any:
    """Return the fields of a peft.LoraConfig; return any other value unchanged."""
    if type(value).__name__ != "LoraConfig":
        return value
    plain = vars(type(value)())
    for name, given in vars(value).items():
        usual = plain.get(name)
        same = name in _LORA_FIELDS or given == usual or not (given or usual)
        require(same, name, f"{usual} in a LoraConfig: adapters are plain LoRA", given)
    targets = value.target_modules
    require(targets is not None, "target_modules", 'names or "all-linear" in a LoraConfig, not PEFT\'s defaults', None)
    listed = [] if targets == "all-linear" else [targets] if isinstance(targets, str) else sorted(targets)
    return {"rank": value.r, "alpha": value.lora_alpha, "targets": listed}


class NewPolicySection(Section):
    """A small policy with random weights and the task's words (policy.path "new")."""

    width: Annotated[int, Ge(1), Le(2**16)] = 96
    """Width of the hidden states."""
    layers: Annotated[int, Ge(1), Le(1024)] = 2
    """Decoder layers."""
    heads: Annotated[int, Ge(1), Le(2**16)] = 4
    """Attention heads; width / heads must be even."""
    mlp: Annotated[int, Ge(0), Le(2**17)] = 0
    """Width inside the MLPs; 0 for twice the width."""
    window: Annotated[int, Ge(1), Le(WIDTH)] = 256
    """Longest text in tokens."""

    def __post_init__(self) -> None:
        divides = self.width % (2 * self.heads) == 0
        self.require(divides, "heads", f"a number that divides width = {self.width} into even parts")


class MeshSection(Section):
    """Devices of the policy (docs/scaling.md); 1 x 1 is one device."""

    fsdp: Annotated[int, Ge(1), Le(2**16)] = 1
    """Devices over which weights and the prompts of a batch are sharded."""
    tensor: Annotated[int, Ge(1), Le(2**16)] = 1
    """Devices over which heads, MLP and vocabulary are sharded."""

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return self.fsdp * self.tensor


class PolicySection(Section):
    """The trained policy."""

    path: str = ""
    """Hugging Face folder or hub id (docs/policies.md), the name of a policy of the package, or "new"."""
    new: NewPolicySection = Field(default_factory=NewPolicySection)
    """Settings of the policy "new", for tasks that have words for one."""
    compute_dtype: Dtype = "float32"
    """Type of the activations."""
    matmul_precision: Precision | None = None
    """Precision of matrix products (jax.default_matmul_precision). null: "highest" with compute_dtype float32, else
    JAX's default. Below "highest" GPUs use TF32 and TPUs bfloat16; "bfloat16" rounds factors on a CPU too
    (docs/speed.md). PyTorch judges follow: "highest" is full float32."""
    attn_implementation: Literal["auto", "cudnn", "eager"] = resume_mutable("auto")
    """"auto" uses Pallas kernels on one GPU or TPU, in bfloat16 (docs/planning.md); there a GPU trains with cuDNN's
    attention for "cudnn"; "eager" uses plain products."""
    frozen_dtype: Dtype = "float32"
    """Type of the frozen weights: with LoRA, and of a frozen vision tower; trained weights are float32."""
    quantised: Literal["none", "int8", "int4"] = "none"
    """Bits of the frozen layers' weights (with LoRA, one device; docs/lora.md)."""
    remat: Literal["none", "products", "layer"] = resume_mutable("products")
    """Rematerialisation in the backward pass, to save memory: "none"; "products" recomputes attention and elementwise
    operations and keeps the products with weights; "layer" recomputes whole layers."""
    vision: Literal["frozen", "train"] = "frozen"
    """"train" trains all weights of the vision tower; for adapters on a frozen one set policy.lora.vision."""
    lora: Annotated[LoraSection, BeforeValidator(lora_fields)] = Field(default_factory=LoraSection)
    """Low-rank adapters; in Python also a peft.LoraConfig."""
    mesh: MeshSection = resume_mutable(default_factory=MeshSection)

    def __post_init__(self) -> None:
        frozen = self.vision == "frozen" or not self.lora.used
        self.require(frozen, "vision", "frozen beside policy.lora (its adapters on the tower: policy.lora.vision)")


class DataSection(Section):
    """Prompts and their chat format."""

    prompts: str = ""
    """Prompts: a .jsonl, .csv, .tsv, .txt or .parquet file; the folder of a saved Hugging Face data set; one of the hub
    as hub:OWNER/NAME[:CONFIG[:SPLIT]]; reasoning_gym:NAME[?OPTION=VALUE&…] (a + joins several); builtin,
    builtin:plain, builtin:attributes or builtin:crowded of the package; or a name of the task."""
    validation: str = ""
    """Validation file, to choose the best checkpoint. With it or `test`, all of `prompts` are for training."""
    test: str = ""
    """Test file, measured before and after training."""
    columns: dict[str, str] = {}
    """Renamed columns, {name: name in the data}, such as {"prompt": "question"}."""
    held_out: Annotated[NonNegative, Lt(0.5)] = 0.2
    """Share of a file's prompts held out for testing, and as many for validation, if it has no "split" column; 0 trains
    on all of them and measures nothing before and after."""
    form: Literal["rewrite", "append"] = "rewrite"
    """"rewrite" asks the policy for a new prompt; "append" lets it continue the user's."""
    instruction: str = ""
    """User message to a chat policy in the rewrite form, with {prompt} for the user's prompt; empty for the prompt
    alone."""
    system_prompt: str = ""
    """System message, for conversations without one; empty for the chat template's default."""
    tools: Annotated[list[dict[str, Any] | str], BeforeValidator(name_tools)] = []
    """Tools for the chat template: JSON schemas, and functions by import path (file.py:function), which the task text
    calls. A class is an environment, openenv:http://HOST:PORT a server; of {name: class} the row's column "environment"
    chooses."""
    chat_template_options: Options = {}
    """Variables of the chat template, such as enable_thinking (default false). "today" is the date in the template,
    "YYYY-MM-DD"; by default the date of the run's first start."""
    max_prompt_tokens: Length = 256
    """Longest prompt in tokens, with instruction and pictures; a longer prompt is an error."""
    picture_size: Annotated[int, Ge(0), Le(LENGTH)] | None = None
    """Side length in pixels to which prompts' pictures are resized; null for 448 (512 for Qwen3-VL), within the limits
    of the policy's folder; 0 keeps each picture's shape, as its processor does."""
    forbidden_tokens: list[int | str] = []
    """Tokens that sampler, update and reference exclude, each as an id or as a text of one token."""

    def __post_init__(self) -> None:
        for name in ("system_prompt", "tools", "chat_template_options"):
            chat = self.form != "append" or not getattr(self, name)
            self.require(chat, name, "nothing with form 'append', which has no chat")
        asks = not self.instruction or "{prompt}" in self.instruction
        self.require(asks, "instruction", "a text with {prompt}, the place of the user's prompt")
        today = self.chat_template_options.get(TODAY, "2000-01-01")
        dated = isinstance(today, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", today)
        require(bool(dated), f"chat_template_options.{TODAY}", '"YYYY-MM-DD"', today)

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Return the import paths of the tools and of the classes."""
        return (*(tool for tool in self.tools if isinstance(tool, str)), *self.tool_classes.values())

    @property
    def tool_classes(self) -> dict[str, str]:
        """Return the import paths of the classes that rows choose, by name."""
        return {name: path for tool in self.tools if _holds_classes(tool) for name, path in tool.items()}

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas."""
        return [tool for tool in self.tools if isinstance(tool, dict) and not _holds_classes(tool)]


def _holds_classes(tool: dict[str, Any] | str) -> TypeGuard[dict[str, str]]:
    """Return whether an entry of data.tools is {name: import path}, and not a JSON schema."""
    return isinstance(tool, dict) and all(isinstance(path, str) and ":" in path for path in tool.values())


class SamplingSection(Section):
    """Sampling of completions."""

    group_size: Length = 8
    """Completions per prompt (G)."""
    max_new_tokens: Length = 32
    """Longest completion in tokens (T); in an episode the longest turn."""
    temperature: Positive = 1.0
    """Softmax temperature of sampling and training."""
    top_k: Count = 0
    """Sample from the k likeliest tokens; 0 for all."""
    top_p: Annotated[Positive, Le(1)] = 1.0
    """Sample from the smallest set of tokens with this probability (nucleus); 1 for all."""
    min_p: Annotated[NonNegative, Lt(1)] = 0.0
    """Exclude tokens below this share of the likeliest token's probability; 0 for none."""
    sampling_mask: Literal["none", "keep"] = "none"
    """"keep" trains the sampling distribution: log-probabilities in the update are renormalised over the
    tokens that top_k (needed for it), top_p and min_p kept."""
    stop: Texts = []
    """Texts that end a completion or a turn, like an end token; in a shell a line break is $'\\n'. The tokens up to the
    end of the text are kept and trained."""
    turns: Annotated[int, Ge(1), Le(64)] = 1
    """Most turns of an episode; an observation follows each turn but the last."""
    max_observation_tokens: Length = 64
    """Most tokens between two turns, with the chat template's tokens and those of pictures. A longer observation counts
    as a failed judge."""

    def __post_init__(self) -> None:
        self.require(all(self.stop), "stop", "texts that are not empty")
        self.require(self.sampling_mask == "none" or self.top_k > 0, "sampling_mask", "none without a top_k")

    @property
    def max_policy_tokens(self) -> int:
        """Return the policy's maximum tokens in one completion, over all turns."""
        return self.turns * self.max_new_tokens

    @property
    def stream_tokens(self) -> int:
        """Return the maximum tokens after a prompt: the policy's and those of observations."""
        return self.max_policy_tokens + (self.turns - 1) * self.max_observation_tokens


class SurrogateSection(Section):
    """Parameters of the preset's policy loss; null for the preset's (docs/algorithms.md)."""

    dual: Bound | None = None
    """Largest ratio of a token with a negative advantage (presets with surrogate Clip)."""
    cap: Bound | None = None
    """Largest weight of a token (cispo, dppo_tv)."""
    positive: Positive | None = None
    """Temperature of tokens with a positive advantage (sapo)."""
    negative: Positive | None = None
    """Temperature of the other tokens (sapo)."""
    epsilon: Positive | None = None
    """Change of a token's probability beyond which it is pulled back (drpo)."""
    k_positive: Positive | None = None
    """Power of the weight's rise where the advantage is at least 0 (vespo)."""
    lambda_positive: Positive | None = None
    """Rate of the weight's fall there (vespo)."""
    k_negative: Positive | None = None
    """Power of the weight's rise where the advantage is negative (vespo)."""
    lambda_negative: Positive | None = None
    """Rate of the weight's fall there (vespo)."""

    @property
    def changes(self) -> dict[str, float]:
        """Return the parameters that are not the preset's."""
        return self.model_dump(exclude_none=True)


class AlgorithmSection(Section):
    """Advantages and loss."""

    preset: Annotated[str, KeyOf("grpo_jax.core.losses", "PRESETS")] = "grpo"
    """Loss preset, named after its paper (docs/algorithms.md)."""
    advantage: Annotated[
        str, KeyOf("grpo_jax.core.advantages", "SUM_ESTIMATORS", "gdpo", "gae", "opd", "optimal_token_baseline")
    ] = "gdpo"
    """Advantage estimator (docs/algorithms.md). "gdpo" normalises each reward in its group; "gae" is PPO (section ppo);
    "opd" distils the teacher on-policy and only logs the rewards; the others take the weighted sum of the rewards."""
    best_of: Length = 4
    """Completions of which "max_at_k" maximises the best reward (k; pass@k for rewards of 0 and 1)."""
    teacher: str = ""
    """Teacher of "opd", and the reference of kl_coef: folder or hub id of a policy with the same tokens. Empty for the
    reference."""
    scale: Literal["group", "batch", "none"] | None = None
    """Standard deviation that "grpo" divides by: of the "group", of the "batch", or "none"; null for the preset's."""
    advantage_eps: NonNegative = 1e-4
    """Added to the standard deviations of rewards (gdpo, grpo, batch). A reward with a smaller spread has little
    effect: lower this, or scale the reward."""
    standardise_rewards: bool = False
    """Standardise each reward by its mean and deviation over all batches so far, before the rewards are summed."""
    clip_low: Annotated[Positive, Le(1)] | None = None
    """Lower clip bound; null for the preset's."""
    clip_high: Positive | None = None
    """Upper clip bound; null for the preset's."""
    surrogate: SurrogateSection = Field(default_factory=SurrogateSection)
    kl_coef: Coefficient = 0.0
    """Weight of the loss's KL (k3) to the reference. With 0 here and in ppo the reference is never computed."""
    kl_corrected: bool = True
    """Weight the KL term by the policy ratio, which makes its gradient unbiased, as TRL's use_bias_correction_kl."""
    entropy_coef: Coefficient = 0.0
    """Weight of the entropy bonus; with entropy_target its initial value."""
    entropy_target: NonNegative | None = None
    """Target of the mean entropy per token, in nats. Each update raises entropy_coef by entropy_coef_delta if the
    entropy is at most this, else lowers it, within 0 and 1; above the target no bonus acts. null for a constant
    entropy_coef."""
    entropy_coef_delta: Positive = 0.005
    """Step of entropy_coef towards entropy_target."""
    entropy_share: Annotated[Positive, Le(1)] = 1.0
    """Share of the batch's tokens in the policy gradient, those with the highest entropy; 1 for all."""
    importance_cap: float | None = None
    """Cap of the importance weight of a token, the trainer's probability over the sampler's. They differ by older
    weights, top_k, top_p, min_p or number type. 0 for no weight; null: 2 with training.async_level 1, else 0."""
    importance_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """Use of importance_cap c: "truncate" bounds weights by c, "mask" drops those outside 1/c to c. "token" weights are
    per token, "sequence" weights are the product over a completion."""
    off_policy_mask_threshold: Positive | None = None
    """Drop a completion with a negative advantage once the mean log-probability of its tokens fell by more than this
    since sampling; null for never."""
    update_ref_every: Count = 0
    """Iterations between updates of the reference; 0 for never."""
    mask_truncated: bool = False
    """Exclude completions that reach max_new_tokens from the loss."""
    overlong_buffer: Count = 0
    """Number of last tokens of max_new_tokens over which a penalty grows to 1, as a reward "overlong" (DAPO); 0 for no
    penalty."""
    overlong_weight: Positive = 1.0
    """Weight of "overlong" among the rewards."""
    zero_variance_groups: Literal["keep", "drop", "resample"] = "keep"
    """Groups whose rewards are all equal (with gdpo each reward, else their sum): "keep" them with advantage 0, "drop"
    them from the loss and its denominators, or "resample" other prompts, three times at most."""
    turn_advantage: Literal["last", "return"] = "last"
    """Advantage of a turn: "last" uses the rewards of the last turn for all turns; "return" uses each turn's
    reward-to-go, compared with the same turn of the group."""
    turn_gamma: Share = 1.0
    """Discount of later turns' rewards with turn_advantage "return"."""

    def __post_init__(self) -> None:
        chosen = f"advantage {self.advantage!r}"
        self.require((self.importance_cap or 1) >= 1, "importance_cap", "null, 0 or a number >= 1")
        by_turn = self.turn_advantage == "last" or self.advantage not in ("gae", "opd")
        self.require(by_turn, "turn_advantage", f"'last' with {chosen}")
        read = not self.teacher or self.advantage in ("gae", "opd") or self.kl_coef > 0
        self.require(read, "teacher", f"none with {chosen} and kl_coef 0, which do not read it")
        kept = not self.teacher or self.update_ref_every == 0
        self.require(kept, "update_ref_every", "0 with a teacher, which stands for the reference")
        scaled = self.scale is None or self.advantage == "grpo"
        self.require(scaled, "scale", f"null with {chosen}, which has a scale of its own")
        summed = not self.standardise_rewards or self.advantage not in ("gdpo", "maxrl", "opd")
        self.require(summed, "standardise_rewards", f"false with {chosen}")
        grouped = self.zero_variance_groups == "keep" or self.compares_groups
        self.require(grouped, "zero_variance_groups", f"'keep' with {chosen}, which compares no groups")
        binary = self.overlong_buffer == 0 or self.advantage != "maxrl"
        self.require(binary, "overlong_buffer", "0 with advantage 'maxrl', which takes rewards of 0 and 1")
        self._check_surrogate()

    def _check_surrogate(self) -> None:
        from grpo_jax.core.losses import PRESETS  # imports JAX

        changes, names = self.surrogate.changes, {field.name for field in fields(PRESETS[self.preset]["surrogate"])}
        expected = f"{' and '.join(sorted(names - {'low', 'high'}))} with preset {self.preset!r}"
        require(changes.keys() <= names, "surrogate", expected, sorted(changes))
        for name in ("clip_low", "clip_high") if "low" not in names else ():
            unbounded = f"null with preset {self.preset!r}, which has no clip bounds"
            self.require(getattr(self, name) is None, name, unbounded)

    @property
    def learns_values(self) -> bool:
        """Return whether advantages come from a value head (PPO) rather than the group."""
        return self.advantage == "gae"

    @property
    def compares_groups(self) -> bool:
        """Return whether a completion is compared with the others of its prompt."""
        return self.advantage not in ("gae", "batch", "opd")


class PPOSection(Section):
    """Settings of PPO (algorithm.advantage "gae"): value head, rewards per token, value loss."""

    gamma: Share = 1.0
    """Discount of later rewards."""
    gae_lambda: Share = 1.0
    """GAE's lambda: 0 is the one-step advantage, 1 the full return. With .95 a score weighs .001 after 128 tokens."""
    value_coef: Coefficient = 0.5
    """Weight of the value loss."""
    kl_coef: Coefficient = 0.0
    """Weight of the KL to the reference in each token's reward (estimator k1)."""


class OptimizerSection(Section):
    """Optimizer and schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """"adamw"; or "muon" for the matrices that decay, AdamW for the rest (docs/algorithms.md)."""
    learning_rate: Positive | None = None
    """Peak learning rate; null for a safe one for pretrained policies: 1e-6 for all weights, 1e-4 for adapters
    (policy.lora)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: Count = 0
    """Updates of linear warm-up."""
    weight_decay: Coefficient = 0.0
    """Decoupled weight decay of projections and adapters; not of norms, biases, embeddings and heads."""
    beta2: Annotated[NonNegative, Lt(1)] = 0.99
    """Decay of the second moment."""
    max_grad_norm: NonNegative = 1.0
    """Clip gradients to this global norm; 0 for never."""


class TrainingSection(Section):
    """The training loop."""

    prompts_per_batch: Length = 12
    """Prompts per iteration (P)."""
    max_steps: Count = resume_mutable(100)
    """Iterations in all; 0 for num_epochs."""
    num_epochs: PositiveCount = resume_mutable(1)
    """Passes over the training prompts when max_steps is 0."""
    learns: Literal["both", "rewriter", "renderer"] | None = None
    """Models that are trained: the policy ("rewriter"), the model that draws its pictures ("renderer"), or both
    (docs/renderer.md); null for "both" with judges.renderer.train, else "rewriter"."""
    inner_epochs: PositiveCount = 1
    """Passes over each sampled batch."""
    minibatches: PositiveCount = 1
    """Optimizer updates per pass."""
    grad_accumulation_steps: PositiveCount = resume_mutable(1)
    """Micro-batches per update, to save memory; the gradient stays the same."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the gradients of layers' kernels; others', moments and sums of micro-batches are float32."""
    chunk_prompts: Annotated[int, Ge(0), Le(LENGTH)] = resume_mutable(0)
    """Prompts per chunk of sampling, rendering and scoring; 0 for all."""
    async_level: Annotated[int, Ge(0), Le(1)] = 0
    """1 samples the next batch during judging and update, with weights one update old (docs/scaling.md); 0 always
    samples with the newest weights."""
    save_every: Count = resume_mutable(25)
    """Iterations between checkpoints; 0 for a checkpoint at the end only."""
    keep_checkpoints: PositiveCount = resume_mutable(2)
    """Checkpoints to keep, besides best and final."""
    max_hours: NonNegative = resume_mutable(0.0)
    """Time limit of this process in hours; it then saves and stops, and --resume continues. 0 for none."""
    early_stopping_patience: Count = resume_mutable(0)
    """Stop after this many validations without an improvement; 0 for never."""
    early_stopping_threshold: NonNegative = 0.0
    """Smallest gain over the best validation that counts as an improvement."""

    def __post_init__(self) -> None:
        parts = self.minibatches * self.grad_accumulation_steps
        expected = f"a multiple of minibatches x grad_accumulation_steps = {parts}"
        self.require(self.prompts_per_batch % parts == 0, "prompts_per_batch", expected)


class RewardSection(Section):
    """A reward, with its weight and condition."""

    name: str
    """A reward of the task, or name@judge for another judge than its own; or package.module:function or
    file.py:function."""
    weight: Annotated[float, Ge(-COEFFICIENT), Le(COEFFICIENT)] = 1.0
    """Weight among the rewards."""
    condition_on: str | None = None
    """Label of another reward: this one counts only if that one reaches the threshold; null for no condition."""
    threshold: float = 0.0
    """Threshold of condition_on."""
    options: Options = {}
    """Keyword arguments of the reward."""
    messages: bool | None = None
    """Pass prompts and completions as chat messages, to a reward by import path; null does so where the prompts are
    messages, as TRL does."""
    label: str = ""
    """Name in metrics and condition_on, to tell two rewards of one function apart; empty for the function's name."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, str | Mapping | RewardSection):
            return {"name": value} if isinstance(value, str) else value
        expected = "a name, or a mapping of name and weight; a function goes to run(config, rewards=[…])"
        raise ValueError(f"expected {expected}, got {short_repr(value)}")

    def __post_init__(self) -> None:
        self.require(self.name, "name", "a name")

    @property
    def called(self) -> str:
        """Return the name in metrics."""
        return self.label or self.name.rpartition(":")[2]


class EvaluationSection(Section):
    """Measurement on held-out prompts."""

    prompts: Count = 128
    """Test prompts measured before and after, the first ones: shuffle a sorted file; 0 for all of them."""
    validation_prompts: Count = 32
    """Validation prompts, the first ones, to choose the best checkpoint; 0 for none."""
    every: Count = 25
    """Iterations between validations; 0 for never."""
    best_by: str = "score"
    """Metric of the best checkpoint and of early stopping, by its highest value: "score" (the training objective), a
    reward, or one of eval_rewards. A checkpoint with eval_rewards below the start's is never the best."""
    samples: Annotated[int, Ge(0), Le(LENGTH)] = 1
    """Sampled completions per test prompt (k), besides the greedy one; 0 for none. Above 1 mean@k, best@k and
    pass@k are reported, with 95 % intervals."""
    temperature: Positive | None = None
    """Temperature of the sampled completions; null for training's."""
    pass_threshold: float = 1.0
    """Threshold at which a completion passes, for pass@k."""
    by: str = ""
    """Column of the prompts; eval_rewards are also reported for each of its values, as MEASURE/VALUE."""


class SFTSection(Section):
    """Supervised fine-tuning before the first iteration; "before" is measured after it."""

    steps: Count = 0
    """Supervised updates, on the task's pairs or the training rows with a `completion`; 0 for none."""
    rows: Count = 0
    """Pairs to use, the first ones; 0 for all."""
    batch: Length = 64
    """Pairs per update."""
    learning_rate: Positive = 1e-3
    """Peak learning rate, after a warm-up of a tenth of the steps; it decays to 0 along a cosine. The default is for
    new policies and adapters; for all weights of a pretrained policy take about 1e-5."""


class RetrievalSection(Section):
    """The retriever that ranks the catalogue for a completion.

    Both backends give the same ranks. The retriever's fingerprint identifies its encoder and catalogue.
    """

    backend: Literal["local", "ray"] = resume_mutable("local")
    """"local" ranks in this process; "ray" calls a service started by `python -m bridges.retrieval serve`."""
    encoder: Annotated[str, MinLen(1)] = resume_mutable("tfidf")
    """"tfidf", or the folder or hub id of a sentence-transformers model."""
    address: str | None = resume_mutable(None)
    """HOST:PORT of the service's Ray cluster, printed by `serve` (ray)."""
    cache: str | None = resume_mutable(None)
    """Folder to cache the catalogue's vectors between runs (local); null for none."""
    device: str = resume_mutable("cpu")
    """Device of a sentence-transformers model in this process: "cpu" or "gpu:N"."""
