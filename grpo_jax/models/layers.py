"""Building blocks of architectures: their description, projections, norms, activations; and a small MLP."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.core.products import narrow_product
from grpo_jax.models.attention import LayerInput
from grpo_jax.models.hf_config import ConfigJson
from grpo_jax.models.lora import LoraConfig, as_array
from grpo_jax.models.variables import PyTree

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}

# Sharding of a projection along the tensor axis: each device computes some of its outputs, or reads some of its inputs.
# A fused projection is not sharded, since its outputs are several concatenated parts.
COLUMNS, ROWS, FUSED = "columns", "rows", "fused"
GATED_PROJECTIONS = {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS}  # of a gated MLP

_KEPT = "projected"  # checkpoint name of arrays that `remat: products` keeps


class Naming(NamedTuple):
    """Tensor names in the folders of an architecture."""

    # of the language model; the first with an embedding wins, and the first of all is that of transformers' model
    prefixes: tuple[str, ...]
    heads: tuple[str, ...]  # names of an untied head
    tensors: Mapping[str, str]  # tensors outside of layers: the decoder's name → Hugging Face's after the prefix
    layers: str  # name of the list of layers
    modules: Mapping[str, str]  # of a layer: the decoder's name → Hugging Face's
    transposed: bool  # kernels are stored [out, in] (Linear), not [in, out] (Conv1D)
    constants: str  # pattern of constant tensors that old folders store
    beside: tuple[str, ...] = ()  # prefixes of parts beside the language model (a vision tower)


class Architecture(NamedTuple):
    """One model architecture, a row of the table in `architectures`.

    Its configs are frozen dataclasses, hashable and hence static under jit, and members of the union `ModelConfig`.
    They have at least these fields: vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim,
    max_positions, tie_word_embeddings, initializer_range, model_type, vision (None: no pictures), logit_softcap (None:
    no cap), embedding_scale.
    """

    model_types: tuple[str, ...]  # Hugging Face's names of its architectures
    read: Callable[[ConfigJson], Any]  # (contents of config.json) -> a config
    # its layer, a module made as block(config, dtype, lora, spread, attention, products) and called as
    # block(states [P, S, D], LayerInput, Context) -> (states, new keys and values). It first calls `spread` on the
    # states, unless that is None, and passes lora and products to its `Projection`s. It passes queries
    # [P, S, K, H/K, E], keys and values [P, S, K, E] to `attend_streams` with LayerInput, Context and `attention`. That
    # returns the heads' outputs [P, S, H·E], and the layer's new keys and values
    block: type[nn.Module]
    final_norm: Callable[[Any], nn.Module]  # (config) -> the norm after the last layer
    learned_positions: bool  # whether learned position embeddings are added to the embedded tokens
    # (config, positions i32 [S] or [P, S], or [P, S, 3] with pictures) -> cosine and sine of the rotary embedding, each
    # float32 [.., E/2], with a leading axis of kinds if layers differ; None without rotary embeddings
    rotation: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array] | None]
    layer_inputs: Callable[[Any], LayerInput]  # (config) -> the other inputs of each layer, along a leading axis
    projections: Mapping[str, str]  # layers' kernels, which can have adapters → `COLUMNS`, `ROWS` or `FUSED`
    initial_stddev: Callable[[Any, str], float]  # (config, projection or embedding) -> that of its initial weights
    naming: Naming  # of the tensors in its folders
    longest: Callable[[Any], int | None] = lambda config: None  # (config) -> limit of prompt plus completion tokens


def remat_block(block: type[nn.Module], remat: str, *, scanned: bool = True) -> type[nn.Module]:
    """Rematerialise a layer as ``policy.Policy`` defines; outside a scan `traced_once` does that."""
    if remat == "none" or (remat == "layer" and not scanned):
        return block
    keep = jax.checkpoint_policies.save_only_these_names(_KEPT) if remat == "products" else None
    return nn.remat(block, prevent_cse=not scanned, policy=keep)


def traced_once(layer: nn.Module, *, recompute: bool) -> Callable[..., PyTree]:
    """Make a layer of unstacked weights (params, adapters, x, ...) → result, for all layers of an unrolled stack.

    With `recompute`, its base is frozen, and the backward pass computes the result again. In an unrolled stack, XLA
    would postpone the adapters' gradients and keep every layer's inputs for them. Barriers therefore order a layer's
    backward pass: it starts after the gradient of the result, and passes on that of x after the adapters' gradients.
    Parameters have no gradient.
    """

    @partial(jax.jit, inline=True)
    def apply(params: PyTree, adapters: PyTree, *inputs: PyTree) -> PyTree:
        return layer.apply({"params": params, "lora": adapters}, *inputs)

    if not recompute:
        return apply
    call = jax.custom_vjp(apply)

    def forward(*arguments: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
        return apply(*arguments), arguments

    @partial(jax.jit, inline=True)
    def backward(arguments: tuple[PyTree, ...], gradient: PyTree) -> tuple[PyTree, ...]:
        (params, *others), gradient = jax.lax.optimization_barrier((arguments, gradient))
        adapters, x, *rest = jax.vjp(partial(apply, params), *others)[1](gradient)
        return None, *jax.lax.optimization_barrier((adapters, x)), *rest

    call.defvjp(forward, backward)
    return call


def draw_params(
    shapes: PyTree, key: jax.Array, stddev_of: Callable[[tuple[str, ...]], float], dtype: jax.typing.DTypeLike
) -> PyTree:
    """Initialise parameters: normal weights with the standard deviation of their path, unit norms, zero biases."""

    def draw(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        names = tuple(entry.key for entry in path)
        if names[-1] == "scale":
            return jnp.ones(leaf.shape, dtype)
        if names[-1] in ("bias", "excess"):
            return jnp.zeros(leaf.shape, dtype)
        return (jax.random.normal(key, leaf.shape, jnp.float32) * stddev_of(names)).astype(dtype)

    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.tree.unflatten(structure, list(jax.random.split(key, len(leaves))))
    return jax.tree_util.tree_map_with_path(draw, shapes, keys)


class Projection(nn.Module):
    """Linear map with an optional bias, and an adapter if the ``lora`` collection has one."""

    features: int
    use_bias: bool
    dtype: jax.typing.DTypeLike
    lora: LoraConfig | None = None
    products: str = ""  # see `Policy.products`

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., in] to [..., features]."""
        # decoder.init_variables draws the values; it takes only names and shapes from here.
        kernel = self.param("kernel", nn.initializers.zeros, (x.shape[-1], self.features))
        # Flatten to one matrix: contracting two axes would transpose and copy both factors of the kernel's gradient.
        rows = x.reshape(-1, x.shape[-1])
        y = self._product(self._alone(rows, ""), kernel)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = y + bias.astype(self.dtype)[None]
        if self.lora is not None and self.has_variable("lora", "a"):
            a, b = self.get_variable("lora", "a"), self.get_variable("lora", "b")
            low = checkpoint_name(self._product(self._alone(rows, "a"), a), _KEPT)
            y = y + self._product(low, b) * self.lora.scale
        return checkpoint_name(y, _KEPT).reshape(*x.shape[:-1], -1)

    def _product(self, rows: jax.Array, kernel: PyTree) -> jax.Array:
        if self.products == "bfloat16":
            return narrow_product(rows, as_array(kernel, jnp.float32))
        return rows @ as_array(kernel, self.dtype)

    def _alone(self, rows: jax.Array, factor: str) -> jax.Array:
        """Hide from XLA that products share these rows: for CUDA it would join them, and copy their weights out of the
        stack for every token."""
        if self.products != "apart":
            return rows
        mark = jnp.int32(zlib.crc32(f"{self.name}/{factor}".encode()) >> 1)  # XLA would merge two equal barriers
        return jax.lax.optimization_barrier((rows, mark))[0]


class RMSNorm(nn.Module):
    """RMS norm, in float32 (Zhang and Sennrich 2019, arXiv:1910.07467).

    With `unit_offset` it multiplies by 1 + weight before rounding to x's dtype, else by the weight afterwards.
    """

    epsilon: float
    unit_offset: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to the same shape and dtype."""
        along = (1,) * (x.ndim - 1) + (-1,)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        if self.unit_offset:
            excess = self.param("excess", nn.initializers.zeros, (x.shape[-1],))
            return (wide * (1 + excess.astype(jnp.float32).reshape(along))).astype(x.dtype)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return wide.astype(x.dtype) * scale.astype(x.dtype).reshape(along)


class LayerNorm(nn.Module):
    """Layer norm over the last axis, in float32 (Ba et al. 2016, arXiv:1607.06450)."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to the same shape and dtype."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        scale, bias = (part.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,)) for part in (scale, bias))
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale + bias).astype(x.dtype)


class Network(NamedTuple):
    """A network as pure functions: init(key) → parameters, apply(parameters, observations `[.., F]`) → `[..]`."""

    init: Callable[[jax.Array], PyTree]
    apply: Callable[[PyTree, jax.Array], jax.Array]


class MLP(nn.Module):
    """MLP with one linear output, which is squeezed: `[.., F]` → `[..]`."""

    hidden: Sequence[int]
    output_scale: float

    @nn.compact
    def __call__(self, observations: jax.Array) -> jax.Array:
        """Map observations `[.., F]` to one number each, `[..]`."""
        # Flatten to one matrix: on CPU a product with several leading axes, vmapped over seeds, takes 4 × as long.
        x = observations.reshape(-1, observations.shape[-1])
        for width in self.hidden:
            x = jnp.tanh(nn.Dense(width, kernel_init=nn.initializers.orthogonal(math.sqrt(2)))(x))
        x = nn.Dense(1, kernel_init=nn.initializers.orthogonal(self.output_scale))(x)
        return x.reshape(observations.shape[:-1])


def make_mlp(features: int, *, hidden: Sequence[int] = (64,), output_scale: float = 0.01) -> Network:
    """Make a tanh MLP of F inputs with one output: the log-odds of one of two actions, or a value.

    Initialisation is orthogonal with gain √2 in the hidden layers, and biases are zero, as in PPO's reference code
    (https://arxiv.org/abs/2005.12729, table 1). `output_scale` is the last layer's gain; if small, a policy starts
    near uniform. Without hidden layers the network is linear.
    """
    module = MLP(tuple(hidden), output_scale)
    return Network(
        init=lambda key: module.init(key, jnp.zeros((1, features)))["params"],
        apply=lambda params, observations: module.apply({"params": params}, observations),
    )
