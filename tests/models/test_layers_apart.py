"""A frozen policy whose layers have arrays of their own, as on a GPU, computes what the stacked one does."""

from functools import partial

import jax
import numpy as np
import pytest
from support.tiny_decoders import CONFIGS, ONE_HEAD, group_batch, tiny

from grpo_jax.config import LoraSection, MeshSection, PolicySection
from grpo_jax.models.lora import merge
from grpo_jax.models.policy import keeps_layers_apart, make_policy
from grpo_jax.models.variables import split_layers

close = partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("remat", ["none", "products", "layer"])
@pytest.mark.parametrize("family", [*CONFIGS, ONE_HEAD])
def test_states_steps_and_gradients_are_those_of_a_stack(family, remat):
    config, lora, _, variables = tiny(family)
    policy = make_policy(config, lora=lora, remat=remat)
    prompts, prompt_mask, tokens, mask = group_batch()

    @jax.jit
    def outcome(params, adapters):
        def loss(adapters):
            hidden = policy.forward_group({"params": params, "lora": adapters}, prompts, prompt_mask, tokens, mask)
            return (hidden**2).mean(), hidden

        variables = {"params": params, "lora": adapters}
        prefix = policy.prefill(variables, prompts, prompt_mask)
        cache = policy.init_cache(*tokens.shape)
        step, _ = policy.decode_step(policy.unstack(variables), prefix, tokens[:, :, 0], cache)
        return prefix, step, jax.value_and_grad(loss, has_aux=True)(adapters)

    apart = split_layers(variables["params"])
    assert "layers" not in apart and len(apart) == len(variables["params"]) - 1 + config.num_layers
    jax.tree.map(close, outcome(apart, variables["lora"]), outcome(variables["params"], variables["lora"]))


def test_each_layer_is_merged_as_that_of_a_stack():
    config, lora, _, variables = tiny("llama")
    stacked, apart = (
        merge({**variables, "params": params}, lora)["layers"]
        for params in (variables["params"], split_layers(variables["params"]))
    )
    for module, leaves in stacked.items():
        for name, leaf in leaves.items():
            assert apart[module][name].shape == leaf.shape
            for layer in range(config.num_layers):
                np.testing.assert_array_equal(apart[module][name].at((layer,)), leaf.at((layer,)))


SECTION = {"compute_dtype": "bfloat16", "lora": LoraSection(rank=2)}


@pytest.mark.parametrize(
    ("fields", "platform", "apart"),
    [
        (SECTION | {"frozen_dtype": "bfloat16"}, "cuda", True),
        (SECTION | {"frozen_dtype": "bfloat16"}, "tpu", False),
        (SECTION | {"frozen_dtype": "bfloat16"}, "gpu", True),
        (SECTION | {"frozen_dtype": "bfloat16"}, "cpu", False),
        (SECTION | {"frozen_dtype": "bfloat16", "mesh": MeshSection(fsdp=2)}, "cuda", False),
        (SECTION | {"frozen_dtype": "float32"}, "cuda", False),
        (SECTION | {"frozen_dtype": "float32", "quantised": "int8"}, "cuda", True),
        ({"compute_dtype": "float32"}, "cuda", False),
    ],
)
def test_what_is_frozen_lies_apart_on_one_gpu(fields, platform, apart):
    assert keeps_layers_apart(PolicySection(**fields), platform) is apart
