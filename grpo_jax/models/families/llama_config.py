"""What a decoder of the Llama and Qwen families is, read from a Hugging Face ``config.json``."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from grpo_jax.errors import shown
from grpo_jax.models.families import fields as kinds
from grpo_jax.models.families.family import NEUTRAL, refuse_changed
from grpo_jax.models.families.vision_fields import read_vision
from grpo_jax.models.layers import ACTIVATIONS
from grpo_jax.models.rope import SCALINGS, RopeConfig
from grpo_jax.models.vision.config import VisionConfig

TEXT_TYPES = ("llama", "mistral", "qwen2", "qwen3")
VISION_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
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
_ROPE_KINDS = {
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), kinds.POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"), kinds.NOT_NEGATIVE),
    "original_max_position_embeddings": kinds.POSITIONS,
    "rope_type": kinds.NAME,
    "mrope_section": kinds.WIDTHS,
    "type": kinds.NAME,
    "truncate": kinds.FLAG,
}
_DEFAULT_THETA = {"qwen2_vl": 1e6, "qwen2_5_vl": 1e6, "qwen3_vl": 5e5}
_DEFAULT_SECTIONS = {"qwen2_vl": (16, 24, 24), "qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20)}
_DEFAULTS = {"mistral": {"num_key_value_heads": 8, "sliding_window": 4096}}
_DEFAULT_EPS = {"qwen2_vl": 1e-5, "qwen2_5_vl": 1e-5}


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
        windows: per layer how many positions back attention reaches (itself included), None for all.
        qkv_bias: biases on the query, key and value projections.
        output_bias: bias on the attention's output projection.
        mlp_bias: biases on the MLP's projections.
        qk_norm: RMS norm on each head's queries and keys before the rotation (Qwen3).
        tie_word_embeddings: the head is the embedding.
        max_positions: the context length the model was made for; informative.
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
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    max_positions: int = 2048
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
        if len(self.windows) != self.num_layers:
            raise ValueError(f"windows must have one entry per layer ({self.num_layers}), got {shown(self.windows)}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Read the contents of a ``config.json``, flat or with ``text_config`` / ``rope_parameters``.

        Every field that changes what the decoder computes is honoured or refused by name.

        Raises:
            ValueError: naming the field that is missing or unsupported, with its value.
        """
        model_type = config.get("model_type")
        if model_type not in TEXT_TYPES + VISION_TYPES:
            raise ValueError(f"model_type must be one of {TEXT_TYPES + VISION_TYPES}, got {model_type!r}")
        kinds.check_kinds(config, {"text_config": kinds.TABLE, "tie_word_embeddings": kinds.FLAG})
        fields = _text_fields(config, model_type)
        kinds.check_kinds(fields, _KINDS)
        missing = [name for name in _REQUIRED if fields.get(name) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        _refuse_unsupported(fields, model_type)
        attention_bias = bool(fields.get("attention_bias", False))
        qwen2_like = model_type in ("qwen2", "qwen2_vl", "qwen2_5_vl")
        return cls(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_layers=fields["num_hidden_layers"],
            num_heads=fields["num_attention_heads"],
            num_kv_heads=fields.get("num_key_value_heads") or fields["num_attention_heads"],
            head_dim=_head_dim(fields, model_type),
            activation=fields.get("hidden_act") or "silu",
            rms_norm_eps=float(_first(fields.get("rms_norm_eps"), _DEFAULT_EPS.get(model_type, 1e-6))),
            rope=_with_sections(_rope(fields, model_type), fields, model_type),
            windows=_windows(fields, model_type),
            qkv_bias=True if qwen2_like else attention_bias,
            output_bias=False if qwen2_like else attention_bias,
            mlp_bias=model_type == "llama" and bool(fields.get("mlp_bias", False)),
            qk_norm=model_type in ("qwen3", "qwen3_vl"),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            max_positions=fields.get("max_position_embeddings") or 2048,
            initializer_range=float(_first(fields.get("initializer_range"), 0.02)),
            model_type=model_type,
            vision=read_vision(config, fields["vocab_size"], fields["hidden_size"])
            if model_type in VISION_TYPES
            else None,
        )


def _first(value: Any, fallback: Any) -> Any:
    return fallback if value is None else value


def _text_fields(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The language model's fields; vision models since transformers 4.52 nest them in text_config."""
    if model_type not in VISION_TYPES or not config.get("text_config"):
        return {**_DEFAULTS.get(model_type, {}), **config}
    fields = dict(config["text_config"])
    # Tying is decided at the top level; folders written before transformers 5 said it below.
    fields["tie_word_embeddings"] = bool(config.get("tie_word_embeddings") or fields.get("tie_word_embeddings"))
    return fields


def _refuse_unsupported(fields: Mapping[str, Any], model_type: str) -> None:
    refuse_changed(fields, NEUTRAL, model_type)
    if model_type.startswith("qwen2") and fields.get("attention_bias") is False:
        raise ValueError("attention_bias=False is not supported: Qwen2 always has query, key, value biases")
    if model_type == "mistral" and fields.get("attention_bias"):
        raise ValueError("attention_bias=True is not supported: Mistral has no biases")
    if model_type != "llama" and fields.get("mlp_bias"):
        raise ValueError(f"mlp_bias=True is not supported for model_type {model_type!r}")


def _head_dim(fields: Mapping[str, Any], model_type: str) -> int:
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    head_dim = fields.get("head_dim")
    if model_type in ("qwen3", "qwen3_vl"):
        return head_dim or 128
    if head_dim is None and width % heads:
        raise ValueError(f"hidden_size must be a multiple of num_attention_heads, got {width} and {heads}")
    if model_type in VISION_TYPES and head_dim not in (None, width // heads):
        raise ValueError(f"head_dim={head_dim} is not supported for model_type {model_type!r}: it is {width // heads}")
    return head_dim or width // heads


def _windows(fields: Mapping[str, Any], model_type: str) -> tuple[int | None, ...]:
    """Window per layer, from layer_types or, in older folders, from max_window_layers."""
    layers = fields["num_hidden_layers"]
    types = fields.get("layer_types")
    window = fields.get("sliding_window")
    if model_type in ("llama", "qwen3_vl"):
        if window is not None or any(name != "full_attention" for name in types or ()):
            raise ValueError(f"sliding_window={window}, layer_types={shown(types)} not supported for {model_type!r}")
        return (None,) * layers
    if model_type == "mistral":
        kind = "full_attention" if window is None else "sliding_attention"
        if types is not None and list(types) != [kind] * layers:
            raise ValueError(f"sliding_window={window}, layer_types={shown(types)} not supported for {model_type!r}")
        return (window,) * layers
    if not fields.get("use_sliding_window", False):
        window = None
    if types is None:
        first = _first(fields.get("max_window_layers"), 80 if model_type in VISION_TYPES else 28)
        return tuple(window if index >= first else None for index in range(layers))
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types {shown(unknown)} are not supported")
    if len(types) != layers:
        raise ValueError(f"layer_types must have {layers} entries, one per layer, got {len(types)}")
    if "sliding_attention" in types and window is None:
        raise ValueError("layer_types has sliding_attention but sliding_window or use_sliding_window is unset")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _rope(fields: Mapping[str, Any], model_type: str) -> RopeConfig:
    """From rope_parameters (transformers 5), or rope_theta with rope_scaling (before)."""
    scaling = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    kinds.check_kinds(scaling, _ROPE_KINDS, "rope_parameters.")
    nested = sorted(key for key, value in scaling.items() if isinstance(value, Mapping))
    if nested:
        raise ValueError(f"rope_parameters per layer type ({', '.join(nested)}) are not supported")
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"partial_rotary_factor={scaling['partial_rotary_factor']} is not supported")
    theta = scaling.get("rope_theta") or fields.get("rope_theta") or _DEFAULT_THETA.get(model_type, 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "mrope" and model_type in VISION_TYPES:
        kind = "default"  # all three position axes agree on text, so the sections do not matter
    if kind not in SCALINGS:
        raise ValueError(f"rope type {shown(kind)} is not supported; supported: {', '.join(SCALINGS)}")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    original = (
        fields.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or fields.get("max_position_embeddings", 0)
    )
    factor = scaling.get("factor")
    if factor is None and kind == "yarn" and original:
        factor = (fields.get("max_position_embeddings") or original) / original
    needed = {"llama3": ("low_freq_factor", "high_freq_factor")}.get(kind, ())
    missing = [name for name in needed if scaling.get(name) is None] + (["factor"] if factor is None else [])
    if missing:
        raise ValueError(f"rope type {kind!r} needs {', '.join(missing)}")
    if kind in ("llama3", "yarn") and not original:
        raise ValueError(f"rope type {kind!r} needs original_max_position_embeddings or max_position_embeddings")
    low, high = float(scaling.get("low_freq_factor") or 1.0), float(scaling.get("high_freq_factor") or 4.0)
    if kind == "llama3" and low >= high:
        raise ValueError(f"rope_parameters.low_freq_factor must be below high_freq_factor, got {low} and {high}")
    if kind == "yarn" and float(theta) <= 1:
        raise ValueError(f"rope_theta must be above 1 with rope type 'yarn', got {theta}")
    return RopeConfig(
        theta=float(theta),
        scaling=kind,
        factor=float(factor),
        original_length=int(original) if kind in ("llama3", "yarn") else 0,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(scaling, float(factor)) if kind == "yarn" else 1.0,
    )


def _with_sections(rope: RopeConfig, fields: Mapping[str, Any], model_type: str) -> RopeConfig:
    """With the shares of time, row and column among the frequencies, in models that see pictures."""
    if model_type not in VISION_TYPES:
        return rope
    scaling, half = (
        fields.get("rope_scaling") or fields.get("rope_parameters") or {},
        _head_dim(fields, model_type) // 2,
    )
    given = scaling.get("mrope_section")
    sections = tuple(_DEFAULT_SECTIONS[model_type] if given is None else given)
    if given is None and sum(sections) != half:
        return rope  # without pictures the three positions agree
    if len(sections) != 3 or sum(sections) != half:
        raise ValueError(f"mrope_section must be three numbers that add up to {half}, got {shown(list(sections))}")
    return dataclasses.replace(rope, sections=sections, interleaved=model_type == "qwen3_vl")


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN's attention temperature, 0.1 ln(factor) + 1 unless the folder says otherwise."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)
