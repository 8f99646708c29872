"""Projections joined for decoding on a GPU, against those of the other platforms."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_decoders import GPT2, LLAMA

from grpo_jax.models.architectures.llama import Mixture
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.lora import LoraConfig, quantise
from grpo_jax.models.policy import Policy

WIDE = replace(LLAMA, hidden_size=64, mlp_bias=True)
MIXED = replace(LLAMA, mixture=Mixture(4, 2, 16), model_type="qwen3_moe")
SEVERAL = LoraConfig(2, 6.0, ("k_proj", "o_proj", "v_proj", "gate_proj", "up_proj"))


def drawn(config, lora):
    rng = np.random.default_rng(1)
    variables = init_variables(config, jax.random.key(0), lora=lora)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape) / 10, x.dtype), variables)


def decoded(policy, variables, prompts):
    prefix = policy.prefill(variables, prompts, prompts > 0)
    hidden, _ = policy.decode_step(policy.unstack(variables), prefix, prompts[:, :3], policy.init_cache(2, 3, 4))
    return hidden


@pytest.mark.parametrize(
    ("config", "lora", "kind"),
    [
        (WIDE, None, None),
        (WIDE, SEVERAL, None),
        (WIDE, LoraConfig(2, 6.0, ("o_proj",)), None),
        (WIDE, SEVERAL, "int8"),
        (WIDE, SEVERAL, "int4"),
        (replace(LLAMA, fused=True, model_type="phi3"), None, None),
        (MIXED, LoraConfig(2, 6.0, ("q_proj",)), None),
        (GPT2, None, None),
    ],
)
def test_a_token_is_decoded_as_with_projections_apart(config, lora, kind):
    variables = drawn(config, lora)
    if kind:
        pytest.importorskip("qwix", reason="needs the package qwix (pip install qwix)")
        variables = {**variables, "params": quantise(variables["params"], kind)}
    prompts = np.random.default_rng(0).integers(1, config.vocab_size, (2, 5)).astype(np.int32)
    joined, apart = (decoded(Policy(config, lora=lora, platform=p), variables, prompts) for p in ("cuda", "cpu"))
    np.testing.assert_allclose(joined, apart, atol=1e-5, rtol=1e-5)


def test_a_layer_has_one_product_for_what_reads_the_same_states():
    variables = jax.eval_shape(Policy(WIDE, lora=SEVERAL, platform="cuda").unstack, drawn(WIDE, SEVERAL))
    kernels = {name for name, part in variables["params"]["layers_1"].items() if "kernel" in part}
    assert kernels == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    adapter = variables["lora"]["layers_1"]["qkv_proj"]
    assert adapter["a"].shape == (64, 4) and adapter["b"].shape == (4, (4 + 2 + 2) * 8)
