"""Llama, Mistral, OLMo 2, Qwen2, Qwen3 and the language models of Qwen-VL: RMS norms, RoPE, a gated MLP."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from pydantic.dataclasses import dataclass

from grpo_jax.models import hf_config, layers
from grpo_jax.models.attention import Context, LayerInput, LayerOutput, add_deepstack, attend_streams
from grpo_jax.models.hf_config import STRICT, Heads, NotNegative, Positions, Positive, Rows, Width
from grpo_jax.models.layers import COLUMNS, GATED_PROJECTIONS, ROWS, Architecture, Naming, Projection, RMSNorm
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.rope import UNTURNED, RopeConfig, Rotation, read_rope, rotate, rotation
from grpo_jax.models.vision.config import VisionConfig, read_vision

TEXT_TYPES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
VISION_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DEFAULT_THETA = {"qwen2_vl": 1e6, "qwen2_5_vl": 1e6, "qwen3_vl": 5e5}
_DEFAULT_SECTIONS = {"qwen2_vl": (16, 24, 24), "qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20)}
_DEFAULTS = {"mistral": {"num_key_value_heads": 8, "sliding_window": 4096}}
_DEFAULT_EPS = {"qwen2_vl": 1e-5, "qwen2_5_vl": 1e-5, "olmo2": 1e-5}
_QK_NORMS = {"qwen3": "head", "qwen3_vl": "head", "olmo2": "projection"}


@dataclass(frozen=True, config=STRICT)
class DecoderConfig:
    """Shape and choices of a Llama-like decoder; hashable, hence static under jit."""

    vocab_size: Rows  # V, rows of the embedding (may exceed the tokenizer's)
    hidden_size: Width  # D
    intermediate_size: Width  # width of the gated MLP
    num_layers: Positions  # number of layers
    num_heads: Heads  # H, query heads
    num_kv_heads: Heads  # K, key/value heads; divides H
    head_dim: Heads  # E, size of a head (even)
    activation: str = "silu"  # the MLP's gate, one of `layers.ACTIVATIONS`
    rms_norm_eps: NotNegative = 1e-6  # epsilon of every RMS norm
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)  # rotary embedding
    layer_ropes: tuple[RopeConfig | None, ...] = ()  # of each layer, None for a layer without; empty if all have `rope`
    windows: tuple[Positions | None, ...] = ()  # positions that each layer looks back, with its own; None for all
    qkv_bias: bool = False  # biases on the query, key and value projections
    output_bias: bool = False  # bias on the attention's output projection
    mlp_bias: bool = False  # biases on the MLP's projections
    fused: bool = False  # queries, keys and values are one projection, gate and up another (Phi-3)
    # RMS norm of queries and keys before the rotation: on each head (Qwen3), or on the whole projection (OLMo 2)
    qk_norm: Literal["", "head", "projection"] = ""
    unit_offset: bool = False  # norms multiply by 1 + weight, in float32 (Gemma)
    norms: Literal["pre", "post", "both"] = "pre"  # on inputs of attention and MLP, outputs (OLMo 2), or both (Gemma)
    attention_scale: Positive | None = None  # factor of attention scores; None for E^-0.5
    attention_softcap: Positive | None = None  # softcap of attention scores, None for none
    logit_softcap: Positive | None = None  # softcap of the logits, None for none
    embedding_scale: Positive = 1.0  # factor of embedded tokens
    tie_word_embeddings: bool = False  # the head is the embedding
    max_positions: Positions | None = None  # the folder's max_position_embeddings, or None
    initializer_range: NotNegative = 0.02  # standard deviation at initialisation
    model_type: str = "llama"  # Hugging Face's name of the architecture
    vision: VisionConfig | None = None  # the vision tower, or None for a text-only model

    def __post_init__(self):
        """Fill in ``windows`` and refuse impossible shapes."""
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        divides = self.num_heads % self.num_kv_heads == 0
        hf_config.expect(divides, "num_key_value_heads", f"a divisor of {self.num_heads} heads", self.num_kv_heads)
        hf_config.expect(self.head_dim % 2 == 0, "head_dim", "an even number", self.head_dim)
        known = tuple(layers.ACTIVATIONS)
        hf_config.expect(self.activation in known, "hidden_act", f"one of {known}", self.activation)

    @property
    def context_length(self) -> int | None:
        """Return the number of positions, including RoPE scaling; None if the folder does not tell."""
        if self.max_positions is None:
            return None
        scaled = (self.rope.original_length or self.max_positions) * self.rope.factor
        return max(self.max_positions, int(min(scaled, 2**31)))

    @classmethod
    def from_hf(cls, config: hf_config.ConfigJson) -> "DecoderConfig":
        """Read a ``config.json``, flat or nested; fields that change the result are supported or refused by name."""
        model_type = config["model_type"]
        fields = _text_fields(config, model_type)
        shared = read_shared(fields, model_type, head_dim=128 if model_type in ("qwen3", "qwen3_vl") else None)
        hf_config.refuse_changed(fields, _neutral(fields, model_type), model_type)
        sees = model_type in VISION_TYPES
        return cls(
            **shared,
            rope=_rope(fields, model_type, shared["head_dim"] // 2),
            windows=_windows(fields, model_type),
            mlp_bias=model_type == "llama" and fields.get("mlp_bias", False),
            qk_norm=_QK_NORMS.get(model_type, ""),
            norms="post" if model_type == "olmo2" else "pre",
            vision=read_vision(config, fields["vocab_size"], fields["hidden_size"]) if sees else None,
        )


def read_shared(
    fields: hf_config.ConfigJson, model_type: str, *, honoured: tuple[str, ...] = (), head_dim: int | None = None
) -> dict[str, Any]:
    """Check the fields shared by all architectures of `DecoderConfig`, and return its common arguments.

    `fields` include the architecture's defaults, and `honoured` are the fields of ``NEUTRAL`` that it supports.
    """
    neutral = {name: values for name, values in hf_config.NEUTRAL.items() if name not in honoured}
    fields = hf_config.check_fields(fields, neutral, model_type, _REQUIRED)
    hf_config.check_layers(fields["num_hidden_layers"], "num_hidden_layers")
    bias, qwen2_like = fields.get("attention_bias", False), model_type in ("qwen2", "qwen2_vl", "qwen2_5_vl")
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
        "qkv_bias": bias or qwen2_like,
        "output_bias": bias and not qwen2_like,
        "tie_word_embeddings": fields.get("tie_word_embeddings", False),
        "max_positions": fields.get("max_position_embeddings"),
        "initializer_range": float(fields.get("initializer_range", 0.02)),
        "model_type": model_type,
    }


def _text_fields(config: hf_config.ConfigJson, model_type: str) -> dict[str, Any]:
    """Return the language model's fields; vision models since transformers 4.52 nest them in text_config."""
    if model_type not in VISION_TYPES or not config.get("text_config"):
        return {**_DEFAULTS.get(model_type, {}), **config}
    fields = dict(config["text_config"])
    # Tying is set at the top level; folders before transformers 5 set it below.
    fields["tie_word_embeddings"] = config.get("tie_word_embeddings") or fields.get("tie_word_embeddings") or False
    return fields


def _neutral(fields: hf_config.ConfigJson, model_type: str) -> dict[str, tuple[Any, ...]]:
    """Return neutral values of other model types' fields, the only values that this one supports."""
    neutral: dict[str, tuple[Any, ...]] = {} if model_type == "llama" else {"mlp_bias": (False,)}
    if model_type.startswith("qwen2"):
        neutral["attention_bias"] = (True,)  # queries, keys and values always have biases
    if model_type == "mistral":
        neutral["attention_bias"] = (False,)
    if model_type in ("llama", "olmo2", "qwen3_vl"):
        neutral["sliding_window"] = ()
    if model_type in ("qwen2_vl", "qwen2_5_vl"):
        neutral["head_dim"] = (_head_dim(fields),)
    return neutral


def _head_dim(fields: hf_config.ConfigJson) -> int:
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    hf_config.expect(width % heads == 0, "hidden_size", f"a multiple of num_attention_heads={heads}", width)
    return width // heads


def _windows(fields: hf_config.ConfigJson, model_type: str) -> tuple[int | None, ...]:
    """Return the window per layer, from layer_types or, in older folders, from max_window_layers."""
    types = fields.get("layer_types")
    if model_type in ("llama", "olmo2", "qwen3_vl", "mistral"):
        return same_window(fields, fields.get("sliding_window"))
    window = fields.get("sliding_window", 4096) if fields.get("use_sliding_window", False) else None
    if types is not None:
        return typed_windows(fields, types, window)
    first = fields.get("max_window_layers")
    if first is None:
        first = 80 if model_type in VISION_TYPES else 28
    return tuple(window if index >= first else None for index in range(fields["num_hidden_layers"]))


def same_window(fields: hf_config.ConfigJson, window: int | None) -> tuple[int | None, ...]:
    """Return the same window, or None, for every layer; ValueError if layer_types differs."""
    count, types = fields["num_hidden_layers"], fields.get("layer_types")
    kind = "full_attention" if window is None else "sliding_attention"
    same = not types or list(types) == [kind] * count
    hf_config.expect(same, "layer_types", f"{kind} in each of {count} layers, with sliding_window={window}", types)
    return (window,) * count


def typed_windows(fields: hf_config.ConfigJson, types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return each layer's window: `window` for type ``sliding_attention``, None for ``full_attention``."""
    count = fields["num_hidden_layers"]
    known = len(types) == count and set(types) <= {"full_attention", "sliding_attention"}
    hf_config.expect(known, "layer_types", f"full_attention or sliding_attention for each of {count} layers", types)
    slides = window is not None or "sliding_attention" not in types
    words = "a number, and use_sliding_window, for layers of sliding_attention"
    hf_config.expect(slides, "sliding_window", words, window)
    return tuple(window if name == "sliding_attention" else None for name in types)


def _rope(fields: hf_config.ConfigJson, model_type: str, half: int) -> RopeConfig:
    """Return the rotary embedding; vision models share its frequencies between time, row and column."""
    if model_type not in VISION_TYPES:
        return read_rope(fields)
    # On text all three position axes agree, so "mrope" has no scaling.
    rope = read_rope(fields, theta=_DEFAULT_THETA[model_type], plain=("mrope",))
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    sections = scaling.get("mrope_section")
    if sections is None:
        sections = _DEFAULT_SECTIONS[model_type]
        if sum(sections) != half:
            return rope  # without pictures the three positions agree
    sections = tuple(sections)
    fits = len(sections) == 3 and sum(sections) == half
    hf_config.expect(fits, "mrope_section", f"three numbers that add up to {half}", list(sections))
    return dataclasses.replace(rope, sections=sections, interleaved=model_type == "qwen3_vl")


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings, over prompts and completions at once (see ``attend_streams``)."""

    config: DecoderConfig
    project: Callable[[int, bool], Projection]  # (features, whether there is a bias) -> a projection
    implementation: str

    def setup(self):
        """Declare the projections and the norms of queries and keys."""
        c = self.config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        if c.fused:
            self.qkv_proj = self.project(queries + 2 * keys, c.qkv_bias)
        else:
            self.q_proj = self.project(queries, c.qkv_bias)
            self.k_proj = self.project(keys, c.qkv_bias)
            self.v_proj = self.project(keys, c.qkv_bias)
        self.o_proj = self.project(c.hidden_size, c.output_bias)
        if c.qk_norm:
            self.q_norm = _norm(c)
            self.k_norm = _norm(c)

    def __call__(self, x: jax.Array, layer_input: LayerInput, context: Context) -> LayerOutput:
        """Attend with states [P, S, D]; also returns keys and values to cache."""
        assert context.rotation is not None  # set by the decoder
        cos, sin = context.rotation
        if layer_input.rotation is not None:
            cos, sin = (jnp.take(part, layer_input.rotation, axis=0) for part in (cos, sin))
        query, key, value = self._heads(x, (cos, sin))
        softcap = self.config.attention_softcap
        mixed, new = attend_streams(query, key, value, layer_input, context, softcap, self.implementation)
        return self.o_proj(mixed), new  # mixed [P, S, H·E]

    def _heads(self, x: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [P, S, K, R, E], keys and values [P, S, K, E] of states [P, S, D]."""
        c = self.config
        if c.fused:
            queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
            query, key, value = jnp.split(self.qkv_proj(x), (queries, queries + keys), axis=-1)
        else:
            query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if c.qk_norm == "projection":
            query, key = self.q_norm(query), self.k_norm(key)
        query = query.reshape(*x.shape[:-1], c.num_kv_heads, -1, c.head_dim)
        key, value = (part.reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim) for part in (key, value))
        if c.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = (part[:, :, None] for part in rotation)
        return rotate(query, cos[..., None, :], sin[..., None, :]), rotate(key, cos, sin), value


class GatedMLP(nn.Module):
    """The MLP down(activation(gate x) · up x)."""

    config: DecoderConfig
    project: Callable[[int, bool], Projection]

    def setup(self):
        """Declare the projections."""
        c = self.config
        if c.fused:
            self.gate_up_proj = self.project(2 * c.intermediate_size, c.mlp_bias)
        else:
            self.gate_proj = self.project(c.intermediate_size, c.mlp_bias)
            self.up_proj = self.project(c.intermediate_size, c.mlp_bias)
        self.down_proj = self.project(c.hidden_size, c.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map states [P, S, D] to [P, S, D]."""
        gate, up = jnp.split(self.gate_up_proj(x), 2, -1) if self.config.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(layers.ACTIVATIONS[self.config.activation](gate) * up)


class LlamaBlock(nn.Module):
    """One layer: attention and MLP, each added to the states, with norms before, after, or on both sides of them."""

    config: DecoderConfig
    dtype: jax.typing.DTypeLike
    lora: LoraConfig | None = None
    spread: Callable[[jax.Array], jax.Array] | None = None
    attention: str = "rows"
    products: str = ""

    def setup(self):
        """Declare the layer's parts; their weights have the names of one flat layer."""
        c = self.config
        project = partial(Projection, dtype=self.dtype, lora=self.lora, products=self.products)
        self.self_attn = Attention(c, project, self.attention)
        self.mlp = GatedMLP(c, project)
        for part in (self.self_attn, self.mlp):
            nn.share_scope(self, part)
        if c.norms != "post":
            self.input_layernorm = _norm(c)
        self.post_attention_layernorm = _norm(c)
        if c.norms == "both":
            self.pre_feedforward_layernorm = _norm(c)
        if c.norms != "pre":
            self.post_feedforward_layernorm = _norm(c)

    def __call__(self, x: jax.Array, layer_input: LayerInput, context: Context) -> LayerOutput:
        """Run the layer on states [P, S, D] of the running tokens; returns new states, and keys and values to cache."""
        x = x if self.spread is None else self.spread(x)
        match self.config.norms:
            case "pre":
                mixed, new = self.self_attn(self.input_layernorm(x), layer_input, context)
                x = x + mixed
                x = x + self.mlp(self.post_attention_layernorm(x))
            case "both":
                mixed, new = self.self_attn(self.input_layernorm(x), layer_input, context)
                x = x + self.post_attention_layernorm(mixed)
                x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
            case "post":
                mixed, new = self.self_attn(x, layer_input, context)
                x = x + self.post_attention_layernorm(mixed)
                x = x + self.post_feedforward_layernorm(self.mlp(x))
        return add_deepstack(x, layer_input, context), new


def _norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.rms_norm_eps, config.unit_offset)


def _rotation(config: DecoderConfig, positions: jax.Array) -> Rotation:
    if positions.ndim == 3:
        return rotation(config.rope, config.head_dim, positions, pictures=True)
    if not config.layer_ropes:
        return rotation(config.rope, config.head_dim, positions)
    kinds = [rotation(rope or UNTURNED, config.head_dim, positions) for rope in dict.fromkeys(config.layer_ropes)]
    cos, sin = (jnp.stack(part) for part in zip(*kinds, strict=True))
    return cos, sin


def _layer_inputs(config: DecoderConfig) -> LayerInput:
    """Return the inputs of each layer, [layers] each; None if no layer differs from the default."""
    inputs = LayerInput()
    if config.attention_scale is not None:
        inputs = inputs._replace(scale=jnp.full((config.num_layers,), config.attention_scale, jnp.float32))
    if config.vision is not None and config.vision.deepstack_layers:
        inputs = inputs._replace(depth=jnp.arange(config.num_layers, dtype=jnp.int32))
    if config.layer_ropes:
        kinds = list(dict.fromkeys(config.layer_ropes))
        inputs = inputs._replace(rotation=jnp.array([kinds.index(rope) for rope in config.layer_ropes], jnp.int32))
    if any(window is not None for window in config.windows):
        windows = [jnp.iinfo(jnp.int32).max if window is None else window for window in config.windows]
        inputs = inputs._replace(window=jnp.array(windows, jnp.int32))
    return inputs


ATTENTION_PROJECTIONS = dict.fromkeys(("q_proj", "k_proj", "v_proj"), COLUMNS) | {"o_proj": ROWS}

NAMING = Naming(
    prefixes=("model.", "model.language_model.", "language_model.model.", "language_model.", ""),
    heads=("lm_head.weight", "language_model.lm_head.weight"),
    tensors={"embed_tokens": "embed_tokens", "norm": "norm"},
    layers="layers",
    modules={
        **{name: f"self_attn.{name}" for name in (*ATTENTION_PROJECTIONS, "qkv_proj", "q_norm", "k_norm")},
        **{name: f"mlp.{name}" for name in (*GATED_PROJECTIONS, "gate_up_proj")},
        **{name: name for name in ("input_layernorm", "post_attention_layernorm")},
        **{name: name for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")},
    },
    transposed=True,
    constants=r"(^|\.)rotary_emb\.inv_freq$",
)

LLAMA_ARCHITECTURE = Architecture(
    model_types=TEXT_TYPES,
    read=DecoderConfig.from_hf,
    block=LlamaBlock,
    final_norm=_norm,
    learned_positions=False,
    rotation=_rotation,
    layer_inputs=_layer_inputs,
    projections=ATTENTION_PROJECTIONS | GATED_PROJECTIONS,
    initial_stddev=lambda config, name: config.initializer_range,
    naming=NAMING,
)


# Hub folders use the tensor names of a text-only model; the other prefixes are those of newer folders.
_PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "")

QWEN_VL_ARCHITECTURE = LLAMA_ARCHITECTURE._replace(
    model_types=VISION_TYPES, naming=NAMING._replace(prefixes=_PREFIXES, beside=("visual.", "model.visual."))
)
