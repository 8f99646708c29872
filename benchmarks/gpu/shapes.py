"""Qwen2.5's shapes with random weights, ours and transformers', as the iteration benchmark's `Case` says them."""

from __future__ import annotations

from typing import Any

import grpo_iteration
import iteration_work
import jax

from grpo_jax.models.decoder import init_variables
from grpo_jax.models.families.llama_config import DecoderConfig

_TINY = dict(hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, vocabulary=256)
SIZES = {
    "0.5B": dict(hidden=896, layers=24, heads=14, kv_heads=2, mlp=4864, vocabulary=151_936),
    "1.5B": dict(hidden=1536, layers=28, heads=12, kv_heads=2, mlp=8960, vocabulary=151_936),
    "7B": dict(hidden=3584, layers=28, heads=28, kv_heads=4, mlp=18_944, vocabulary=152_064),
}
"""All with tied embeddings here; the published 7 B has a head of its own, which reads as many bytes for a token."""


def case(size: str, tiny: bool, **work: int) -> iteration_work.Case:
    """A shape and its work: prompts, group, prompt_tokens, new_tokens; a tiny shape keeps the number of rows."""
    return iteration_work.Case(size, **work, **(_TINY if tiny else SIZES[size]))


def decoder(case: iteration_work.Case) -> DecoderConfig:
    """Our config of the shape."""
    return DecoderConfig(
        model_type="qwen2",
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=case.mlp,
        num_layers=case.layers,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_size,
        qkv_bias=True,
        tie_word_embeddings=True,
        initializer_range=0.02,
    )


def variables(config: Any, dtype: str, **options: Any) -> dict[str, Any]:
    """Random weights, drawn on the device in one program: nothing is there in float32 first."""
    draw = jax.jit(lambda key: init_variables(config, key, param_dtype=dtype, **options))
    return jax.block_until_ready(draw(jax.random.key(0)))


def torch_model(case: iteration_work.Case, device: str, dtype: str) -> Any:
    """transformers' model of the shape, its random weights drawn on the device in their own type."""
    import torch

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = grpo_iteration.make_model(case)
    finally:
        torch.set_default_dtype(before)
    # Every completion is written to its full length, here as with us.
    model.generation_config.eos_token_id = None
    return model.to(device)
