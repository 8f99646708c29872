"""Projections of the same states joined to one, for decoding on a GPU: a kernel in the place of two or three."""

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax.models.families import ModelConfig
from grpo_jax.models.families.llama import DecoderConfig
from grpo_jax.models.variables import PyTree, Variables

_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def joined_config(config: ModelConfig) -> ModelConfig:
    """The config of the decoder that reads what `join` returns."""
    return dataclasses.replace(config, fused=True) if isinstance(config, DecoderConfig) else config


def join(variables: Variables) -> Variables:
    """Unstacked variables with kernels, biases and adapters of queries, keys and values, and of gate and up, as one.

    Outputs lie side by side, as Phi-3's; so do quantised ones and their scales. Adapters become one pair of factors,
    of which each part of the outputs reads its own.
    """
    params, adapters = dict(variables["params"]), dict(variables.get("lora", {}))
    for layer in [name for name in params if name.startswith("layers_")]:
        for name, parts in _JOINED.items():
            if parts[0] in params[layer]:
                if layer in adapters:
                    adapters[layer] = _with_joined_adapters(adapters[layer], params[layer], name, parts)
                params[layer] = _with_joined_kernels(params[layer], name, parts)
    return {**variables, "params": params} | ({"lora": adapters} if adapters else {})


def _with_joined_kernels(layer: Variables, name: str, parts: tuple[str, ...]) -> dict[str, PyTree]:
    rest = {other: tree for other, tree in layer.items() if other not in parts}
    return rest | {name: jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *(layer[part] for part in parts))}


def _with_joined_adapters(layer: Variables, params: Variables, name: str, parts: tuple[str, ...]) -> dict[str, PyTree]:
    rest = {other: tree for other, tree in layer.items() if other not in parts}
    present = [part for part in parts if part in layer]
    if not present:
        return rest
    widths = [params[part]["kernel"].shape[-1] for part in parts]
    rows = []
    for part in present:
        before = sum(widths[: parts.index(part)])
        b = layer[part]["b"]
        rows.append(jnp.pad(b, ((0, 0), (before, sum(widths) - before - b.shape[-1]))))
    a = jnp.concatenate([layer[part]["a"] for part in present], axis=-1)
    return rest | {name: {"a": a, "b": jnp.concatenate(rows)}}
