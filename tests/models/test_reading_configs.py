"""The table of architectures: fields of config.json that are read or refused, initial weights, and new rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.architectures import read_model_config
from grpo_jax.models.decoder import init_variables

LLAMA = dict(
    model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
QWEN2 = LLAMA | dict(model_type="qwen2")
MISTRAL = LLAMA | dict(model_type="mistral", num_key_value_heads=2)
SMOLLM3 = LLAMA | dict(model_type="smollm3", num_key_value_heads=2)
PHI3 = LLAMA | dict(model_type="phi3")
GEMMA2 = LLAMA | dict(model_type="gemma2", num_key_value_heads=2)
GEMMA3 = GEMMA2 | dict(model_type="gemma3_text")
GPT2 = dict(model_type="gpt2", vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
TOKENS = dict(image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)


def without(fields, name):
    return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (LLAMA | dict(model_type="mamba"), "'llama', 'mistral', 'olmo2', .*'gpt2'.*mamba"),
        (without(LLAMA, "hidden_size"), "hidden_size"),
        (LLAMA | dict(hidden_act="relu2"), "relu2"),
        (LLAMA | dict(model_type="qwen3_moe", num_experts=4), "model_type: expected one of .*'qwen3_moe'"),
        (LLAMA | dict(intermediate_size="32"), "intermediate_size\n.* valid integer"),
        (LLAMA | dict(tie_word_embeddings="no"), "tie_word_embeddings\n.* valid boolean"),
        (LLAMA | dict(num_hidden_layers=2**40), "num_hidden_layers: expected at most 4096"),
        (LLAMA | dict(num_key_value_heads=3), "num_key_value_heads: expected a divisor of 4 heads, got 3"),
        (LLAMA | dict(rope_scaling=dict(type="dynamic", factor=2.0)), "dynamic"),
        (LLAMA | dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "low_freq_factor"),
        (LLAMA | dict(rope_scaling=dict(type="yarn", factor=8.0, mscale=0.7)), "mscale=0.7 is not supported"),
        (LLAMA | dict(rope_scaling=dict(type="yarn", factor=8.0, truncate=False)), "truncate=False is not supported"),
        (LLAMA | dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "full_attention"),
        (QWEN2 | dict(attention_bias=False), "attention_bias"),
        (QWEN2 | dict(layer_types=["sliding_attention", "full_attention"]), "sliding_window"),
        (SMOLLM3 | dict(no_rope_layers=[1]), r"no_rope_layers: expected 2 entries, one per layer, got \[1\]"),
        (
            SMOLLM3 | dict(layer_types=["sliding_attention"] * 2, sliding_window=8),
            "sliding_window: .* use_sliding_window",
        ),
        (PHI3 | dict(partial_rotary_factor=0.4), "partial_rotary_factor: expected an even part of 8 dim.*, got 0.4"),
        (PHI3 | dict(rope_scaling=dict(type="longrope", short_factor=[1.0])), r"short_factor: expected 4 numbers"),
        (GEMMA2 | dict(final_logit_softcapping=0), "logit_softcap\n.* greater than 0"),
        (GEMMA3 | dict(rope_parameters=dict(rope_theta=1e6)), "rope_parameters: expected full_attention .*rope_theta"),
        (GEMMA3 | dict(rope_parameters=dict(chunked={})), r"rope_parameters: expected full_attention and .*chunked"),
        (GPT2 | dict(activation_function="swoosh"), "activation_function.*swoosh"),
        (GPT2 | dict(n_head=5), "n_embd: expected a multiple of n_head=5, got 768"),
        (GPT2 | dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True is not supported"),
        (MISTRAL | dict(layer_types=["full_attention", "sliding_attention"]), "layer_types: expected sliding_"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_fields_are_refused_by_name(fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read_model_config(fields)


YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=1024)
GEMMA3_ROPE = dict(rope_theta=1e5, rope_local_base_freq=1e3, rope_scaling=dict(rope_type="linear", factor=8.0))
MROPE = dict(rope_theta=5e5, rope_scaling=dict(type="mrope", mrope_section=[2, 1, 1]))
# Fields of folders, old and short; transformers knows the rest, and newer forms of them.
FOLDERS = [
    LLAMA | dict(rope_theta=1e5, rope_scaling=YARN),
    QWEN2 | MROPE | TOKENS | dict(model_type="qwen2_vl", num_key_value_heads=2, vision_config=dict(hidden_size=32)),
    without(MISTRAL, "num_key_value_heads") | dict(num_attention_heads=16, hidden_size=64),
    MISTRAL | dict(sliding_window=None),
    QWEN2 | dict(num_key_value_heads=2, use_sliding_window=True, max_window_layers=1),
    without(SMOLLM3, "num_key_value_heads") | dict(num_hidden_layers=5),
    SMOLLM3 | dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=8),
    PHI3,
    GEMMA2 | dict(attn_logit_softcapping=None),
    GEMMA3 | dict(num_hidden_layers=7, sliding_window=8),
    GEMMA3 | GEMMA3_ROPE | dict(sliding_window_pattern=2),
    GPT2 | dict(attn_pdrop=0.3, n_inner=3072, n_ctx=1024, reorder_and_upcast_attn=True),
]


@pytest.mark.parametrize("fields", FOLDERS, ids=lambda fields: fields["model_type"])
def test_what_a_folder_leaves_out_is_as_transformers_has_it(fields):
    """All but how many positions there are, which transformers makes up."""
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoConfig.for_model(**fields).to_dict()
    ours, theirs = (dataclasses.replace(read_model_config(one), max_positions=1) for one in (fields, whole))
    assert ours == theirs


def drawn(fields):
    return jax.jit(lambda key: init_variables(read_model_config(fields), key)["params"])(jax.random.key(3))


def test_llamas_weights_are_drawn_as_the_config_says():
    params = drawn(QWEN2 | dict(initializer_range=0.2))
    np.testing.assert_allclose(np.std(params["layers"]["up_proj"]["kernel"], axis=(1, 2)), 0.2, rtol=0.1)
    assert not np.array_equal(*params["layers"]["up_proj"]["kernel"])
    assert float(np.abs(params["layers"]["q_proj"]["bias"]).max()) == 0
    assert float(np.abs(params["norm"]["scale"] - 1).max()) == 0


def test_gpt2s_weights_are_drawn_as_the_paper_says():
    """Those that add to the residual stream are smaller by the root of twice the layers."""
    params = drawn(GPT2 | dict(vocab_size=64, n_embd=64, n_head=4, n_layer=8, initializer_range=0.2))
    spread = {name: float(jnp.std(own["kernel"])) for name, own in params["layers"].items() if "kernel" in own}
    assert spread == pytest.approx(dict(c_attn=0.2, c_fc=0.2, attn_c_proj=0.05, mlp_c_proj=0.05), rel=0.05)
    assert float(jnp.std(params["embed_positions"])) == pytest.approx(0.2, rel=0.05)
    assert float(np.abs(params["layers"]["ln_1"]["scale"] - 1).max()) == 0
