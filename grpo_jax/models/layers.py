"""The parts of a decoder layer, and the layer itself, which carries prompts and completions at once."""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.rope import rotate

_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)  # a masked score; finite, so that no row becomes NaN

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
}


class Tokens(NamedTuple):
    """Where the tokens of one stream are.

    Attributes:
        positions: i32 [P, S].
        mask: bool [P, S], False on padding.
        cos: float32 [P, S, E/2], rotation of each position.
        sin: float32 [P, S, E/2].
    """

    positions: jax.Array
    mask: jax.Array
    cos: jax.Array
    sin: jax.Array


class Memory(NamedTuple):
    """Keys and values that a query may read.

    Attributes:
        keys: [P, K, S, E] read by the whole group, or [P, K, G, S, E] one per completion.
        values: as ``keys``.
        mask: bool [P or 1, S of the queries, S], True where a query may read a key.
    """

    keys: jax.Array
    values: jax.Array
    mask: jax.Array


class Context(NamedTuple):
    """What every layer is told about the tokens; a stream that does not run is None.

    Attributes:
        prompt: the prompts' tokens [P, L], running or remembered.
        completion: the completions' tokens [P, T], alike for the group.
        cached: decoding only: positions and validity of the cache's slots.
    """

    prompt: Tokens | None
    completion: Tokens | None
    cached: Tokens | None = None


class LayerInput(NamedTuple):
    """What one layer is given apart from the streams.

    Attributes:
        window: i32 scalar, or None if no layer has a window.
        prefix: the prompts' keys and values, each [P, K, L, E], when the prompts do not run.
        cache: the completions' keys and values so far, each [P, K, G, T, E].
    """

    window: jax.Array | None = None
    prefix: tuple[jax.Array, jax.Array] | None = None
    cache: tuple[jax.Array, jax.Array] | None = None


def attend(query: jax.Array, memories: Sequence[Memory]) -> jax.Array:
    """Softmax attention over several memories as if they were one.

    The memories' softmaxes are merged by a common maximum and a common sum (what merging by
    log-sum-exp computes), so keys shared by a group are read where they are and never copied.

    Args:
        query: [P, K, G, R, S, E]; R query heads share a key head.
        memories: keys, values and masks.

    Returns:
        [P, K, G, R, S, E] in the query's dtype; scores and softmax are float32.
    """
    scale = query.shape[-1] ** -0.5
    scores, mixes = [], []
    for memory in memories:
        group = "" if memory.keys.ndim == 4 else "g"
        score = jnp.einsum(
            f"pkgrse,pk{group}te->pkgrst", query, memory.keys, preferred_element_type=jnp.float32
        )
        scores.append(jnp.where(memory.mask[:, None, None, None], score * scale, _HIDDEN))
        mixes.append(f"pkgrst,pk{group}te->pkgrse")
    top = reduce(jnp.maximum, [score.max(axis=-1, keepdims=True) for score in scores])
    top = jax.lax.stop_gradient(top)  # it cancels, so its gradient is zero
    weights = [jnp.exp(score - top) for score in scores]
    total = sum(weight.sum(axis=-1, keepdims=True) for weight in weights)
    mixed = sum(
        jnp.einsum(mix, weight.astype(query.dtype), memory.values, preferred_element_type=jnp.float32)
        for mix, weight, memory in zip(mixes, weights, memories, strict=True)
    )
    return (mixed / total).astype(query.dtype)


def visible(queries: Tokens, keys: Tokens, window: jax.Array | None) -> jax.Array:
    """Which key each query may read: bool [P, S of queries, S of keys]; causal, windowed, not padding."""
    distance = queries.positions[:, :, None] - keys.positions[:, None, :]
    allowed = keys.mask[:, None, :] & (distance >= 0)
    return allowed if window is None else allowed & (distance < window)


class Projection(nn.Module):
    """Linear map with an optional bias and, where the ``lora`` collection has one, an adapter."""

    features: int
    use_bias: bool
    dtype: jax.typing.DTypeLike
    param_dtype: jax.typing.DTypeLike
    stddev: float
    adapter_scale: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] to [..., features]."""
        init = nn.initializers.normal(self.stddev)
        kernel = self.param("kernel", init, (x.shape[-1], self.features), self.param_dtype)
        y = x @ kernel.astype(self.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype)
            y = y + bias.astype(self.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
        if self.adapter_scale is not None and self.has_variable("lora", "a"):
            a = self.get_variable("lora", "a").astype(self.dtype)
            b = self.get_variable("lora", "b").astype(self.dtype)
            y = y + (x @ a) @ b * self.adapter_scale
        return y


class RMSNorm(nn.Module):
    """Division by the root mean square, in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    epsilon: float
    param_dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to the same shape and dtype."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Block(nn.Module):
    """One layer. Prompts [P, L, D] and completions [P, G, T, D] pass through the same weights;
    completions read the prompts' keys and values and their own.
    """

    config: DecoderConfig
    dtype: jax.typing.DTypeLike
    param_dtype: jax.typing.DTypeLike
    lora: LoraConfig | None = None

    def setup(self):
        """Declare the layer's weights."""
        c = self.config
        self.q_proj = self._projection("q_proj", c.num_heads * c.head_dim, c.qkv_bias)
        self.k_proj = self._projection("k_proj", c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.v_proj = self._projection("v_proj", c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.o_proj = self._projection("o_proj", c.hidden_size, c.output_bias)
        self.gate_proj = self._projection("gate_proj", c.intermediate_size, c.mlp_bias)
        self.up_proj = self._projection("up_proj", c.intermediate_size, c.mlp_bias)
        self.down_proj = self._projection("down_proj", c.hidden_size, c.mlp_bias)
        self.input_layernorm = RMSNorm(c.rms_norm_eps, self.param_dtype)
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps, self.param_dtype)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_norm_eps, self.param_dtype)
            self.k_norm = RMSNorm(c.rms_norm_eps, self.param_dtype)

    def _projection(self, name: str, features: int, use_bias: bool) -> Projection:
        scale = self.lora.scale if self.lora is not None and name in self.lora.targets else None
        stddev = self.config.initializer_range
        return Projection(features, use_bias, self.dtype, self.param_dtype, stddev, scale)

    def __call__(
        self,
        streams: tuple[jax.Array | None, jax.Array | None],
        given: LayerInput,
        context: Context,
    ) -> tuple[tuple[jax.Array | None, jax.Array | None], tuple[jax.Array, jax.Array] | None]:
        """Pass the streams that run through the layer.

        Args:
            streams: prompts [P, L, D] and completions [P, G, T, D]; None for one that does not run.
            given: this layer's window and remembered keys and values.
            context: positions and masks.

        Returns:
            The streams, and new keys and values to remember: the prompts' [P, K, L, E] when they run
            alone, the completions' [P, K, G, T, E] when they do, None when both run.
        """
        prompt, completion = streams
        fresh, prefix = None, given.prefix
        if prompt is not None:
            query, key, value = self._heads(prompt[:, None], context.prompt)
            prefix = fresh = (key[:, :, 0], value[:, :, 0])
            mask = visible(context.prompt, context.prompt, given.window)
            prompt = self._finish(prompt[:, None], attend(query, [Memory(*prefix, mask)]))[:, 0]
        if completion is not None:
            query, key, value = self._heads(completion, context.completion)
            fresh = (key, value) if prompt is None else None
            memories = [Memory(*prefix, visible(context.completion, context.prompt, given.window))]
            if given.cache is not None:
                mask = visible(context.completion, context.cached, given.window)
                memories.append(Memory(*given.cache, mask))
            own = visible(context.completion, context.completion, given.window)
            memories.append(Memory(key, value, own))
            completion = self._finish(completion, attend(query, memories))
        return (prompt, completion), fresh

    def _heads(self, x: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [P, K, G, R, S, E], keys and values [P, K, G, S, E] of states [P, G, S, D]."""
        c = self.config
        x = self.input_layernorm(x)
        heads = (c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
        query = self.q_proj(x).reshape(*x.shape[:-1], *heads)
        key = self.k_proj(x).reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim)
        value = self.v_proj(x).reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = tokens.cos[:, None, :, None], tokens.sin[:, None, :, None]
        query = rotate(query, cos[..., None, :], sin[..., None, :])
        key = rotate(key, cos, sin)
        return (
            query.transpose(0, 3, 1, 4, 2, 5),
            key.transpose(0, 3, 1, 2, 4),
            value.transpose(0, 3, 1, 2, 4),
        )

    def _finish(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """Output projection, residual, MLP: states [P, G, S, D], attention [P, K, G, R, S, E]."""
        mixed = mixed.transpose(0, 2, 4, 1, 3, 5).reshape(*x.shape[:-1], -1)
        x = x + self.o_proj(mixed)
        y = self.post_attention_layernorm(x)
        gate = _ACTIVATIONS[self.config.activation](self.gate_proj(y))
        return x + self.down_proj(gate * self.up_proj(y))
