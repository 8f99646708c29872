"""The table of architectures: what is read from config.json or refused, how weights are drawn, what a new row takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_decoders import LLAMA as TINY
from support.tiny_decoders import compiled
from support.tiny_decoders import drawn as weights

from grpo_jax.models.architectures import ARCHITECTURES, llama, read_config
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.hf.peft import load_adapters, save_adapters
from grpo_jax.models.hf.weights import name_table
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import make_mesh, shardings

LLAMA = dict(
    model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
QWEN2 = LLAMA | dict(model_type="qwen2")
MISTRAL = LLAMA | dict(model_type="mistral", num_key_value_heads=2)
SMOLLM3 = LLAMA | dict(model_type="smollm3", num_key_value_heads=2)
PHI3 = LLAMA | dict(model_type="phi3")
MOE = LLAMA | dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
GEMMA2 = LLAMA | dict(model_type="gemma2", num_key_value_heads=2)
GEMMA3 = GEMMA2 | dict(model_type="gemma3_text")
GPT2 = dict(model_type="gpt2", vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
TOKENS = dict(image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)


def without(fields, name):
    return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (LLAMA | dict(model_type="mamba"), "'llama', 'mistral', 'qwen2', .*'gpt2'.*mamba"),
        (without(LLAMA, "hidden_size"), "hidden_size"),
        (LLAMA | dict(hidden_act="relu2"), "relu2"),
        (LLAMA | dict(hidden_size="32"), "hidden_size: expected a whole number from 1 to 1048576, got '32'"),
        (LLAMA | dict(num_key_value_heads=3), "num_key_value_heads: expected a divisor of 4 heads, got 3"),
        (LLAMA | dict(rope_scaling=dict(type="dynamic", factor=2.0)), "dynamic"),
        (LLAMA | dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "low_freq_factor"),
        (LLAMA | dict(rope_scaling=dict(type="linear")), "factor"),
        (LLAMA | dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "full_attention"),
        (LLAMA | dict(quantization_config=dict(bits=4)), "quantization_config"),
        (QWEN2 | dict(attention_bias=False), "attention_bias"),
        (QWEN2 | dict(layer_types=["sliding_attention", "full_attention"]), "sliding_window"),
        (QWEN2 | dict(layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
        (SMOLLM3 | dict(no_rope_layers=[1]), r"no_rope_layers: expected 2 entries, one per layer, got \[1\]"),
        (SMOLLM3 | dict(no_rope_layers="01"), "no_rope_layers: expected a list of 0 and 1, got '01'"),
        (
            SMOLLM3 | dict(layer_types=["sliding_attention"] * 2, sliding_window=8),
            "sliding_window: .* use_sliding_window",
        ),
        (PHI3 | dict(partial_rotary_factor=0.4), "partial_rotary_factor: expected an even part of 8 dim.*, got 0.4"),
        (PHI3 | dict(rope_scaling=dict(type="llama3")), "rope_type: expected longrope for .*'phi3', got 'llama3'"),
        (PHI3 | dict(rope_scaling=dict(type="longrope", short_factor=[1.0])), r"short_factor: expected 4 numbers"),
        (MOE | dict(mlp_only_layers=[1]), r"mlp_only_layers: expected experts in every layer, got \[1\]"),
        (MOE | dict(num_experts_per_tok=5), "num_experts_per_tok: expected at most num_experts=4, got 5"),
        (MOE | dict(num_local_experts=0), "num_experts: expected a whole number from 1"),
        (LLAMA | dict(model_type="gemma3", text_config=LLAMA), "'gemma2', 'gemma3_text', .* got 'gemma3'"),
        (GEMMA2 | dict(final_logit_softcapping=0), "final_logit_softcapping: expected a finite number > 0, got 0"),
        (
            GEMMA3 | dict(attn_logit_softcapping=50.0),
            "attn_logit_softcapping=50.0 is not supported for .*'gemma3_text'",
        ),
        (GEMMA3 | dict(rope_parameters=dict(rope_theta=1e6)), "rope_parameters.rope_theta: expected a table of fields"),
        (GEMMA3 | dict(rope_parameters=dict(chunked={})), r"rope_parameters: expected full_attention and .*chunked"),
        (GPT2 | dict(activation_function="quick_gelu"), "activation_function.*quick_gelu"),
        (GPT2 | dict(pruned_heads={"0": [1]}), "pruned_heads"),
        (GPT2 | dict(n_head=5), "n_embd: expected a multiple of n_head=5, got 768"),
        (GPT2 | dict(n_layer=None), "lacks n_layer"),
        (
            MISTRAL | dict(layer_types=["full_attention", "sliding_attention"]),
            "layer_types: expected sliding_",
        ),
        (LLAMA | dict(rope_scaling=dict(type="linear", factor=0)), "rope_parameters.factor: expected a finite number"),
        (QWEN2 | dict(layer_types="full_attention"), "layer_types: expected a list of names"),
        (QWEN2 | dict(model_type="qwen2_vl", text_config=[1]), "text_config: expected a table of fields"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_fields_are_refused_by_name(fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read_config(fields)


def test_old_and_new_forms_of_config_json_read_the_same():
    """Flat with rope_theta and rope_scaling (the hub, 2024); nested with rope_parameters (transformers 5)."""
    text = without(QWEN2, "model_type") | dict(use_sliding_window=False, sliding_window=131072, max_window_layers=28)
    flat = text | dict(
        model_type="qwen2_vl",
        rope_theta=5e5,
        rope_scaling=dict(type="mrope", mrope_section=[2, 1, 1]),
        vision_config=dict(depth=2, hidden_size=32),
        **TOKENS,
    )
    nested = dict(
        model_type="qwen2_vl",
        text_config=text
        | dict(
            model_type="qwen2_vl_text",
            layer_types=["full_attention"] * 2,
            rope_parameters=dict(rope_type="default", rope_theta=5e5, mrope_section=[2, 1, 1]),
        ),
        vision_config=dict(depth=2, hidden_size=32),
        **TOKENS,
        tie_word_embeddings=False,
    )
    assert read_config(flat) == read_config(nested)
    assert read_config(flat).rope.theta == 5e5
    assert read_config(nested | dict(tie_word_embeddings=True)).tie_word_embeddings
    yarn = dict(factor=4.0, original_max_position_embeddings=1024)
    old = LLAMA | dict(rope_theta=1e5, rope_scaling=yarn | dict(type="yarn"))
    new = LLAMA | dict(rope_parameters=yarn | dict(rope_type="yarn", rope_theta=1e5))
    assert read_config(old) == read_config(new)
    assert read_config(old).rope.attention_factor > 1


def test_what_a_mistral_folder_leaves_out_is_as_transformers_has_it():
    left_out = without(MISTRAL, "num_key_value_heads") | dict(num_attention_heads=16, hidden_size=64)
    config = read_config(left_out)
    assert (config.num_kv_heads, config.windows) == (8, (4096, 4096))
    assert read_config(left_out | dict(sliding_window=None)).windows == (None, None)
    assert read_config(left_out | dict(num_key_value_heads=None)).num_kv_heads == 16


def test_what_a_smollm3_folder_leaves_out_is_as_transformers_has_it():
    """Every fourth layer is not rotated, and such layers alone have a window where one is in use."""
    config = read_config(without(SMOLLM3, "num_key_value_heads") | dict(num_hidden_layers=5))
    assert [rope is None for rope in config.layer_ropes] == [False, False, False, True, False]
    assert (config.rope.theta, config.num_kv_heads, config.tie_word_embeddings) == (2e6, 4, True)
    windowed = read_config(SMOLLM3 | dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=8))
    assert windowed.windows == (None, None, None, 8)
    assert read_config(SMOLLM3 | dict(no_rope_layers=[1, 1])).layer_ropes == ()


def test_what_gemma_folders_leave_out_is_as_transformers_has_it():
    two = read_config(GEMMA2)
    assert (two.windows, two.attention_softcap, two.logit_softcap) == ((4096, None), 50.0, 30.0)
    assert (two.head_dim, two.activation, two.attention_scale) == (256, "gelu_pytorch_tanh", 1 / 16)
    assert two.embedding_scale == 32**0.5 and two.tie_word_embeddings and not two.qk_norm
    assert read_config(GEMMA2 | dict(attn_logit_softcapping=None)).attention_softcap is None
    three = read_config(GEMMA3 | dict(num_hidden_layers=7, sliding_window=8))
    assert three.windows == (8, 8, 8, 8, 8, None, 8) and three.qk_norm
    assert [rope.theta for rope in three.layer_ropes] == [1e4] * 5 + [1e6, 1e4]
    assert three.attention_softcap is None and three.logit_softcap is None


def test_old_and_new_forms_of_gemma_3s_rotations_read_the_same():
    """Two bases, and a scaling of layers without a window (the hub, 2025); a table for each type (transformers 5)."""
    linear = dict(rope_type="linear", factor=8.0)
    old = GEMMA3 | dict(rope_theta=1e5, rope_local_base_freq=1e3, rope_scaling=linear, sliding_window_pattern=2)
    tables = dict(full_attention=linear | dict(rope_theta=1e5), sliding_attention=dict(rope_theta=1e3))
    types = ["sliding_attention", "full_attention"]
    assert read_config(old) == read_config(GEMMA3 | dict(rope_parameters=tables, layer_types=types))
    assert [(rope.theta, rope.factor) for rope in read_config(old).layer_ropes] == [(1e3, 1.0), (1e5, 8.0)]


def test_names_that_transformers_also_takes_for_gpt2():
    renamed = dict(
        model_type="gpt2",
        vocab_size=50257,
        max_position_embeddings=1024,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
    )
    dropouts = dict(attn_pdrop=0.3, embd_pdrop=0.3, resid_pdrop=0.3, n_inner=3072, n_ctx=1024)
    # Scores are float32 here whatever reorder_and_upcast_attn says.
    assert read_config(renamed) == read_config(GPT2 | dropouts | dict(reorder_and_upcast_attn=True))


def drawn(fields):
    return jax.jit(lambda key: init_variables(read_config(fields), key)["params"])(jax.random.key(3))


def test_llamas_weights_are_drawn_as_the_config_says():
    params = drawn(QWEN2 | dict(initializer_range=0.2))
    np.testing.assert_allclose(np.std(params["layers"]["up_proj"]["kernel"], axis=(1, 2)), 0.2, rtol=0.1)
    assert not np.array_equal(*params["layers"]["up_proj"]["kernel"])
    assert float(jnp.abs(params["layers"]["q_proj"]["bias"]).max()) == 0
    assert float(jnp.abs(params["norm"]["scale"] - 1).max()) == 0


def test_gpt2s_weights_are_drawn_as_the_paper_says():
    """Those that add to the residual stream are smaller by the root of twice the layers."""
    params = drawn(GPT2 | dict(vocab_size=64, n_embd=64, n_head=4, n_layer=8, initializer_range=0.2))
    spread = {name: float(jnp.std(own["kernel"])) for name, own in params["layers"].items() if "kernel" in own}
    assert spread == pytest.approx(dict(c_attn=0.2, c_fc=0.2, attn_c_proj=0.05, mlp_c_proj=0.05), rel=0.05)
    assert float(jnp.std(params["embed_positions"])) == pytest.approx(0.2, rel=0.05)
    assert float(jnp.abs(params["layers"]["ln_1"]["scale"] - 1).max()) == 0


def test_a_new_architecture_is_its_row(monkeypatch, tmp_path):
    """Llama's layers with learned positions for rotations, under names of their own: nothing else is told of it."""

    def unrotated(config, positions):
        table = jnp.zeros((*positions.shape, config.head_dim // 2))
        return table + 1, table

    names = {"embed_tokens": "words", "embed_positions": "places", "norm": "end"}
    new = llama.ARCHITECTURE._replace(
        model_types=("placed_llama",),
        learned_positions=True,
        rotation=unrotated,
        naming=llama.NAMING._replace(prefixes=("net.",), tensors=names),
    )
    monkeypatch.setitem(ARCHITECTURES, "placed_llama", new)
    config = dataclasses.replace(TINY, model_type="placed_llama", max_positions=8)
    lora = LoraConfig(2, 4.0, ("q_proj",))
    variables = weights(config, lora)
    assert variables["params"]["embed_positions"].shape == (8, 32)

    policy = compiled(Policy(config, lora=lora))
    prompts, tokens = np.array([[1, 2, 3]], np.int32), np.array([[[4, 5, 6]]], np.int32)
    full = policy.forward_group(variables, prompts, prompts > 0, tokens, tokens > 0)
    elsewhere = {**variables["params"], "embed_positions": -variables["params"]["embed_positions"]}
    moved = policy.forward_group({**variables, "params": elsewhere}, prompts, prompts > 0, tokens, tokens > 0)
    assert float(jnp.abs(moved - full).max()) > 1e-3
    with pytest.raises(ValueError, match="at most 8 tokens"):
        Policy(config).prefill(variables, np.ones((1, 9), np.int32), np.ones((1, 9), bool))

    table = name_table(config, ["net.words.weight"])
    assert {"net.words.weight", "net.places.weight", "net.end.weight", "net.layers.1.mlp.up_proj.weight"} <= set(table)
    save_adapters(tmp_path / "adapter", variables["lora"], lora, config, base="somewhere")
    found, adapters = load_adapters(tmp_path / "adapter", config)
    assert found == lora
    jax.tree.map(np.testing.assert_array_equal, adapters, variables["lora"])
    shardings(variables, make_mesh(1, 1, jax.devices()))
