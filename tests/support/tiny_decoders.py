"""A tiny random decoder of each architecture, with adapters, and a batch of groups for it."""

import functools
from dataclasses import fields, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.architectures.gpt2 import GPT2Config
from grpo_jax.models.architectures.llama import DecoderConfig
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.lora import LoraConfig, MergedKernel, merge
from grpo_jax.models.policy import Policy

QWEN2_FIELDS = {
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
"""As config.json says them."""
WIDTH = 32
PROMPTS, GROUP, LENGTH, STEPS = 3, 4, 6, 5

LLAMA = DecoderConfig(
    vocab_size=64,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm="head",
    qkv_bias=True,
    windows=(None, 4),
    initializer_range=0.2,
)
GPT2 = GPT2Config(
    vocab_size=64,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    max_positions=64,
    tie_word_embeddings=False,
    initializer_range=0.2,
)
CONFIGS: dict[str, tuple[ModelConfig, LoraConfig]] = {
    "llama": (LLAMA, LoraConfig(2, 6.0, ("q_proj", "v_proj", "down_proj"))),
    "gpt2": (GPT2, LoraConfig(2, 6.0, ("c_attn", "attn_c_proj", "mlp_c_proj"))),
}
ONE_HEAD = "one key head"
"""An architecture for `tiny` beside those of `CONFIGS`: its cache is written without the heads' axis."""


class Tiny(NamedTuple):
    """A decoder: its config, its adapters', its compiled functions, and variables far from their start."""

    config: ModelConfig
    lora: LoraConfig
    policy: Policy
    variables: dict[str, Any]


@functools.cache
def tiny(architecture: str) -> Tiny:
    config, lora = (CONFIGS | {ONE_HEAD: (replace(LLAMA, num_kv_heads=1), CONFIGS["llama"][1])})[architecture]
    return Tiny(config, lora, compiled(Policy(config, lora=lora)), drawn(config, lora))


def drawn(config: ModelConfig, lora: LoraConfig | None = None, *, start: float | None = None) -> dict[str, Any]:
    """Variables of a decoder, adapters far from their start; drawn on the host, so that nothing is compiled.

    With `start` they are as at the start of training: weights of that deviation, scales of 1, biases and `b` of 0.
    """
    shapes = jax.eval_shape(functools.partial(init_variables, config, lora=lora), jax.random.key(0))
    rng = np.random.default_rng(1)

    def draw(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        deviation = 0.2 if start is None else 0.0 if name in ("scale", "bias", "b") else start
        return jax.device_put(rng.normal(name == "scale", deviation, leaf.shape).astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def normal_like(shapes, deviation: float):
    """Normal numbers in the place of a tree of shapes, drawn on the host."""
    rng = np.random.default_rng(1)
    draw = lambda leaf: rng.normal(0, deviation, leaf.shape).astype(leaf.dtype)  # noqa: E731
    return jax.device_put(jax.tree.map(draw, shapes))


class _Compiled(Policy):
    prefill = jax.jit(Policy.prefill, static_argnums=0)
    decode_step = jax.jit(Policy.decode_step, static_argnums=0)
    forward_group = jax.jit(Policy.forward_group, static_argnums=0)


def compiled(policy: Policy) -> Policy:
    return _Compiled(**{field.name: getattr(policy, field.name) for field in fields(policy)})


def group_batch():
    """Prompts of 6, 4 and 1 tokens, each with four completions that end at different steps."""
    rng = np.random.default_rng(0)
    prompt_tokens = rng.integers(0, 64, (PROMPTS, LENGTH)).astype(np.int32)
    prompt_mask = np.arange(LENGTH)[None] >= np.array([0, 2, 5])[:, None]
    tokens = rng.integers(0, 64, (PROMPTS, GROUP, STEPS)).astype(np.int32)
    ends = rng.integers(1, STEPS + 1, (PROMPTS, GROUP, 1))
    return prompt_tokens, prompt_mask, tokens, np.arange(STEPS) < ends


def merged_params(variables, lora):
    """Parameters with adapters folded into whole kernels, float32."""

    def waits(leaf):
        return isinstance(leaf, MergedKernel)

    return jax.tree.map(lambda leaf: leaf.at(()) if waits(leaf) else leaf, merge(variables, lora), is_leaf=waits)
