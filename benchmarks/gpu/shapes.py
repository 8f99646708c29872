"""Shapes of Qwen2.5 and Qwen3 with random weights, for us and transformers, as the iteration benchmark's `Case`."""

from __future__ import annotations

import functools
import math
from typing import Any

import grpo_iteration
import iteration_work
import jax
import jax.numpy as jnp

from grpo_jax.models.decoder import init_variables, unstack_and_fuse
from grpo_jax.models.lora import LoraConfig, init_adapters

_TINY = dict(hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, vocabulary=256)
SIZES = {
    "0.5B": dict(hidden=896, layers=24, heads=14, kv_heads=2, mlp=4864, vocabulary=151_936),
    "0.6B": dict(hidden=1024, layers=28, heads=16, kv_heads=8, mlp=3072, vocabulary=151_936, head=128),
    "1.5B": dict(hidden=1536, layers=28, heads=12, kv_heads=2, mlp=8960, vocabulary=151_936),
    "7B": dict(hidden=3584, layers=28, heads=28, kv_heads=4, mlp=18_944, vocabulary=152_064),
}
"""All with tied embeddings here; the published 7 B has a head of its own, which reads as many bytes for a token."""


def case(size: str, tiny: bool, **work: int) -> iteration_work.Case:
    """A shape and its work: prompts, group, prompt_tokens, new_tokens; a tiny shape keeps the number of rows."""
    return iteration_work.Case(size, **work, **(_TINY if tiny else SIZES[size]))


def variables(config: Any, dtype: str, lora: LoraConfig | None = None, *, apart: bool = False) -> dict[str, Any]:
    """Random weights and fresh adapters on the first device; `apart` as `keeps_layers_apart` says of a run.

    Weights are made leaf by leaf in their own type, with nothing beside them: what JAX's generators need for a stack of
    7 B's matrices would be the peak of the whole process.
    """
    key = jax.random.key(0)
    stacks = jax.eval_shape(lambda: init_variables(config, key, param_dtype=dtype))["params"]
    shapes = jax.eval_shape(lambda params: unstack_and_fuse(params, config), stacks) if apart else stacks
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    params = [_fill(path[-1].key, leaf.shape, leaf.dtype, number) for number, (path, leaf) in enumerate(leaves)]
    found = {"params": jax.block_until_ready(jax.tree_util.tree_unflatten(structure, params))}
    return found if lora is None else found | {"lora": init_adapters(stacks, key, lora)}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _fill(name: str, shape: tuple[int, ...], dtype: Any, number: int) -> jax.Array:
    """Ones for a norm, zeros for a bias, else even numbers of deviation 0.02, hashed from their places."""
    if name in ("scale", "bias"):
        return jnp.full(shape, name == "scale", dtype)
    mixed = (jax.lax.iota(jnp.uint32, math.prod(shape)) + jnp.uint32(number)) * jnp.uint32(2654435761)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
    mixed = mixed ^ (mixed >> 13)
    even = (mixed >> 8).astype(jnp.float32) / 2**23 - 1  # in [-1, 1)
    return (0.02 * 3**0.5 * even).astype(dtype).reshape(shape)


def torch_model(case: iteration_work.Case, device: str, dtype: str) -> Any:
    """transformers' model of the shape, its random weights drawn on the device in their own type."""
    import torch

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model: Any = grpo_iteration.make_model(case)
    finally:
        torch.set_default_dtype(before)
    # Every completion is written to its full length, here as with us.
    model.generation_config.eos_token_id = None
    return model.to(device)
