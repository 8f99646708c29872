"""What a decoder of the Llama and Qwen families is, read from a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from grpo_jax.errors import shown
from grpo_jax.models import fields as kinds
from grpo_jax.models.layers import ACTIVATIONS
from grpo_jax.models.rope import RopeConfig, read_rope
from grpo_jax.models.vision.config import VisionConfig, read_vision

TEXT_TYPES = ("llama", "mistral", "qwen2", "qwen3")
VISION_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_KINDS = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), kinds.WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), kinds.HEADS),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), kinds.POSITIONS),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), kinds.FLAG),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), kinds.TABLE),
    "vocab_size": kinds.VOCABULARY,
    "num_hidden_layers": kinds.LAYERS,
    "sliding_window": kinds.POSITIONS,
    "max_window_layers": kinds.whole(0, 2**31 - 1),
    "layer_types": kinds.NAMES,
    "hidden_act": kinds.NAME,
    "rms_norm_eps": kinds.NOT_NEGATIVE,
    "initializer_range": kinds.NOT_NEGATIVE,
    "rope_theta": kinds.POSITIVE,
}
_DEFAULT_THETA = {"qwen2_vl": 1e6, "qwen2_5_vl": 1e6, "qwen3_vl": 5e5}
_DEFAULT_SECTIONS = {"qwen2_vl": (16, 24, 24), "qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20)}
_DEFAULTS = {"mistral": {"num_key_value_heads": 8, "sliding_window": 4096}}
_DEFAULT_EPS = {"qwen2_vl": 1e-5, "qwen2_5_vl": 1e-5}


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A mixture of experts in the place of each layer's MLP (`layers.Router`).

    Attributes:
        experts: X, how many there are.
        chosen: k, how many of them a token runs through.
        width: of each one's gated MLP.
        normalised: whether the weights of the chosen ones add up to 1.
    """

    experts: int
    chosen: int
    width: int
    normalised: bool = False

    def __post_init__(self):
        """Refuse a choice that cannot be."""
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"num_experts_per_tok must be from 1 to num_experts={self.experts}, got {self.chosen}")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and choices of a decoder of the Llama / Qwen family; hashable, hence static under jit.

    Attributes:
        vocab_size: V, rows of the embedding (may exceed the tokenizer's).
        hidden_size: D.
        intermediate_size: width of the gated MLP.
        num_layers: number of layers.
        num_heads: H, query heads.
        num_kv_heads: K, key/value heads; divides H.
        head_dim: E, size of a head (even).
        activation: the MLP's gate, one of ``layers.ACTIVATIONS``.
        rms_norm_eps: epsilon of every RMS norm.
        rope: rotary embedding.
        layer_ropes: that of each layer where they differ, None for a layer without; empty where all have ``rope``.
        windows: per layer how many positions back attention reaches (itself included), None for all.
        qkv_bias: biases on the query, key and value projections.
        output_bias: bias on the attention's output projection.
        mlp_bias: biases on the MLP's projections.
        fused: queries, keys and values are one projection, gate and up another (Phi-3).
        qk_norm: RMS norm on each head's queries and keys before the rotation (Qwen3).
        mixture: of experts in each layer; None for one MLP.
        unit_offset: norms multiply by 1 + weight, in float32 (Gemma).
        post_norms: what attention and MLP give is normed too, before it is added (Gemma).
        attention_scale: what multiplies attention's scores; None for E^-0.5.
        attention_softcap: the cap of these scores, None for none.
        logit_softcap: the cap of the logits, None for none.
        embedding_scale: what multiplies embedded tokens.
        tie_word_embeddings: the head is the embedding.
        max_positions: max_position_embeddings, as the folder has it; None where it does not say.
        initializer_range: standard deviation of freshly drawn weights.
        model_type: Hugging Face's name of the architecture.
        vision: the tower beside it, or None for a model of text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str = "silu"
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False
    qk_norm: bool = False
    mixture: Mixture | None = None
    unit_offset: bool = False
    post_norms: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    max_positions: int | None = None
    initializer_range: float = 0.02
    model_type: str = "llama"
    vision: VisionConfig | None = None

    def __post_init__(self):
        """Fill in ``windows`` and refuse shapes that cannot be."""
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of {tuple(ACTIVATIONS)}, got {shown(self.activation)}")
        for name in ("windows", "layer_ropes"):
            value = getattr(self, name)
            if value and len(value) != self.num_layers:
                raise ValueError(f"{name} must have one entry per layer ({self.num_layers}), got {shown(value)}")

    @property
    def context_length(self) -> int | None:
        """Tokens of a text that the folder has positions for, scaled ones included; None where it does not say."""
        if self.max_positions is None:
            return None
        scaled = (self.rope.original_length or self.max_positions) * self.rope.factor
        return max(self.max_positions, int(min(scaled, 2**31)))

    @classmethod
    def from_hf(cls, config: kinds.Fields) -> "DecoderConfig":
        """Read the contents of a ``config.json``, flat or with ``text_config`` / ``rope_parameters``.

        Every field that changes what the decoder computes is honoured or refused by name.

        Raises:
            ValueError: Naming the field that is missing or unsupported, with its value.
        """
        model_type = config.get("model_type")
        if model_type not in TEXT_TYPES + VISION_TYPES:
            raise ValueError(f"model_type must be one of {TEXT_TYPES + VISION_TYPES}, got {model_type!r}")
        kinds.check_kinds(config, {"text_config": kinds.TABLE, "tie_word_embeddings": kinds.FLAG})
        fields = _text_fields(config, model_type)
        shared = read_shared(fields, model_type, head_dim=128 if model_type in ("qwen3", "qwen3_vl") else None)
        _refuse_unsupported(fields, model_type)
        attention_bias = bool(fields.get("attention_bias", False))
        qwen2_like = model_type in ("qwen2", "qwen2_vl", "qwen2_5_vl")
        return cls(
            **shared,
            rope=_rope(fields, model_type, shared["head_dim"] // 2),
            windows=_windows(fields, model_type),
            qkv_bias=True if qwen2_like else attention_bias,
            output_bias=False if qwen2_like else attention_bias,
            mlp_bias=model_type == "llama" and bool(fields.get("mlp_bias", False)),
            qk_norm=model_type in ("qwen3", "qwen3_vl"),
            vision=read_vision(config, fields["vocab_size"], fields["hidden_size"])
            if model_type in VISION_TYPES
            else None,
        )


def read_shared(
    fields: kinds.Fields,
    model_type: str,
    *,
    extra_kinds: Mapping[str, kinds.Kind] = MappingProxyType({}),
    honoured: tuple[str, ...] = (),
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Check the fields that all families of `DecoderConfig` share, and return its arguments that they read alike.

    Args:
        fields: Of the language model, with the family's own defaults filled in.
        model_type: Hugging Face's name of the architecture.
        extra_kinds: Of fields that this family alone has.
        honoured: Of ``NEUTRAL``, the fields whose other values this family computes.
        head_dim: Where the fields name none; None for the width over the heads.

    Raises:
        ValueError: Naming the field that is missing or unsupported, with its value.
    """
    kinds.check_kinds(fields, {**_KINDS, **extra_kinds})
    fields = kinds.not_null(fields)
    missing = [name for name in _REQUIRED if fields.get(name) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    neutral = {name: values for name, values in kinds.NEUTRAL.items() if name not in honoured}
    kinds.refuse_changed(fields, neutral, model_type)
    return {
        "vocab_size": fields["vocab_size"],
        "hidden_size": fields["hidden_size"],
        "intermediate_size": fields["intermediate_size"],
        "num_layers": fields["num_hidden_layers"],
        "num_heads": fields["num_attention_heads"],
        "num_kv_heads": fields.get("num_key_value_heads") or fields["num_attention_heads"],
        "head_dim": fields.get("head_dim") or head_dim or _head_dim(fields),
        "activation": fields.get("hidden_act") or "silu",
        "rms_norm_eps": float(fields.get("rms_norm_eps", _DEFAULT_EPS.get(model_type, 1e-6))),
        "tie_word_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "max_positions": fields.get("max_position_embeddings"),
        "initializer_range": float(fields.get("initializer_range", 0.02)),
        "model_type": model_type,
    }


def _text_fields(config: kinds.Fields, model_type: str) -> dict[str, Any]:
    """The language model's fields; vision models since transformers 4.52 nest them in text_config."""
    if model_type not in VISION_TYPES or not config.get("text_config"):
        return {**_DEFAULTS.get(model_type, {}), **config}
    fields = dict(config["text_config"])
    # Tying is decided at the top level; folders written before transformers 5 said it below.
    fields["tie_word_embeddings"] = bool(config.get("tie_word_embeddings") or fields.get("tie_word_embeddings"))
    return fields


def _refuse_unsupported(fields: kinds.Fields, model_type: str) -> None:
    if model_type.startswith("qwen2") and fields.get("attention_bias") is False:
        raise ValueError("attention_bias=False is not supported: Qwen2 always has query, key, value biases")
    if model_type == "mistral" and fields.get("attention_bias"):
        raise ValueError("attention_bias=True is not supported: Mistral has no biases")
    if model_type != "llama" and fields.get("mlp_bias"):
        raise ValueError(f"mlp_bias=True is not supported for model_type {model_type!r}")
    if model_type in ("qwen2_vl", "qwen2_5_vl") and fields.get("head_dim") not in (None, _head_dim(fields)):
        raise ValueError(
            f"head_dim={fields['head_dim']} is not supported for model_type {model_type!r}: it is {_head_dim(fields)}"
        )


def _head_dim(fields: kinds.Fields) -> int:
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    if width % heads:
        raise ValueError(f"hidden_size must be a multiple of num_attention_heads, got {width} and {heads}")
    return width // heads


def _windows(fields: kinds.Fields, model_type: str) -> tuple[int | None, ...]:
    """Window per layer, from layer_types or, in older folders, from max_window_layers."""
    layers = fields["num_hidden_layers"]
    types = fields.get("layer_types")
    window = fields.get("sliding_window")
    if model_type in ("llama", "qwen3_vl"):
        if window is not None or any(name != "full_attention" for name in types or ()):
            raise ValueError(f"sliding_window={window}, layer_types={shown(types)} not supported for {model_type!r}")
        return (None,) * layers
    if model_type == "mistral":
        return same_window(fields, window)
    window = window if fields.get("use_sliding_window", False) else None
    if types is not None:
        return typed_windows(fields, types, window)
    first = fields.get("max_window_layers")
    if first is None:
        first = 80 if model_type in VISION_TYPES else 28
    return tuple(window if index >= first else None for index in range(layers))


def same_window(fields: kinds.Fields, window: int | None) -> tuple[int | None, ...]:
    """The same window, or none, for every layer; ValueError where layer_types says something else."""
    layers, types = fields["num_hidden_layers"], fields.get("layer_types")
    kind = "full_attention" if window is None else "sliding_attention"
    if types is not None and list(types) != [kind] * layers:
        name = fields.get("model_type")
        raise ValueError(f"sliding_window={window}, layer_types={shown(types)} not supported for {name!r}")
    return (window,) * layers


def typed_windows(fields: kinds.Fields, types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer whose type is ``sliding_attention``; None for ``full_attention``."""
    layers = fields["num_hidden_layers"]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types {shown(unknown)} are not supported")
    if len(types) != layers:
        raise ValueError(f"layer_types must have {layers} entries, one per layer, got {len(types)}")
    if "sliding_attention" in types and window is None:
        raise ValueError("layer_types has sliding_attention but sliding_window or use_sliding_window is unset")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _rope(fields: kinds.Fields, model_type: str, half: int) -> RopeConfig:
    """With the shares of time, row and column among the frequencies, in models that see pictures."""
    if model_type not in VISION_TYPES:
        return read_rope(fields)
    # On text all three position axes agree, so "mrope" scales nothing.
    rope = read_rope(fields, theta=_DEFAULT_THETA[model_type], plain=("mrope",))
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    sections = scaling.get("mrope_section")
    if sections is None:
        sections = _DEFAULT_SECTIONS[model_type]
        if sum(sections) != half:
            return rope  # without pictures the three positions agree
    sections = tuple(sections)
    if len(sections) != 3 or sum(sections) != half:
        raise ValueError(f"mrope_section must be three numbers that add up to {half}, got {shown(list(sections))}")
    return dataclasses.replace(rope, sections=sections, interleaved=model_type == "qwen3_vl")
