"""The decoder against itself: sharing, caching, padding, adapters, shapes, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_decoders import (
    CONFIGS,
    GROUP,
    LENGTH,
    LLAMA,
    ONE_HEAD,
    PROMPTS,
    STEPS,
    WIDTH,
    Tiny,
    drawn,
    group_batch,
    tiny,
)

from grpo_jax.models.policy import Policy
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams

BATCH = group_batch()


@pytest.fixture(scope="module")
def model(request) -> Tiny:
    return tiny(getattr(request, "param", "llama"))


each_architecture = pytest.mark.parametrize("model", CONFIGS, indirect=True)
each_cache = pytest.mark.parametrize("model", [*CONFIGS, pytest.param(ONE_HEAD, marks=pytest.mark.wide)], indirect=True)


@each_cache
def test_cached_decoding_equals_the_full_forward(model):
    """With adapters, left padding, a window (Llama) or a scale of its own in each layer (GPT-2)."""
    policy, variables = model.policy, model.variables
    prompt_tokens, prompt_mask, tokens, _ = BATCH
    forward, prefill, decode = map(jax.jit, (policy.forward_group, policy.prefill, policy.decode_step))
    full = np.asarray(forward(variables, prompt_tokens, prompt_mask, tokens, np.ones(tokens.shape, bool)))
    prefix, unstacked = prefill(variables, prompt_tokens, prompt_mask), policy.unstack(variables)
    # One slot more than is used, holding rubbish: slots that are not written are not read.
    cache = jax.tree.map(lambda x: x + 7 if x.ndim else x, policy.init_cache(PROMPTS, GROUP, STEPS + 1))
    np.testing.assert_allclose(full[:, :, 0], np.repeat(np.asarray(prefix.hidden)[:, None], GROUP, 1), atol=1e-4)
    for step in range(STEPS - 1):
        hidden, cache = decode(unstacked, prefix, jnp.asarray(tokens[:, :, step]), cache)
        np.testing.assert_allclose(hidden, full[:, :, step + 1], atol=1e-4)
    assert int(cache.length) == STEPS - 1


@each_cache
def test_a_prompt_is_stored_once(model):
    """The group axis is in the completions' cache and nowhere in the prompts' keys and values."""
    prefix = jax.eval_shape(model.policy.prefill, model.variables, *BATCH[:2])
    heads, size = model.config.num_kv_heads, model.config.head_dim
    assert [x.shape for x in prefix.keys] == [(PROMPTS, heads, size, LENGTH)] * 2
    assert [x.shape for x in prefix.values] == [(PROMPTS, heads, LENGTH, size)] * 2
    cache = model.policy.init_cache(PROMPTS, GROUP, STEPS)
    assert [x.shape for x in cache.keys] == [(PROMPTS, heads, GROUP, size, STEPS)] * 2
    assert [x.shape for x in cache.values] == [(PROMPTS, heads, GROUP, STEPS, size)] * 2
    assert model.policy.init_cache(1, 1, 1, jnp.bfloat16).values[0].dtype == jnp.bfloat16


@each_architecture
def test_padding_has_no_influence(model):
    """More padding on the left, other tokens under the masks (even impossible ones), masks of integers: same states."""
    prompt_tokens, prompt_mask, tokens, mask = BATCH
    forward = jax.jit(model.policy.forward_group)
    expected = np.asarray(forward(model.variables, *BATCH))
    wide = (np.pad(prompt_tokens, ((0, 0), (3, 0))), np.pad(prompt_mask, ((0, 0), (3, 0))))
    wild = np.where(wide[1], wide[0], -5), wide[1], np.where(mask, tokens, 10**6).astype(np.int32), mask
    got = np.asarray(forward(model.variables, *(x.astype(np.int32) for x in wild)))
    np.testing.assert_allclose(got[mask], expected[mask], atol=1e-4)


@pytest.fixture(scope="module")
def states_and_gradients(model):
    """(batch, cotangent [P, G, T, D]) -> hidden, gradient; compiled once for several tests."""

    @jax.jit
    def run(variables, batch, cotangent):
        hidden, pull = jax.vjp(lambda v: model.policy.forward_group(v, *batch), variables)
        return hidden, pull(cotangent)[0]

    return lambda *arguments: run(model.variables, *arguments)


def test_sharing_changes_neither_states_nor_gradients(states_and_gradients):
    """Against P·G groups of one, every completion behind a prompt of its own."""
    cotangent = np.random.default_rng(1).normal(size=(PROMPTS, GROUP, STEPS, WIDTH)).astype(np.float32)
    mask = BATCH[3]
    cotangent = cotangent * mask[..., None]
    prompts = (np.repeat(x, GROUP, axis=0) for x in BATCH[:2])
    copies = (*prompts, *(x.reshape(-1, 1, STEPS) for x in BATCH[2:]))
    hidden, shared = states_and_gradients(BATCH, cotangent)
    expected, copied = states_and_gradients(copies, cotangent.reshape(-1, 1, STEPS, WIDTH))
    np.testing.assert_allclose(hidden[mask], expected.reshape(hidden.shape)[mask], atol=1e-5)
    for got, expected in zip(jax.tree.leaves(shared), jax.tree.leaves(copied), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5 * max(1.0, np.abs(expected).max()))
    assert np.abs(shared["lora"]["layers"]["q_proj"]["a"]).max() > 0


def test_an_empty_prompt_stays_finite(states_and_gradients):
    """Rows that only fill up a batch must not spread NaN through shared sums."""
    prompt_mask = BATCH[1].copy()
    prompt_mask[0] = False
    cotangent = np.ones((PROMPTS, GROUP, STEPS, WIDTH), np.float32)
    cotangent[0] = 0
    hidden, grads = states_and_gradients((BATCH[0], prompt_mask, *BATCH[2:]), cotangent)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((hidden, grads)))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"matmul_precision": "bfloat16"}),
        pytest.param("gpt2", {"compute_dtype": "bfloat16"}, marks=pytest.mark.wide),
    ],
    indirect=["model"],
)
def test_bfloat16_products_on_a_cpu(model, options):
    """Log-probabilities and gradients stay near those of float32, and sampler and update agree on a text."""
    policy = Policy(model.config, lora=model.lora, platform="cpu", **options)
    sample = make_sampler(policy, SamplingParams(GROUP, STEPS), eos_ids=(1,), pad_id=0)
    samples = sample(model.variables, *BATCH[:2], jax.random.split(jax.random.key(0), PROMPTS))
    batch = (*BATCH[:2], samples.tokens, samples.mask)

    def total(variables, policy):
        hidden = policy.forward_group(variables, *batch)
        logprobs = policy.token_logprobs(variables, hidden, samples.tokens)[0] * samples.mask
        return logprobs.sum(), logprobs

    run = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    exact, expected = run(model.variables, model.policy)
    grads, logprobs = run(model.variables, policy)
    np.testing.assert_allclose(logprobs, expected, atol=0.1)
    np.testing.assert_allclose(samples.logprobs, logprobs, atol=0.02)
    assert np.abs(logprobs - expected).max() > 0
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert got.dtype == jnp.float32
        assert np.linalg.norm(got - wanted) < 0.05 * np.linalg.norm(wanted)
    for precision in (None, "highest"):  # in full elsewhere
        assert Policy(model.config, platform="cpu", matmul_precision=precision).products == ""
    assert Policy(model.config, platform="tpu", **options).products == ""
    assert Policy(model.config, platform="cuda", **options).products == "apart"


@pytest.mark.parametrize(("dtype", "given", "highest"), [("float32", None, True), ("bfloat16", None, False)])
def test_every_product_of_the_policy_has_its_precision(dtype, given, highest):
    """In sampler, pass forward and gradient, as lowered: float32 would else be rounded to TF32 on a GPU."""
    policy = Policy(LLAMA, compute_dtype=dtype, matmul_precision=given)
    sample = make_sampler(policy, SamplingParams(GROUP, STEPS), eos_ids=(1,), pad_id=0)
    keys = jax.random.split(jax.random.key(0), PROMPTS)

    def total(variables):
        return policy.token_logprobs(variables, policy.forward_group(variables, *BATCH), BATCH[2])[0].sum()

    for program in (jax.grad(total), lambda variables: sample(variables, *BATCH[:2], keys)):
        text = jax.jit(program).lower(drawn(LLAMA)).as_text()
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(products) > 10 and {"HIGHEST" in line for line in products} == {highest}
