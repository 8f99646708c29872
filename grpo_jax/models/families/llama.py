"""Llama, Mistral, Qwen2, Qwen3 and the language models of Qwen-VL: RMS norms, rotations, a gated MLP."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.models.attention import Context, LayerInput, add_deepstack, attend_streams
from grpo_jax.models.families.family import COLUMNS, ROWS, Family, Naming
from grpo_jax.models.families.llama_config import TEXT_TYPES, VISION_TYPES, DecoderConfig, Mixture
from grpo_jax.models.layers import ACTIVATIONS, Experts, Projection, RMSNorm, Router, mixed, sorted_by_expert
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.rope import UNTURNED, rotate, rotation, rotation_of_pictures

Rotation = tuple[jax.Array, jax.Array]


class Block(nn.Module):
    """One layer over prompts and completions at once (see ``attend_streams``)."""

    config: DecoderConfig
    dtype: jax.typing.DTypeLike
    param_dtype: jax.typing.DTypeLike
    lora: LoraConfig | None = None
    spread: Callable[[jax.Array], jax.Array] | None = None

    def setup(self):
        """Declare the layer's weights."""
        c = self.config

        def projection(features: int, use_bias: bool) -> Projection:
            return Projection(features, use_bias, self.dtype, self.param_dtype, self.lora)

        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        if c.fused:
            self.qkv_proj = projection(queries + 2 * keys, c.qkv_bias)
        else:
            self.q_proj = projection(queries, c.qkv_bias)
            self.k_proj = projection(keys, c.qkv_bias)
            self.v_proj = projection(keys, c.qkv_bias)
        self.o_proj = projection(c.hidden_size, c.output_bias)
        if c.mixture is not None:
            self._setup_experts(c.mixture)
        else:
            if c.fused:
                self.gate_up_proj = projection(2 * c.intermediate_size, c.mlp_bias)
            else:
                self.gate_proj = projection(c.intermediate_size, c.mlp_bias)
                self.up_proj = projection(c.intermediate_size, c.mlp_bias)
            self.down_proj = projection(c.hidden_size, c.mlp_bias)
        self.input_layernorm = _norm(c, self.param_dtype)
        self.post_attention_layernorm = _norm(c, self.param_dtype)
        if c.post_norms:
            self.pre_feedforward_layernorm = _norm(c, self.param_dtype)
            self.post_feedforward_layernorm = _norm(c, self.param_dtype)
        if c.qk_norm:
            self.q_norm = _norm(c, self.param_dtype)
            self.k_norm = _norm(c, self.param_dtype)

    def _setup_experts(self, m: Mixture) -> None:
        def experts(features: int) -> Experts:
            return Experts(m.experts, features, self.dtype, self.param_dtype)

        self.router = Router(m.experts, m.chosen, m.normalised, self.dtype, self.param_dtype)
        self.gate_experts, self.up_experts = experts(m.width), experts(m.width)
        self.down_experts = experts(self.config.hidden_size)

    def __call__(
        self, x: jax.Array, layer_input: LayerInput, context: Context
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """States [P, S, D] of the tokens that run to the next layer's, and keys and values to remember."""
        x = x if self.spread is None else self.spread(x)
        heads = self._heads(self.input_layernorm(x), _rotation_of(layer_input, context))
        mixed, new_keys_values = attend_streams(
            *heads, layer_input, context, self.config.attention_softcap, by_row=self.spread is None
        )
        if self.config.post_norms:
            x = x + self.post_attention_layernorm(self.o_proj(mixed))
            x = x + self.post_feedforward_layernorm(self._mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + self.o_proj(mixed)
            x = x + self._mlp(self.post_attention_layernorm(x))
        return add_deepstack(x, layer_input, context), new_keys_values

    def _heads(self, x: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [P, S, K, R, E], keys and values [P, S, K, E] of normed states [P, S, D]."""
        c = self.config
        if c.fused:
            queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
            query, key, value = jnp.split(self.qkv_proj(x), (queries, queries + keys), axis=-1)
        else:
            query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query = query.reshape(*x.shape[:-1], c.num_kv_heads, -1, c.head_dim)
        key, value = (part.reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim) for part in (key, value))
        if c.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = (part[:, :, None] for part in rotation)
        return rotate(query, cos[..., None, :], sin[..., None, :]), rotate(key, cos, sin), value

    def _mlp(self, x: jax.Array) -> jax.Array:
        """The gated MLP, or those of each token's experts, of normed states [P, S, D]."""
        activation = ACTIVATIONS[self.config.activation]
        if self.config.mixture is not None:
            states = x.reshape(-1, x.shape[-1])
            weights, experts = self.router(states)
            rows, order, sizes = sorted_by_expert(states, experts, self.config.mixture.experts)
            inner = activation(self.gate_experts(rows, sizes)) * self.up_experts(rows, sizes)
            return mixed(self.down_experts(inner, sizes), order, weights).reshape(x.shape)
        gate, up = jnp.split(self.gate_up_proj(x), 2, -1) if self.config.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(activation(gate) * up)


def _rotation_of(layer_input: LayerInput, context: Context) -> Rotation:
    """The layer's own, [P, S, E/2], of the kinds that there are."""
    assert context.rotation is not None  # the decoder gives it
    if layer_input.rotation is None:
        return context.rotation
    cos, sin = (jnp.take(part, layer_input.rotation, axis=0) for part in context.rotation)
    return cos, sin


def _norm(config: DecoderConfig, param_dtype: jax.typing.DTypeLike) -> RMSNorm:
    return RMSNorm(config.rms_norm_eps, param_dtype, config.unit_offset)


def _rotation(config: DecoderConfig, positions: jax.Array) -> Rotation:
    if positions.ndim == 3:
        return rotation_of_pictures(config.rope, config.head_dim, positions)
    if not config.layer_ropes:
        return rotation(config.rope, config.head_dim, positions)
    kinds = [rotation(rope or UNTURNED, config.head_dim, positions) for rope in dict.fromkeys(config.layer_ropes)]
    cos, sin = (jnp.stack(part) for part in zip(*kinds, strict=True))
    return cos, sin


def _layer_inputs(config: DecoderConfig) -> LayerInput:
    """What each layer is told, [layers] each or None.

    The windows; the layers' numbers where pictures are added to some; the kinds of rotation where they differ; what
    multiplies attention's scores where that is not E^-0.5.
    """
    found = LayerInput()
    if config.attention_scale is not None:
        found = found._replace(scale=jnp.full((config.num_layers,), config.attention_scale, jnp.float32))
    if config.vision is not None and config.vision.deepstack_layers:
        found = found._replace(depth=jnp.arange(config.num_layers, dtype=jnp.int32))
    if config.layer_ropes:
        kinds = list(dict.fromkeys(config.layer_ropes))
        found = found._replace(rotation=jnp.array([kinds.index(rope) for rope in config.layer_ropes], jnp.int32))
    if any(window is not None for window in config.windows):
        everything = jnp.iinfo(jnp.int32).max
        windows = [everything if w is None else w for w in config.windows]
        found = found._replace(window=jnp.array(windows, jnp.int32))
    return found


PROJECTIONS = {
    "q_proj": COLUMNS,
    "k_proj": COLUMNS,
    "v_proj": COLUMNS,
    "o_proj": ROWS,
    "gate_proj": COLUMNS,
    "up_proj": COLUMNS,
    "down_proj": ROWS,
}

NAMING = Naming(
    prefixes=("model.", "model.language_model.", "language_model.model.", "language_model.", ""),
    heads=("lm_head.weight", "language_model.lm_head.weight"),
    tensors={"embed_tokens": "embed_tokens", "norm": "norm"},
    layers="layers",
    modules={
        **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
        **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
        **{name: name for name in ("input_layernorm", "post_attention_layernorm")},
        **{name: name for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")},
    },
    transposed=True,
    constants=r"(^|\.)rotary_emb\.inv_freq$",
)

FAMILY = Family(
    model_types=TEXT_TYPES,
    config=DecoderConfig,
    read=DecoderConfig.from_hf,
    block=Block,
    final_norm=_norm,
    learned_positions=False,
    rotation=_rotation,
    layer_inputs=_layer_inputs,
    projections=PROJECTIONS,
    initial_stddev=lambda config, name: config.initializer_range,
    naming=NAMING,
)


# Hub folders name the language model's tensors as a model of text would; the rest is what newer ones use.
_PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "")

QWEN_VL_FAMILY = FAMILY._replace(
    model_types=VISION_TYPES,
    naming=NAMING._replace(prefixes=_PREFIXES, beside=("visual.", "model.visual.")),
)
