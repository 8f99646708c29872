"""The scanned decoder of every architecture, its initialisation, and its unstacked layers.

One CUDA device decodes from unstacked layers with fused projections of the same states; so does a frozen base.
"""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from grpo_jax.models.architectures import ModelConfig, architecture_of
from grpo_jax.models.architectures.llama import DecoderConfig
from grpo_jax.models.attention import Context, LayerInput, embed_pictures
from grpo_jax.models.layers import draw_params, remat_block, traced_once
from grpo_jax.models.lora import ListedLayers, LoraConfig, init_adapters
from grpo_jax.models.positions import prompt_context
from grpo_jax.models.sharding import OverPrompts
from grpo_jax.models.variables import PyTree, Variables, split_layers

_Columns = dict[str, slice]  # the outputs of each part of a fused projection


class Decoder(nn.Module):
    """Embedding, scanned layers, final norm."""

    config: ModelConfig  # shape and choices
    dtype: jax.typing.DTypeLike = jnp.float32  # of the computation
    remat: str = "products"  # see `Policy`
    lora: LoraConfig | None = None  # configuration of the adapters in the `lora` collection, if any
    stacked: bool = True  # one scanned layer with stacked weights, or separate layers in a loop
    spread: OverPrompts | None = None  # shards a layer's input states [P, S, D] over the mesh; None for one device
    attention: str = "rows"  # see `attend_streams`
    products: str = ""  # see `Policy.products`

    def setup(self):
        """Declare the weights."""
        c, architecture = self.config, architecture_of(self.config)
        zeros = nn.initializers.zeros
        self.embed_tokens = self.param("embed_tokens", zeros, (c.vocab_size, c.hidden_size))
        if architecture.learned_positions:
            self.embed_positions = self.param("embed_positions", zeros, (c.max_positions, c.hidden_size))
        if not c.tie_word_embeddings:
            self.lm_head = self.param("lm_head", zeros, (c.vocab_size, c.hidden_size))
        block = remat_block(architecture.block, self.remat, scanned=self.stacked)
        settings = c, self.dtype, self.lora, self.spread, self.attention, self.products
        if self.stacked:
            stack = nn.scan(
                block,
                variable_axes={"params": 0, "lora": 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast),
                length=c.num_layers,
            )
            self.layers = stack(*settings)
        else:
            self.layers = [block(*settings) for _ in range(c.num_layers)]
        self.norm = architecture.final_norm(c)

    def __call__(
        self, tokens: jax.Array, context: Context, cached_inputs: Sequence[LayerInput] = ()
    ) -> tuple[jax.Array, PyTree]:
        """Run tokens i32 [P, S]: the prompts' unless their keys are cached, then the completions'.

        Returns the final states [P, S, D], and the layers' new keys and values (see ``attend_streams``). These are
        stacked along a leading axis, or a list. Unstacked layers read cached keys and values from `cached_inputs`.
        """
        architecture = architecture_of(self.config)
        x = self._embed(tokens, context)  # [P, S, D]
        if context.rotation is None:
            context = context._replace(rotation=architecture.rotation(self.config, context.positions))
        inputs = architecture.layer_inputs(self.config)
        if self.stacked:
            x, new_keys_values = self.layers(x, inputs, context)
        else:
            x, new_keys_values = self._one_by_one(x, inputs, context, cached_inputs)
        return self.norm(x), new_keys_values

    def _embed(self, tokens: jax.Array, context: Context) -> jax.Array:
        """Embed tokens to [P, S, D], insert picture states and add learned positions."""
        x = jnp.take(self.embed_tokens, tokens, axis=0, mode="clip").astype(self.dtype)
        x = x if self.spread is None else self.spread.embedded(x)
        if self.config.embedding_scale != 1:
            x = x * jnp.asarray(self.config.embedding_scale, self.dtype)
        x = embed_pictures(x, context.vision)
        if not architecture_of(self.config).learned_positions:
            return x
        # Beyond the table's end the result is NaN, never another token's position.
        places = jnp.take(self.embed_positions, context.positions, axis=0, mode="fill", fill_value=jnp.nan)
        return x + places.astype(self.dtype)

    def _one_by_one(
        self, x: jax.Array, inputs: LayerInput, context: Context, cached_inputs: Sequence[LayerInput]
    ) -> tuple[jax.Array, list[PyTree]]:
        """Run unstacked layers on states [P, S, D], which are traced once."""
        run = traced_once(self.layers[0].clone(parent=None, name=None), recompute=self.remat == "layer")
        cached_inputs = cached_inputs or [LayerInput()] * len(self.layers)
        new_keys_values = []
        for i, (layer, cached) in enumerate(zip(self.layers, cached_inputs, strict=True)):
            layer_input = jax.tree.map(lambda x, i=i: x[i], inputs)
            layer_input = layer_input._replace(prefix=cached.prefix, cache=cached.cache)
            with jax.named_scope(layer.name):  # for the kernels' names in profiles
                x, written = run(layer.variables["params"], layer.variables.get("lora", {}), x, layer_input, context)
            new_keys_values.append(written)
        return x, new_keys_values


def init_variables(
    config: ModelConfig, key: jax.Array, *, param_dtype: str = "float32", lora: LoraConfig | None = None
) -> dict[str, PyTree]:
    """Initialise variables: normal weights (``Architecture.initial_stddev``), unit norms, zero biases, f32 adapters."""
    decoder = Decoder(config, remat="none")
    context = prompt_context(config, jnp.ones((1, 1), bool)).context
    shapes = jax.eval_shape(decoder.init, key, context.positions, context)["params"]
    weights_key, adapters_key = jax.random.split(key)
    stddev_of = architecture_of(config).initial_stddev
    params = draw_params(shapes, weights_key, lambda names: stddev_of(config, names[-2:][0]), param_dtype)
    return {"params": params} | ({} if lora is None else {"lora": init_adapters(params, adapters_key, lora)})


def fused_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the decoder for the result of `fuse_projections`."""
    return dataclasses.replace(config, fused=True) if isinstance(config, DecoderConfig) else config


def fuse_projections(variables: Variables, config: ModelConfig) -> Variables:
    """Fuse query, key and value projections, and gate and up, in unstacked variables: kernels, biases and adapters.

    Outputs are concatenated as in Phi-3; so are quantised ones and their scales. Adapters become one pair of factors,
    and each part of the outputs reads its own columns. Fused projections stay unchanged.
    """
    projections = _fused_columns(config).items()
    fused = {"params": dict(variables["params"]), "lora": dict(variables.get("lora", {}))}
    for collection, with_fused in (("params", _with_fused_kernels), ("lora", _with_fused_adapters)):
        for layer in [name for name in fused[collection] if name.startswith("layers_")]:
            for name, columns in projections:
                if any(part in fused[collection][layer] for part in columns):
                    fused[collection][layer] = with_fused(fused[collection][layer], name, columns)
    return {**variables, "params": fused["params"]} | ({"lora": fused["lora"]} if "lora" in variables else {})


def unstack_and_fuse(params: Variables, config: ModelConfig) -> Variables:
    """Unstack parameters and fuse their projections (`fuse_projections`); host arrays stay on the host."""
    return fuse_projections({"params": split_layers(params)}, config)["params"]


def separate(params: Variables, config: ModelConfig) -> dict[str, PyTree]:
    """Undo `unstack_and_fuse`, with `ListedLayers` in place of stacks; stacked layers stay unchanged."""
    apart = [params[name] for name in (f"layers_{i}" for i in range(config.num_layers)) if name in params]
    if not apart:
        return dict(params)
    layers: dict[str, PyTree] = {}
    projections = _fused_columns(config)
    for module, leaves in apart[0].items():
        for name, columns in projections.get(module, {module: slice(None)}).items():
            layers[name] = {leaf: ListedLayers(tuple(x[module][leaf] for x in apart), columns) for leaf in leaves}
    return {name: part for name, part in params.items() if not name.startswith("layers_")} | {"layers": layers}


def _fused_columns(config: ModelConfig) -> dict[str, _Columns]:
    if not isinstance(config, DecoderConfig) or config.fused:
        return {}
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv_proj": _side_by_side({"q_proj": queries, "k_proj": keys, "v_proj": keys}),
        "gate_up_proj": _side_by_side(dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)),
    }


def _side_by_side(widths: dict[str, int]) -> _Columns:
    ends = accumulate(widths.values())
    return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True)}


def _with_fused_kernels(layer: Variables, name: str, columns: _Columns) -> dict[str, PyTree]:
    def beside(*parts: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        numpy = np if isinstance(parts[0], np.ndarray) else jnp
        return numpy.concatenate(parts, axis=-1)

    rest = {other: tree for other, tree in layer.items() if other not in columns}
    return rest | {name: jax.tree.map(beside, *(layer[part] for part in columns))}


def _with_fused_adapters(layer: Variables, name: str, columns: _Columns) -> dict[str, PyTree]:
    rest = {other: tree for other, tree in layer.items() if other not in columns}
    present = {part: outputs for part, outputs in columns.items() if part in layer}
    width = max(outputs.stop for outputs in columns.values())
    a = jnp.concatenate([layer[part]["a"] for part in present], axis=-1)
    b = [jnp.pad(layer[part]["b"], ((0, 0), (at.start, width - at.stop))) for part, at in present.items()]
    return rest | {name: {"a": a, "b": jnp.concatenate(b)}}
