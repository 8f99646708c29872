"""Section `policy` of the config. Help lines stand in the docstrings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from grpo_jax.config.fields import LENGTH, WIDTH, Positive, check_ranges, may_change, require

Dtype = Literal["float32", "bfloat16", "float16"]
Precision = Literal["default", "high", "highest"]


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685; docs/lora.md); rank 0 trains every weight.

    Args:
        rank: Rank of the adapters; 0 switches them off and trains all weights.
        alpha: Adapters are scaled by alpha / rank.
        targets: Projections that get an adapter, such as q_proj (GPT-2: c_attn, attn_c_proj, c_fc, mlp_c_proj); empty
            for all of them.
        vision: Whether all projections of the vision tower's layers get one too.
        path: Folder of a PEFT adapter to start from; rank, alpha and targets are then its own, and the tower has
            those that it has.
    """

    rank: Annotated[int, Ge(0), Le(WIDTH)] = 0
    alpha: Positive = 32.0
    targets: list[str] = field(default_factory=list)
    vision: bool = False
    path: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "policy.lora")
        beside = {"rank": self.rank, "alpha": self.alpha, "targets": self.targets, "vision": self.vision}
        alone = self.path is None or beside == {"rank": 0, "alpha": 32.0, "targets": [], "vision": False}
        expected = "no rank, alpha or targets beside it, nor vision: the adapter has its own"
        require(alone, "policy.lora.path", expected, beside)
        adapted = self.used or not self.vision
        expected = "false without adapters (policy.lora.rank 0; policy.vision train)"
        require(adapted, "policy.lora.vision", expected, self.vision)

    @property
    def used(self) -> bool:
        """Whether adapters are trained rather than all weights."""
        return self.rank > 0 or self.path is not None


@dataclass(frozen=True)
class NewPolicySection:
    """A small policy with random weights, made from the words of a task (policy.path "new").

    Args:
        architecture: "llama", or "gpt2": learned positions, of which there are `window`.
        width: Of the hidden states.
        layers: Decoder layers.
        heads: Attention heads; they divide the width into even parts.
        vocabulary: The task's most frequent words that become tokens; 0 for all of them.
        window: Longest text in tokens.
    """

    architecture: Literal["llama", "gpt2"] = "llama"
    width: Annotated[int, Ge(1), Le(2**16)] = 96
    layers: Annotated[int, Ge(1), Le(1024)] = 2
    heads: Annotated[int, Ge(1), Le(2**16)] = 4
    vocabulary: Annotated[int, Ge(0), Le(LENGTH)] = 0
    window: Annotated[int, Ge(1), Le(WIDTH)] = 256

    def __post_init__(self) -> None:
        check_ranges(self, "policy.new")
        expected = f"a number that divides width = {self.width} into even parts"
        require(self.width % (2 * self.heads) == 0, "policy.new.heads", expected, self.heads)


@dataclass(frozen=True)
class MeshSection:
    """Several devices for the policy (docs/scaling.md); 1 x 1 is a single one.

    Args:
        fsdp: Parts that weights are stored in and a batch's prompts are shared out to.
        tensor: Parts that heads, MLP and vocabulary are cut into.
    """

    fsdp: Annotated[int, Ge(1), Le(2**16)] = 1
    tensor: Annotated[int, Ge(1), Le(2**16)] = 1

    def __post_init__(self) -> None:
        check_ranges(self, "policy.mesh")

    @property
    def size(self) -> int:
        """Devices it takes."""
        return self.fsdp * self.tensor


@dataclass(frozen=True)
class PolicySection:
    """The policy that is trained.

    Args:
        path: Hugging Face folder or hub id of a Qwen2, Qwen3, Qwen3-MoE, Llama, Mistral, SmolLM3, Phi-3, Gemma 2 or 3,
            GPT-2 or Qwen-VL model (docs/policies.md); the name of a policy that ships with the package; or "new".
        new: The small untrained policy that "new" makes, where the task has words for one.
        compute_dtype: Type of the activations; float16 comes with a dynamic scale of the loss.
        matmul_precision: Of products of matrices (jax.default_matmul_precision); null is "highest" with compute_dtype
            float32, whose products GPUs (TF32) and TPUs (bfloat16) round otherwise, and JAX's default else.
        frozen_dtype: Type of weights that are not trained (with LoRA); trained weights are float32.
        quantised: Bits of the frozen layers' weights (with LoRA, one device; docs/lora.md).
        remat: What the backward pass computes again to save memory: "none"; "products", attention and all that is
            elementwise, while results of products with weights are kept; "layer", whole layers.
        vision: Whether the vision tower of a model that sees is "frozen" or "train"ed in all its weights; adapters on
            a frozen one are policy.lora.vision.
        lora: Low-rank adapters.
        mesh: Several devices.
    """

    path: str = ""
    new: NewPolicySection = field(default_factory=NewPolicySection)
    compute_dtype: Dtype = "float32"
    matmul_precision: Precision | None = None
    frozen_dtype: Dtype = "float32"
    quantised: Literal["none", "int8", "int4"] = "none"
    remat: Literal["none", "products", "layer"] = may_change("products")
    vision: Literal["frozen", "train"] = "frozen"
    lora: LoraSection = field(default_factory=LoraSection)
    mesh: MeshSection = may_change(default_factory=MeshSection)

    def __post_init__(self) -> None:
        expected = "frozen beside policy.lora (its adapters on the tower: policy.lora.vision)"
        require(self.vision == "frozen" or not self.lora.used, "policy.vision", expected, self.vision)
