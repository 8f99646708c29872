"""Layers apart, with projections of the same states joined: what one CUDA device decodes from, and a frozen base."""

import dataclasses
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.architectures.llama import DecoderConfig
from grpo_jax.models.lora import ListedLayers
from grpo_jax.models.variables import PyTree, Variables, split_layers

Columns = dict[str, slice]
"""The outputs of each part of a joined projection."""


def joined_config(config: ModelConfig) -> ModelConfig:
    """The config of the decoder that reads what `join` returns."""
    return dataclasses.replace(config, fused=True) if isinstance(config, DecoderConfig) else config


def join(variables: Variables, config: ModelConfig) -> Variables:
    """Unstacked variables with kernels, biases and adapters of queries, keys and values, and of gate and up, as one.

    Outputs lie side by side, as Phi-3's; so do quantised ones and their scales. Adapters become one pair of factors,
    of which each part of the outputs reads its own. What is joined already stays as it is.
    """
    projections = _joined_columns(config).items()
    joined = {"params": dict(variables["params"]), "lora": dict(variables.get("lora", {}))}
    for collection, with_joined in (("params", _with_joined_kernels), ("lora", _with_joined_adapters)):
        for layer in [name for name in joined[collection] if name.startswith("layers_")]:
            for name, columns in projections:
                if any(part in joined[collection][layer] for part in columns):
                    joined[collection][layer] = with_joined(joined[collection][layer], name, columns)
    return {**variables, "params": joined["params"]} | ({"lora": joined["lora"]} if "lora" in variables else {})


def apart_and_joined(params: Variables, config: ModelConfig) -> Variables:
    """Parameters with stacked layers as `join` has them; what is in the host's memory stays there."""
    return join({"params": split_layers(params)}, config)["params"]


def separate(params: Variables, config: ModelConfig) -> dict[str, PyTree]:
    """Undo `apart_and_joined`, but for `ListedLayers` in place of stacks; what is stacked stays as it is."""
    apart = [params[name] for name in (f"layers_{i}" for i in range(config.num_layers)) if name in params]
    if not apart:
        return dict(params)
    layers: dict[str, PyTree] = {}
    projections = _joined_columns(config)
    for module, leaves in apart[0].items():
        for name, columns in projections.get(module, {module: slice(None)}).items():
            layers[name] = {leaf: ListedLayers(tuple(x[module][leaf] for x in apart), columns) for leaf in leaves}
    return {name: part for name, part in params.items() if not name.startswith("layers_")} | {"layers": layers}


def _joined_columns(config: ModelConfig) -> dict[str, Columns]:
    if not isinstance(config, DecoderConfig) or config.fused:
        return {}
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv_proj": _side_by_side({"q_proj": queries, "k_proj": keys, "v_proj": keys}),
        "gate_up_proj": _side_by_side(dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)),
    }


def _side_by_side(widths: dict[str, int]) -> Columns:
    ends = accumulate(widths.values())
    return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True)}


def _with_joined_kernels(layer: Variables, name: str, columns: Columns) -> dict[str, PyTree]:
    def beside(*parts: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        numpy = np if isinstance(parts[0], np.ndarray) else jnp
        return numpy.concatenate(parts, axis=-1)

    rest = {other: tree for other, tree in layer.items() if other not in columns}
    return rest | {name: jax.tree.map(beside, *(layer[part] for part in columns))}


def _with_joined_adapters(layer: Variables, name: str, columns: Columns) -> dict[str, PyTree]:
    rest = {other: tree for other, tree in layer.items() if other not in columns}
    present = {part: outputs for part, outputs in columns.items() if part in layer}
    width = max(outputs.stop for outputs in columns.values())
    a = jnp.concatenate([layer[part]["a"] for part in present], axis=-1)
    b = [jnp.pad(layer[part]["b"], ((0, 0), (at.start, width - at.stop))) for part, at in present.items()]
    return rest | {name: {"a": a, "b": jnp.concatenate(b)}}
