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
    """

    positions: jax.Array
    mask: jax.Array


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
    """What every layer is told about the tokens.

    Attributes:
        cos: float32 [P, S, E/2], rotations of the S tokens that run (see ``Block``).
        sin: float32 [P, S, E/2].
        prompt: the prompts' tokens [P, L], running or remembered.
        completion: the completions' tokens [P, T], alike for the group; None if there are none.
        cached: decoding only: positions and validity of the cache's slots.
    """

    cos: jax.Array
    sin: jax.Array
    prompt: Tokens
    completion: Tokens | None = None
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
        score = jnp.einsum(f"pkgrse,pk{group}te->pkgrst", query, memory.keys, preferred_element_type=jnp.float32)
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
    """One layer over prompts and completions at once.

    The S tokens of a prompt's row are its L prompt tokens followed by the G·T of its completions, so
    every weight is applied in one product; only attention knows them apart. The prompts are absent
    (L = 0) when their keys and values are remembered, the completions when there are none.
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
        self, x: jax.Array, given: LayerInput, context: Context
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Pass the tokens that run through the layer.

        Args:
            x: states [P, S, D].
            given: this layer's window and remembered keys and values.
            context: rotations, positions and masks.

        Returns:
            The states, and new keys and values to remember: the prompts' [P, K, L, E] when they run
            alone, the completions' [P, K, G, T, E] when those do, None when both run.
        """
        query, key, value = self._heads(self.input_layernorm(x), context)
        mixed, fresh, prefix, length = [], None, given.prefix, 0
        if prefix is None:
            length = context.prompt.positions.shape[1]
            prefix = fresh = tuple(part[:, :length].transpose(0, 2, 1, 3) for part in (key, value))
            memory = Memory(*prefix, visible(context.prompt, context.prompt, given.window))
            mixed.append(self._attend(query[:, :length], length, [memory]))
        if context.completion is not None:
            steps = context.completion.positions.shape[1]
            own = tuple(_split_group(part[:, length:], steps).transpose(0, 3, 1, 2, 4) for part in (key, value))
            fresh = own if fresh is None else None
            memories = [Memory(*prefix, visible(context.completion, context.prompt, given.window))]
            if given.cache is not None:
                mask = visible(context.completion, context.cached, given.window)
                memories.append(Memory(*given.cache, mask))
            memories.append(Memory(*own, visible(context.completion, context.completion, given.window)))
            mixed.append(self._attend(query[:, length:], steps, memories))
        x = x + self.o_proj(mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed, axis=1))
        y = self.post_attention_layernorm(x)
        gate = _ACTIVATIONS[self.config.activation](self.gate_proj(y))
        return x + self.down_proj(gate * self.up_proj(y)), fresh

    def _heads(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [P, S, K, R, E], keys and values [P, S, K, E] of normed states [P, S, D]."""
        c = self.config
        query = self.q_proj(x).reshape(*x.shape[:-1], c.num_kv_heads, -1, c.head_dim)
        key = self.k_proj(x).reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim)
        value = self.v_proj(x).reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = context.cos[:, :, None], context.sin[:, :, None]
        return rotate(query, cos[..., None, :], sin[..., None, :]), rotate(key, cos, sin), value

    @staticmethod
    def _attend(query: jax.Array, steps: int, memories: Sequence[Memory]) -> jax.Array:
        """Queries [P, G·steps, K, R, E] to what they read, [P, G·steps, H·E]."""
        mixed = attend(_split_group(query, steps).transpose(0, 3, 1, 4, 2, 5), memories)
        return mixed.transpose(0, 2, 4, 1, 3, 5).reshape(*query.shape[:2], -1)


def _split_group(x: jax.Array, steps: int) -> jax.Array:
    """[P, G·T, ...] to [P, G, T, ...]."""
    return x.reshape(x.shape[0], -1, steps, *x.shape[2:])
