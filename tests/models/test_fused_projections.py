"""Unstacked layers with fused projections, as on a CUDA device, against stacks on a CPU."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from support.tiny_decoders import CONFIGS, LLAMA, drawn, group_batch

from grpo_jax.config.sections import LoraSection, MeshSection, PolicySection
from grpo_jax.models.architectures import llama
from grpo_jax.models.decoder import separate, unstack_and_fuse
from grpo_jax.models.lora import LoraConfig, entry, merge
from grpo_jax.models.policy import Policy
from grpo_jax.models.variables import keeps_layers_apart

close = partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-4)
SEVERAL = LoraConfig(2, 6.0, ("k_proj", "o_proj", "v_proj", "gate_proj", "up_proj"))
WIDE = replace(LLAMA, hidden_size=64, mlp_bias=True)
PHI = replace(LLAMA, fused=True, model_type="phi3"), LoraConfig(2, 6.0, ("qkv_proj", "down_proj"))
ARCHITECTURES = {"llama": (LLAMA, SEVERAL), "gpt2": CONFIGS["gpt2"], "joined": PHI}


@pytest.mark.parametrize(
    ("architecture", "remat"),
    [
        ("llama", "layer"),
        *(pytest.param(*others, marks=pytest.mark.wide) for others in (("gpt2", "products"), ("joined", "products"))),
    ],
)
def test_states_steps_and_gradients_are_those_of_stacks(architecture, remat):
    config, lora = ARCHITECTURES[architecture]
    variables = drawn(config, lora)
    prompts, prompt_mask, tokens, mask = group_batch()

    def outcome(platform, params):
        policy = Policy(config, lora=lora, remat=remat, platform=platform)

        def loss(adapters):
            variables = {"params": params, "lora": adapters}
            hidden = policy.forward_group(variables, prompts, prompt_mask, tokens, mask)
            return (hidden**2).mean(), hidden

        def steps(adapters):
            variables = {"params": params, "lora": adapters}
            prefix = policy.prefill(variables, prompts, prompt_mask)
            cache = policy.init_cache(*tokens.shape)
            step, _ = policy.decode_step(policy.unstack(variables), prefix, tokens[:, :, 0], cache)
            return prefix, step, jax.value_and_grad(loss, has_aux=True)(adapters)

        return jax.jit(steps)(variables["lora"])

    apart = unstack_and_fuse(variables["params"], config)
    assert "layers" not in apart and {"layers_0", "layers_1"} <= apart.keys()
    jax.tree.map(close, outcome("cuda", apart), outcome("cpu", variables["params"]))


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_more_layers_apart_take_no_more_traces(monkeypatch, remat):
    attention, traced = llama.attend_streams, []
    monkeypatch.setattr(llama, "attend_streams", lambda *inputs: traced.append(len(inputs)) or attention(*inputs))

    def traces(layers):
        config = replace(LLAMA, num_layers=layers, windows=LLAMA.windows * (layers // 2))
        variables, policy = drawn(config, SEVERAL), Policy(config, lora=SEVERAL, remat=remat, platform="cuda")
        apart, before = unstack_and_fuse(variables["params"], config), len(traced)

        def loss(adapters):
            return policy.forward_group({"params": apart, "lora": adapters}, *group_batch()).sum()

        jax.make_jaxpr(jax.grad(loss))(variables["lora"])
        return len(traced) - before

    assert traces(2) == traces(4) > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_layer_is_merged_as_that_of_a_stack(architecture):
    config, lora = ARCHITECTURES[architecture]
    variables = drawn(config, lora)
    stacked = merge(variables, lora)["layers"]
    params = separate(unstack_and_fuse(variables["params"], config), config)
    apart = merge({**variables, "params": params}, lora)["layers"]
    assert apart.keys() == stacked.keys()
    for module, leaves in stacked.items():
        for name, leaf in leaves.items():
            for layer in range(config.num_layers):
                np.testing.assert_array_equal(entry(apart[module][name], (layer,)), entry(leaf, (layer,)))


def test_a_layer_has_one_product_for_what_reads_the_same_states():
    variables = jax.eval_shape(Policy(WIDE, lora=SEVERAL, platform="cuda").unstack, drawn(WIDE, SEVERAL))
    kernels = {name for name, part in variables["params"]["layers_1"].items() if "kernel" in part}
    assert kernels == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    adapter = variables["lora"]["layers_1"]["qkv_proj"]
    assert adapter["a"].shape == (64, 4) and adapter["b"].shape == (4, (4 + 2 + 2) * 8)


SECTION = {"compute_dtype": "bfloat16", "frozen_dtype": "bfloat16", "lora": LoraSection(rank=2)}


@pytest.mark.parametrize(
    ("fields", "platform", "apart"),
    [
        (SECTION, "cuda", True),
        (SECTION, "gpu", False),
        (SECTION, "cpu", False),
        (SECTION | {"mesh": MeshSection(fsdp=2)}, "cuda", False),
        (SECTION | {"frozen_dtype": "float32"}, "cuda", False),
        (SECTION | {"frozen_dtype": "float32", "quantised": "int8"}, "cuda", True),
        ({"compute_dtype": "float32"}, "cuda", False),
    ],
)
def test_what_is_frozen_lies_apart_on_one_cuda_device(fields, platform, apart):
    assert keeps_layers_apart(PolicySection(**fields), platform) is apart
