"""The decoder against itself: sharing, caching, padding, adapters, shapes, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.decoder import init_variables, make_policy
from grpo_jax.models.families.llama_config import DecoderConfig
from grpo_jax.models.lora import PROJECTIONS, LoraConfig, init_adapters, merge

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    qkv_bias=True,
    windows=(None, 4),
    initializer_range=0.2,
)
LORA = LoraConfig(rank=2, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
PROMPTS, GROUP, LENGTH, STEPS = 3, 4, 6, 5

LLAMA = dict(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
)
QWEN2 = LLAMA | dict(model_type="qwen2")
QWEN2_7B = dict(
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    rope_theta=1e6,
    use_sliding_window=False,
    sliding_window=131072,
    max_window_layers=28,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def policy():
    functions = make_policy(CONFIG, lora=LORA)
    return functions._replace(
        prefill=jax.jit(functions.prefill),
        decode=jax.jit(functions.decode),
        forward_group=jax.jit(functions.forward_group),
    )


@pytest.fixture(scope="module")
def variables():
    fresh = init_variables(CONFIG, jax.random.key(0), lora=LORA)
    rng = np.random.default_rng(1)

    def shake(leaf):
        return leaf + jnp.asarray(0.1 * rng.normal(size=leaf.shape), jnp.float32)

    return {"params": jax.tree.map(shake, fresh["params"]), "lora": jax.tree.map(shake, fresh["lora"])}


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    prompt_tokens = rng.integers(0, 64, (PROMPTS, LENGTH)).astype(np.int32)
    prompt_mask = np.arange(LENGTH)[None] >= np.array([0, 2, 5])[:, None]
    tokens = rng.integers(0, 64, (PROMPTS, GROUP, STEPS)).astype(np.int32)
    ends = rng.integers(1, STEPS + 1, (PROMPTS, GROUP, 1))
    return prompt_tokens, prompt_mask, tokens, np.arange(STEPS) < ends


def test_cached_decoding_equals_the_full_forward(policy, variables, batch):
    prompt_tokens, prompt_mask, tokens, _ = batch
    full = policy.forward_group(variables, prompt_tokens, prompt_mask, tokens, np.ones(tokens.shape, bool))
    prefix, unstacked = policy.prefill(variables, prompt_tokens, prompt_mask), policy.unstack(variables)
    # One slot more than is used, holding rubbish: slots that are not written are not read.
    cache = jax.tree.map(lambda x: x + 7 if x.ndim else x, policy.init_cache(PROMPTS, GROUP, STEPS + 1))
    np.testing.assert_allclose(full[:, :, 0], np.repeat(prefix.hidden[:, None], GROUP, 1), atol=1e-4)
    for step in range(STEPS - 1):
        hidden, cache = policy.decode(unstacked, prefix, jnp.asarray(tokens[:, :, step]), cache)
        np.testing.assert_allclose(hidden, full[:, :, step + 1], atol=1e-4)
    assert int(cache.length) == STEPS - 1


def test_masks_may_be_the_integers_that_a_tokenizer_gives(policy, variables, batch):
    """The sampler takes them; so do the forward passes."""
    prompt_tokens, prompt_mask, tokens, mask = batch
    for function, expected, given in (
        (policy.forward_group, batch, (prompt_tokens, prompt_mask.astype(int), tokens, mask.astype(np.int32))),
        (policy.prefill, batch[:2], (prompt_tokens, prompt_mask.astype(np.int8))),
    ):
        same = zip(*(jax.tree.leaves(function(variables, *arrays)) for arrays in (given, expected)), strict=True)
        assert all(np.array_equal(a, b) for a, b in same)


def test_fresh_weights_are_as_the_config_says():
    params = init_variables(CONFIG, jax.random.key(3))["params"]
    np.testing.assert_allclose(np.std(params["layers"]["up_proj"]["kernel"], axis=(1, 2)), 0.2, rtol=0.1)
    assert not np.array_equal(*params["layers"]["up_proj"]["kernel"])
    assert float(jnp.abs(params["layers"]["q_proj"]["bias"]).max()) == 0
    assert float(jnp.abs(params["norm"]["scale"] - 1).max()) == 0


def test_a_prompt_is_stored_once(policy, variables, batch):
    """The group axis is in the completions' cache and nowhere in the prompts' keys and values."""
    prefix = policy.prefill(variables, *batch[:2])
    assert [x.shape for x in prefix.keys] == [(PROMPTS, 2, 8, LENGTH)] * 2
    assert [x.shape for x in prefix.values] == [(PROMPTS, 2, LENGTH, 8)] * 2
    cache = policy.init_cache(PROMPTS, GROUP, STEPS)
    assert [x.shape for x in cache.keys] == [(PROMPTS, 2, GROUP, 8, STEPS)] * 2
    assert [x.shape for x in cache.values] == [(PROMPTS, 2, GROUP, STEPS, 8)] * 2
    assert policy.init_cache(1, 1, 1, jnp.bfloat16).values[0].dtype == jnp.bfloat16


@pytest.fixture(scope="module")
def states_and_gradients():
    """(variables, batch, cotangent [P, G, T, D]) -> hidden, gradient; compiled once for several tests."""
    policy = make_policy(CONFIG, lora=LORA)

    def run(variables, batch, cotangent):
        hidden, pull = jax.vjp(lambda v: policy.forward_group(v, *batch), variables)
        return hidden, pull(cotangent)[0]

    return jax.jit(run)


def test_sharing_changes_neither_states_nor_gradients(states_and_gradients, variables, batch):
    """Against P·G groups of one, every completion behind a prompt of its own."""
    cotangent = np.random.default_rng(1).normal(size=(PROMPTS, GROUP, STEPS, 32)).astype(np.float32)
    cotangent = cotangent * batch[3][..., None]
    prompts = (np.repeat(x, GROUP, axis=0) for x in batch[:2])
    copies = (*prompts, *(x.reshape(-1, 1, STEPS) for x in batch[2:]))
    hidden, shared = states_and_gradients(variables, batch, cotangent)
    expected, copied = states_and_gradients(variables, copies, cotangent.reshape(-1, 1, STEPS, 32))
    np.testing.assert_allclose(hidden[batch[3]], expected.reshape(hidden.shape)[batch[3]], atol=1e-5)
    for got, expected in zip(jax.tree.leaves(shared), jax.tree.leaves(copied), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5 * max(1.0, float(jnp.abs(expected).max())))
    assert float(jnp.abs(shared["lora"]["layers"]["q_proj"]["a"]).max()) > 0


def test_gradients_reach_the_prompt(states_and_gradients, variables, batch):
    """A loss on the last state alone moves the embeddings of prompt tokens that no completion uses."""
    prompt_tokens, tokens = np.full_like(batch[0], 63), np.full_like(batch[2], 5)
    cotangent = np.zeros((PROMPTS, GROUP, STEPS, 32), np.float32)
    cotangent[:, :, -1] = 1
    _, grads = states_and_gradients(variables, (prompt_tokens, batch[1], tokens, batch[3]), cotangent)
    embedding = grads["params"]["embed_tokens"]
    assert float(jnp.abs(embedding[63]).max()) > 1e-3
    assert float(jnp.abs(embedding[6]).max()) == 0


def test_an_empty_prompt_stays_finite(states_and_gradients, variables, batch):
    """Rows that only fill up a batch must not spread NaN through shared sums."""
    prompt_mask = batch[1].copy()
    prompt_mask[0] = False
    cotangent = np.ones((PROMPTS, GROUP, STEPS, 32), np.float32)
    cotangent[0] = 0
    hidden, grads = states_and_gradients(variables, (batch[0], prompt_mask, *batch[2:]), cotangent)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((hidden, grads)))


def test_padding_has_no_influence(policy, variables, batch):
    """More padding on the left, other tokens under the masks (even impossible ones): same states."""
    prompt_tokens, prompt_mask, tokens, mask = batch
    expected = policy.forward_group(variables, *batch)
    wide = (np.pad(prompt_tokens, ((0, 0), (3, 0))), np.pad(prompt_mask, ((0, 0), (3, 0))))
    wild = (np.where(wide[1], wide[0], -5), wide[1], np.where(mask, tokens, 10**6).astype(np.int32), mask)
    got = policy.forward_group(variables, *wild)
    np.testing.assert_allclose(got[mask], expected[mask], atol=1e-4)


def test_one_token_completions(policy, variables, batch):
    hidden = policy.forward_group(variables, *batch[:2], batch[2][:, :, :1], batch[3][:, :, :1])
    expected = policy.prefill(variables, *batch[:2]).hidden
    np.testing.assert_allclose(hidden[:, :, 0], np.repeat(expected[:, None], GROUP, 1), atol=1e-5)


def test_leaving_adapters_out_is_the_base_model(policy, variables, batch):
    base = {"params": variables["params"]}
    got = policy.forward_group(base, *batch)
    expected = jax.jit(make_policy(CONFIG).forward_group)(base, *batch)
    np.testing.assert_array_equal(got, expected)
    fresh = init_adapters(base["params"], jax.random.key(2), LORA)
    np.testing.assert_array_equal(policy.forward_group(base | {"lora": fresh}, *batch), expected)
    assert float(jnp.abs(policy.forward_group(variables, *batch) - expected).max()) > 0.1


def test_merged_adapters_are_the_adapted_model(policy, variables, batch):
    merged = merge(variables, LORA)
    np.testing.assert_allclose(
        policy.forward_group({"params": merged}, *batch), policy.forward_group(variables, *batch), atol=2e-4
    )
    kernel, base = (tree["layers"]["q_proj"]["kernel"] for tree in (merged, variables["params"]))
    a, b = (np.asarray(variables["lora"]["layers"]["q_proj"][name]) for name in "ab")
    np.testing.assert_allclose(kernel[1], base[1] + 3.0 * a[1] @ b[1], atol=1e-5)
    half = {"params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables["params"])}
    assert merge(half | {"lora": variables["lora"]}, LORA)["layers"]["q_proj"]["kernel"].dtype == jnp.bfloat16


def test_adapters_need_their_configuration(variables, batch):
    with pytest.raises(ValueError, match="LoraConfig"):
        merge(variables, None)
    with pytest.raises(ValueError, match="lora=None"):
        make_policy(CONFIG).forward_group(variables, *batch)
    with pytest.raises(ValueError, match="targets"):
        LoraConfig(rank=2, targets=("lm_head",))
    with pytest.raises(ValueError, match="rank"):
        LoraConfig(rank=0)


def test_a_7b_model_is_shaped_without_being_allocated():
    config = DecoderConfig.from_hf(QWEN2_7B)
    lora = LoraConfig(rank=8, targets=PROJECTIONS)
    shapes = jax.eval_shape(
        lambda key: init_variables(config, key, param_dtype="bfloat16", lora=lora), jax.random.key(0)
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
    assert count == 7_615_616_512
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes["params"])} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes["lora"])} == {jnp.dtype("float32")}
    policy = make_policy(config, compute_dtype="bfloat16", lora=lora)
    i32, boolean = jnp.int32, jnp.bool_
    prompts = (jax.ShapeDtypeStruct((4, 128), i32), jax.ShapeDtypeStruct((4, 128), boolean))
    completions = (jax.ShapeDtypeStruct((4, 5, 20), i32), jax.ShapeDtypeStruct((4, 5, 20), boolean))
    hidden = jax.eval_shape(policy.forward_group, shapes, *prompts, *completions)
    assert hidden.shape == (4, 5, 20, 3584) and hidden.dtype == jnp.bfloat16
    prefix = jax.eval_shape(policy.prefill, shapes, *prompts)
    cache = jax.eval_shape(lambda: policy.init_cache(4, 5, 20))
    unstacked = jax.eval_shape(policy.unstack, shapes)
    step, after = jax.eval_shape(policy.decode, unstacked, prefix, jax.ShapeDtypeStruct((4, 5), i32), cache)
    assert step.shape == (4, 5, 3584)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)


def test_misshapen_calls_are_refused(policy, variables, batch):
    with pytest.raises(ValueError, match="prompt_tokens"):
        policy.forward_group(variables, batch[0], batch[1][:, :-1], batch[2], batch[3])
    with pytest.raises(TypeError, match="its mask bool or integers, got int32 and float32"):
        policy.prefill(variables, batch[0], batch[1].astype(np.float32))
    with pytest.raises(ValueError, match="compute_dtype"):
        make_policy(CONFIG, compute_dtype="float64")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | dict(model_type="mamba"), "mamba"),
        ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size"),
        (LLAMA | dict(hidden_act="relu2"), "relu2"),
        (LLAMA | dict(hidden_size="32"), "str"),
        (LLAMA | dict(num_key_value_heads=3), "num_kv_heads"),
        (LLAMA | dict(rope_scaling=dict(type="dynamic", factor=2.0)), "dynamic"),
        (LLAMA | dict(rope_parameters=dict(rope_type="longrope")), "longrope"),
        (LLAMA | dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "low_freq_factor"),
        (LLAMA | dict(rope_scaling=dict(type="linear")), "factor"),
        (LLAMA | dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "full_attention"),
        (LLAMA | dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (LLAMA | dict(sliding_window=8), "sliding_window"),
        (LLAMA | dict(attention_dropout=0.1), "attention_dropout"),
        (LLAMA | dict(quantization_config=dict(bits=4)), "quantization_config"),
        (LLAMA | dict(logits_scaling=8.0), "logits_scaling"),
        (QWEN2 | dict(attention_bias=False), "attention_bias"),
        (QWEN2 | dict(mlp_bias=True), "mlp_bias"),
        (QWEN2 | dict(layer_types=["sliding_attention", "full_attention"]), "sliding_window"),
        (QWEN2 | dict(layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
        (QWEN2 | dict(layer_types=["full_attention"]), "layer_types"),
        (QWEN2 | dict(model_type="qwen2_vl", head_dim=16), "head_dim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_fields_are_refused_by_name(config, message):
    with pytest.raises((ValueError, TypeError), match=message):
        DecoderConfig.from_hf(config)


def test_old_and_new_forms_of_config_json_read_the_same():
    """Flat with rope_theta and rope_scaling (the hub, 2024); nested with rope_parameters (transformers 5)."""
    text = {key: value for key, value in QWEN2_7B.items() if key not in ("model_type", "rope_theta")}
    flat = text | dict(
        model_type="qwen2_vl",
        rope_theta=5e5,
        rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
        vision_config=dict(depth=32),
    )
    nested = dict(
        model_type="qwen2_vl",
        text_config=text
        | dict(
            model_type="qwen2_vl_text",
            layer_types=["full_attention"] * 28,
            rope_parameters=dict(rope_type="default", rope_theta=5e5, mrope_section=[16, 24, 24]),
        ),
        vision_config=dict(depth=32),
        tie_word_embeddings=False,
    )
    assert DecoderConfig.from_hf(flat) == DecoderConfig.from_hf(nested)
    assert DecoderConfig.from_hf(flat).rope.theta == 5e5
    assert DecoderConfig.from_hf(nested | dict(tie_word_embeddings=True)).tie_word_embeddings
    yarn = dict(factor=4.0, original_max_position_embeddings=1024)
    old = LLAMA | dict(rope_theta=1e5, rope_scaling=yarn | dict(type="yarn"))
    new = LLAMA | dict(rope_parameters=yarn | dict(rope_type="yarn", rope_theta=1e5))
    assert DecoderConfig.from_hf(old) == DecoderConfig.from_hf(new)
    assert DecoderConfig.from_hf(old).rope.attention_factor > 1
