"""Sections of the config that all language tasks share. Help lines stand in the classes' docstrings."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt, MinLen
from pydantic import BeforeValidator, Field, model_validator

from grpo_jax.config.fields import (
    COEFFICIENT,
    LENGTH,
    WIDTH,
    Coefficient,
    Count,
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

TODAY = "today"
"""Of data.chat_template_options: the date that a template writes."""

Dtype = Literal["float32", "bfloat16"]
Precision = Literal["default", "high", "highest"]


class LoraSection(Section):
    """Low-rank adapters; rank 0 trains every weight (Hu et al. 2021, arXiv:2106.09685; docs/lora.md)."""

    rank: Annotated[int, Ge(0), Le(WIDTH)] = 0
    """Rank of the adapters; 0 switches them off and trains all weights."""
    alpha: Positive = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: Words = []
    """Projections that get an adapter, such as q_proj, or c_attn and attn_c_proj of GPT-2; empty for all of them."""
    vision: bool = False
    """Whether all projections of the vision tower's layers get one too."""
    path: str | None = None
    """Folder of a PEFT adapter to start from; rank, alpha, targets and vision are then its own."""

    def __post_init__(self) -> None:
        beside = self.model_dump(exclude_defaults=True, exclude={"path"})
        alone = self.path is None or not beside
        require(alone, "path", "no rank, alpha or targets beside it, nor vision: the adapter has its own", beside)
        adapted = self.used or not self.vision
        self.require(adapted, "vision", "false without adapters (policy.lora.rank 0; policy.vision train)")

    @property
    def used(self) -> bool:
        """Whether adapters are trained rather than all weights."""
        return self.rank > 0 or self.path is not None


def lora_fields(value: Any) -> Any:
    """Return the fields of a peft.LoraConfig; of anything else the value."""
    if type(value).__name__ != "LoraConfig":
        return value
    for name in ("lora_dropout", "use_rslora", "use_dora", "modules_to_save"):
        require(not getattr(value, name), name, "none in a LoraConfig: adapters are plain LoRA", getattr(value, name))
    targets = value.target_modules
    listed = [] if targets in (None, "all-linear") else [targets] if isinstance(targets, str) else sorted(targets)
    return {"rank": value.r, "alpha": value.lora_alpha, "targets": listed}


class NewPolicySection(Section):
    """A small policy with random weights, made from the words of a task (policy.path "new")."""

    width: Annotated[int, Ge(1), Le(2**16)] = 96
    """Of the hidden states."""
    layers: Annotated[int, Ge(1), Le(1024)] = 2
    """Decoder layers."""
    heads: Annotated[int, Ge(1), Le(2**16)] = 4
    """Attention heads; they divide the width into even parts."""
    mlp: Annotated[int, Ge(0), Le(2**17)] = 0
    """Width inside the MLPs; 0 for twice the width."""
    window: Annotated[int, Ge(1), Le(WIDTH)] = 256
    """Longest text in tokens."""

    def __post_init__(self) -> None:
        divides = self.width % (2 * self.heads) == 0
        self.require(divides, "heads", f"a number that divides width = {self.width} into even parts")


class MeshSection(Section):
    """Several devices for the policy (docs/scaling.md); 1 x 1 is a single one."""

    fsdp: Annotated[int, Ge(1), Le(2**16)] = 1
    """Parts that weights are stored in and a batch's prompts are shared out to."""
    tensor: Annotated[int, Ge(1), Le(2**16)] = 1
    """Parts that heads, MLP and vocabulary are cut into."""

    @property
    def size(self) -> int:
        """Devices it takes."""
        return self.fsdp * self.tensor


class PolicySection(Section):
    """The policy that is trained."""

    path: str = ""
    """Hugging Face folder or hub id (docs/policies.md lists models), a policy of the package by its name, or "new"."""
    new: NewPolicySection = Field(default_factory=NewPolicySection)
    """The small untrained policy that "new" makes, where the task has words for one."""
    compute_dtype: Dtype = "float32"
    """Type of the activations."""
    matmul_precision: Precision | None = None
    """Of matrix products (jax.default_matmul_precision); null is "highest" with compute_dtype float32, where GPUs take
    TF32 and TPUs bfloat16 otherwise, and else JAX's default. Judges in PyTorch follow it: "highest" is full float32."""
    attn_implementation: Literal["auto", "eager"] = resume_mutable("auto")
    """"auto" takes Pallas kernels on one GPU or TPU, in bfloat16 (docs/planning.md); "eager" never does."""
    frozen_dtype: Dtype = "float32"
    """Type of weights that are not trained (with LoRA); trained weights are float32."""
    quantised: Literal["none", "int8", "int4"] = "none"
    """Bits of the frozen layers' weights (with LoRA, one device; docs/lora.md)."""
    remat: Literal["none", "products", "layer"] = resume_mutable("products")
    """What the backward pass computes again to save memory: "none"; "products", attention and all that is elementwise,
    while results of products with weights are kept; "layer", whole layers."""
    vision: Literal["frozen", "train"] = "frozen"
    """"train" trains all weights of the vision tower; adapters on a "frozen" one are policy.lora.vision."""
    lora: Annotated[LoraSection, BeforeValidator(lora_fields)] = Field(default_factory=LoraSection)
    """Low-rank adapters; in Python also a peft.LoraConfig."""
    mesh: MeshSection = resume_mutable(default_factory=MeshSection)

    def __post_init__(self) -> None:
        frozen = self.vision == "frozen" or not self.lora.used
        self.require(frozen, "vision", "frozen beside policy.lora (its adapters on the tower: policy.lora.vision)")


class DataSection(Section):
    """Prompts."""

    prompts: str = ""
    """A .jsonl, .csv, .tsv, .txt or .parquet file, the folder of a saved Hugging Face data set, or one of the hub as
    hub:OWNER/NAME[:CONFIG[:SPLIT]]; builtin, builtin:plain, builtin:attributes or builtin:crowded, which ship with the
    package; or a name that the task knows."""
    validation: str = ""
    """Prompts that choose the best checkpoint, in a file of their own; with it or `test` all of `prompts` train."""
    test: str = ""
    """Prompts that are measured before and after, in a file of their own."""
    columns: dict[str, str] = {}
    """Columns that have another name in the data, {name: name there}, such as {"prompt": "question"}."""
    held_out: Annotated[NonNegative, Lt(0.5)] = 0.2
    """Share of a file's prompts kept apart for testing (and as many for validation) if it has no "split" column; 0
    trains on all of them, and nothing is measured before and after."""
    form: Literal["rewrite", "append"] = "rewrite"
    """"rewrite" asks the policy for a new prompt; "append" lets it continue the user's."""
    instruction: str = ""
    """User message to a chat policy in the rewrite form, {prompt} being the user's prompt. Empty: the prompt alone."""
    system_prompt: str = ""
    """System message of conversations that begin with none; empty for the chat template's default."""
    tools: Annotated[list[dict[str, Any] | str], BeforeValidator(name_tools)] = []
    """Tools that the chat template offers the policy: functions by import path, file.py:function, which are called
    (task: text), and JSON schemas."""
    chat_template_options: Options = {}
    """Variables of the chat template, by name, such as enable_thinking, which is false unless it stands here; and
    today, the date ("YYYY-MM-DD") for a template that writes it, by default that of the run's first start."""
    max_prompt_tokens: Length = 256
    """Longest prompt in policy tokens, instruction and pictures included; a longer one is an error."""
    picture_size: Annotated[int, Ge(0), Le(LENGTH)] | None = None
    """Pixels along both sides that every picture of a prompt is brought to; null for 448 (512 for Qwen3-VL), within
    what the policy's folder allows; 0 keeps each one's shape, as its processor does."""
    forbidden_tokens: list[int | str] = []
    """Tokens that do not exist for sampler, update and reference, each by its id or as a text that is one token."""

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
        """Import paths of tools that can be called."""
        return tuple(tool for tool in self.tools if isinstance(tool, str))


class SamplingSection(Section):
    """How completions are drawn."""

    group_size: Length = 8
    """Completions per prompt (G)."""
    max_new_tokens: Length = 32
    """Longest completion (T); of an episode the longest text of one turn."""
    temperature: Positive = 1.0
    """Softmax temperature of the trained distribution."""
    top_k: Count = 0
    """Draw among the k likeliest tokens; 0 for all."""
    top_p: Annotated[Positive, Le(1)] = 1.0
    """Draw within the smallest set of this probability; 1 for all."""
    min_p: Annotated[NonNegative, Lt(1)] = 0.0
    """Drop tokens below this share of the likeliest token's probability; 0 for none."""
    sampling_mask: Literal["none", "keep"] = "none"
    """"keep" trains the distribution that is drawn from: log-probabilities in the update are renormalised over the
    tokens that top_k (needed for it), top_p and min_p kept."""
    stop: Texts = []
    """Texts that end a completion, of an episode a turn, as an end token does. The tokens up to and including the one
    that completes such a text are kept and trained."""
    turns: Annotated[int, Ge(1), Le(64)] = 1
    """How often the policy writes in an episode, at most: above 1 an observation stands between."""
    max_observation_tokens: Length = 64
    """Most tokens that stand between two turns, the chat template's marks and the places of pictures among them; a
    longer observation is refused as a failed judge is."""

    def __post_init__(self) -> None:
        self.require(all(self.stop), "stop", "texts that are not empty")
        bounded = self.sampling_mask == "none" or (self.top_k > 0 and self.turns == 1)
        self.require(bounded, "sampling_mask", "none without a top_k, and with several turns")

    @property
    def written_tokens(self) -> int:
        """Most tokens that the policy writes for one completion, all turns together."""
        return self.turns * self.max_new_tokens

    @property
    def stream_tokens(self) -> int:
        """Most tokens behind a prompt: what the policy writes, and what is answered between its turns."""
        return self.written_tokens + (self.turns - 1) * self.max_observation_tokens


class AlgorithmSection(Section):
    """Advantages and loss."""

    preset: Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo", "dppo_tv", "drpo"] = "grpo"
    """Loss preset: grpo, dr_grpo, dapo, bnpo, gspo, cispo, sapo, dppo_tv or drpo (docs/algorithms.md)."""
    advantage: Literal["gdpo", "grpo", "rloo", "raft", "maxrl", "batch", "gae", "opd"] = "gdpo"
    """"gdpo" normalises each reward in its group; "grpo" the weighted sum; "rloo" leaves one out; "raft" teaches each
    group's best alone (rejection sampling); "maxrl" divides by the group's mean, of a sum that is 0 or 1; "batch"
    whitens the sum over the whole batch (REINFORCE++); "gae" is PPO: a value head for the sum (ppo); "opd" distils the
    teacher on-policy, token by token, and rewards are watched alone."""
    teacher: str = ""
    """Of "opd", the folder or hub id of a policy with the same tokens; it is the reference of kl_coef too. Empty: the
    reference itself."""
    scale: Literal["group", "batch", "none"] | None = None
    """What "grpo" divides by, the deviation of the "group", of the "batch", or "none"; null takes the preset's."""
    advantage_eps: NonNegative = 1e-4
    """Added to the standard deviations of rewards (gdpo, grpo, batch). A reward with a smaller spread loses its voice:
    lower it, or scale the reward."""
    clip_low: Annotated[Positive, Le(1)] | None = None
    """Lower clip bound; null takes the preset's."""
    clip_high: Positive | None = None
    """Upper clip bound; null takes the preset's."""
    kl_coef: Coefficient = 0.0
    """Weight of the KL term (k3) of the loss against the reference; with 0 here (and in ppo) it never runs."""
    kl_corrected: bool = False
    """Weigh the KL term by the policy ratio, which makes its gradient unbiased."""
    entropy_coef: Coefficient = 0.0
    """Weight of the entropy bonus; with entropy_target the first one."""
    entropy_target: NonNegative | None = None
    """Mean entropy of a token, in nats, that entropy_coef keeps up: each update moves it up by entropy_coef_delta where
    the entropy is at most this, else down, within 0 and 1; above it no bonus acts. null keeps entropy_coef."""
    entropy_coef_delta: Positive = 0.005
    """Step of an entropy_coef that adapts to entropy_target."""
    entropy_share: Annotated[Positive, Le(1)] = 1.0
    """Share of the batch's tokens, those of highest entropy, that the policy gradient uses; 1 for all."""
    importance_cap: float | None = None
    """Weigh each token by the trainer's probability over the sampler's (older weights, top_k, top_p, min_p, another
    number type), at most this; 0 for never; null: 2 with training.async_level 1, else 0."""
    importance_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """Of importance_cap c: "truncate" bounds weights by c, "mask" drops those outside 1/c to c; of each token, or of a
    completion's product."""
    off_policy_mask_threshold: Positive | None = None
    """Leave a completion of negative advantage out once the policy's mean log-probability of its tokens fell by more
    than this since they were sampled; null for never."""
    update_ref_every: Count = 0
    """Refresh the reference every so many iterations; 0 keeps the start."""
    mask_truncated: bool = False
    """Leave completions that hit max_new_tokens out of the loss."""
    overlong_buffer: Count = 0
    """Length of the last stretch of max_new_tokens in which a completion loses up to 1, as an objective of its own
    called "overlong"; 0 for no penalty."""
    overlong_weight: Positive = 1.0
    """Weight of "overlong" among the rewards."""
    zero_variance_groups: Literal["keep", "drop", "resample"] = "keep"
    """Zero-variance groups (gdpo: no reward varies in them; else: their sum does not): "keep" them as zeros, "drop"
    them out of the loss and its denominators, or "resample" other prompts for them, three times at most."""
    turn_advantage: Literal["last", "return"] = "last"
    """What weighs the tokens of an episode: "last", the rewards of its last turn alone, alike for all turns; "return",
    of each turn the rewards from there on, compared with the same turn of the group."""
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
        grouped = self.zero_variance_groups == "keep" or self.compares_groups
        self.require(grouped, "zero_variance_groups", f"'keep' with {chosen}, which compares no groups")
        binary = self.overlong_buffer == 0 or self.advantage != "maxrl"
        self.require(binary, "overlong_buffer", "0 with advantage 'maxrl', which takes rewards of 0 and 1")
        for name in ("clip_low", "clip_high") if self.preset in ("cispo", "sapo", "drpo") else ():
            unbounded = f"null with preset {self.preset!r}, which has no clip bounds"
            self.require(getattr(self, name) is None, name, unbounded)

    @property
    def learns_values(self) -> bool:
        """Whether a value head gives the advantages (PPO), rather than the group."""
        return self.advantage == "gae"

    @property
    def compares_groups(self) -> bool:
        """Whether a completion is compared with the others of its prompt."""
        return self.advantage not in ("gae", "batch", "opd")


class PPOSection(Section):
    """What algorithm.advantage "gae" adds: a value head, a reward for each token, and the value loss."""

    gamma: Share = 1.0
    """Discount of later rewards (gamma)."""
    gae_lambda: Share = 0.95
    """How far advantages look past the value of the next state (lambda): 0 one token, 1 to the end."""
    value_coef: Coefficient = 0.5
    """Weight of the value loss."""
    kl_coef: Coefficient = 0.0
    """Weight of the KL against the reference in each token's reward (estimator k1)."""


class OptimizerSection(Section):
    """Optimizer and schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """"adamw"; or "muon" for the matrices that decay, AdamW for the rest (docs/algorithms.md)."""
    learning_rate: Positive | None = None
    """Peak learning rate; null takes one that is safe for a pretrained policy: 1e-6 where all weights are trained, 1e-4
    where adapters are (policy.lora)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: Count = 0
    """Updates of linear warm-up."""
    weight_decay: Coefficient = 0.0
    """Decoupled weight decay of projections and adapters; norms, biases, embeddings and heads do not decay."""
    beta2: Annotated[NonNegative, Lt(1)] = 0.99
    """Decay of the second moment."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this global norm; 0 for never."""


class TrainingSection(Section):
    """The loop."""

    prompts_per_batch: Length = 12
    """Prompts of one iteration (P)."""
    max_steps: Count = resume_mutable(100)
    """Iterations in all; 0 leaves it to num_epochs."""
    num_epochs: PositiveCount = resume_mutable(1)
    """Passes over the training prompts when max_steps is 0."""
    inner_epochs: PositiveCount = 1
    """Passes over one sampled batch."""
    minibatches: PositiveCount = 1
    """Optimizer updates per pass."""
    grad_accumulation_steps: PositiveCount = resume_mutable(1)
    """Micro-batches per update, to save memory; the gradient stays the same."""
    chunk_prompts: Annotated[int, Ge(0), Le(LENGTH)] = resume_mutable(0)
    """Prompts that travel together through sampling, rendering and scoring; 0 for all."""
    async_level: Annotated[int, Ge(0), Le(1)] = 0
    """1 samples the next batch while this one is judged and learned from, with the weights before that update
    (docs/scaling.md); 0 samples each with the newest."""
    save_every: Count = resume_mutable(25)
    """Iterations between checkpoints; 0 for the end only."""
    keep_checkpoints: PositiveCount = resume_mutable(2)
    """Checkpoints kept beside best and final."""
    max_hours: NonNegative = resume_mutable(0.0)
    """Hours after which this process saves and stops behind an iteration, for --resume to go on; 0 for never."""
    early_stopping_patience: Count = resume_mutable(0)
    """End training after so many validations in a row without a better one; 0 for never."""
    early_stopping_threshold: NonNegative = 0.0
    """What is better exceeds the best validation so far by more than this."""

    def __post_init__(self) -> None:
        parts = self.minibatches * self.grad_accumulation_steps
        expected = f"a multiple of minibatches x grad_accumulation_steps = {parts}"
        self.require(self.prompts_per_batch % parts == 0, "prompts_per_batch", expected)


class RewardSection(Section):
    """One reward: an objective of its own, never summed before the advantages."""

    name: str
    """One that the task has (an unknown one is answered with their list), perhaps as name@judge for another judge than
    the task's own; or package.module:function or file.py:function."""
    weight: Annotated[float, Ge(-COEFFICIENT), Le(COEFFICIENT)] = 1.0
    """Its weight among the objectives."""
    condition_on: str | None = None
    """Count this reward only where the named one, by its label, reaches the threshold. "none": always. Left out: as the
    task has it, mostly always."""
    threshold: float = 0.0
    """The threshold of a condition_on that names a reward."""
    options: Options = {}
    """Keyword arguments of the reward."""
    messages: bool = False
    """Give it prompts and completions as chat messages, as TRL does; of an import path alone."""
    label: str = ""
    """Its name in metrics and condition_on, for several of one function; empty for its own name."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def __post_init__(self) -> None:
        self.require(self.name, "name", "a name")

    @property
    def called(self) -> str:
        """Its name in metrics."""
        return self.label or self.name.rpartition(":")[2]


class EvaluationSection(Section):
    """Held-out measurement."""

    prompts: Count = 128
    """Test prompts measured before and after; 0 for all of them."""
    validation_prompts: Count = 32
    """Validation prompts on which the best checkpoint is chosen."""
    every: Count = 25
    """Iterations between validations; 0 for never."""
    best_by: str = "score"
    """What chooses the best checkpoint, and ends training early: "score", which is maximised, a reward, or one of
    eval_rewards. A checkpoint whose eval_rewards fell below the start's is never the best."""
    samples: Annotated[int, Ge(0), Le(LENGTH)] = 1
    """Sampled completions of each test prompt beside the greedy one (k); 0 for none. Above 1 their mean@k and pass@k
    are reported, with 95 % intervals."""
    temperature: Positive | None = None
    """Of the sampled completions; null for that of training."""
    pass_threshold: float = 1.0
    """What a reward or watched measure must reach for a completion to pass."""
    by: str = ""
    """A column of the prompts; what is watched is measured for each of its values too, as MEASURE/VALUE."""


class SFTSection(Section):
    """Supervised steps before the first iteration, by the same trainer; "before" is measured after them."""

    steps: Count = 0
    """Supervised updates, on pairs that the task has; 0 for none."""
    batch: Length = 64
    """Pairs of one update."""
    learning_rate: Positive = 1e-3
    """Peak learning rate, after a tenth of the steps as a warm-up; it falls to 0 along a cosine."""
    group_by_length: bool = False
    """Make batches of prompts of like length, which need less padding: faster where lengths differ."""


class RetrievalSection(Section):
    """What ranks the catalogue against a completion.

    Both backends give the same ranks; the retriever's own fingerprint identifies its encoder and catalogue.
    """

    backend: Literal["local", "ray"] = resume_mutable("local")
    """"local" ranks in this process; "ray" asks a service that `python -m bridges.retrieval serve` started."""
    encoder: Annotated[str, MinLen(1)] = resume_mutable("tfidf")
    """"tfidf", or a folder or hub name of a sentence-transformers model."""
    address: str | None = resume_mutable(None)
    """HOST:PORT of the service's Ray cluster, as `serve` prints it (ray)."""
    cache: str | None = resume_mutable(None)
    """Folder that keeps the catalogue's vectors between runs (local); null keeps none."""
    device: str = resume_mutable("cpu")
    """Of a sentence-transformers model in this process: "cpu" or "gpu:N"."""
