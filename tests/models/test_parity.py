"""The decoder against transformers: logits, log-probabilities, gradients, activations, every config field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support import torch_reference as reference  # noqa: E402
from support.folders import load_folder  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

from grpo_jax.core.losses import Clip, KLPenalty, grpo_loss  # noqa: E402
from grpo_jax.models.layers import ACTIVATIONS  # noqa: E402
from grpo_jax.models.policy import Policy  # noqa: E402

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
SU = dict(rope_type="su", attention_factor=2.0, original_max_position_embeddings=32)
THETA = dict(rope_parameters=dict(rope_type="default", rope_theta=100.0))
WINDOW = dict(use_sliding_window=True, sliding_window=3, max_window_layers=1)


def load(tmp_path, architecture, **overrides):
    """Torch model and the same weights loaded from its folder."""
    model = reference.model(architecture, **overrides)
    model.save_pretrained(tmp_path / "source")
    return model, load_folder(tmp_path / "source", tokenizer=False)


# For each architecture the changes of config.json, each of which alone changes what the model computes.
TRAINED = [
    ("qwen2", [dict(tie_word_embeddings=True), dict(rms_norm_eps=0.5), dict(num_key_value_heads=4), THETA, WINDOW]),
    ("qwen3", [dict(head_dim=8), WINDOW | dict(layer_types=["sliding_attention", "full_attention"])]),
    (
        "llama",
        [
            dict(attention_bias=True),
            dict(mlp_bias=True),
            dict(head_dim=12),
            dict(hidden_act="gelu_pytorch_tanh"),
            dict(rope_parameters=LLAMA3),
        ],
    ),
    ("gpt2", [dict(layer_norm_epsilon=0.5)]),
    ("smollm3", [dict(no_rope_layers=None, no_rope_layer_interval=2), dict(mlp_bias=True), dict(attention_bias=True)]),
    ("olmo2", [dict(attention_bias=True), dict(rms_norm_eps=0.5), THETA]),
    ("phi3", [dict(sliding_window=3), dict(rope_parameters=reference.LONGROPE | SU)]),
    ("gemma2", [dict(query_pre_attn_scalar=100), dict(hidden_activation="silu")]),
    (
        "gemma3_text",
        [
            dict(final_logit_softcapping=3.0),
            dict(attention_bias=True),
            dict(rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_theta=1e3))),
        ],
    ),
]


def merged(changes):
    return {name: value for change in changes for name, value in change.items()}


def assert_each_matters(architecture, changes, batch, expected):
    """Without any one of the changes torch's logits are others."""
    for i in range(len(changes)):
        with torch.no_grad():
            other = reference.model(architecture, **merged(changes[:i] + changes[i + 1 :]))
            logits = reference.completion_logits(other, batch)
        assert (logits - expected).abs().numpy()[batch[3]].max() > 1e-2, changes[i]


@pytest.mark.parametrize(("architecture", "changes"), TRAINED)
def test_logprobs_and_gradients_of_grpo_are_those_of_torch(tmp_path, architecture, changes):
    """One prompt shared by its group here, a copy per completion there: same losses, same gradients."""
    model, loaded = load(tmp_path, architecture, **merged(changes))
    batch = reference.group_batch()
    advantages = np.random.default_rng(1).normal(size=batch[2].shape[:2]).astype(np.float32)
    noise = np.random.default_rng(2).normal(size=(2, *batch[2].shape)).astype(np.float32) * 0.3

    expected_logits = reference.completion_logits(model, batch)
    assert_each_matters(architecture, changes, batch, expected_logits.detach())
    logprobs, loss = reference.grpo(expected_logits, batch, advantages, noise)
    old, ref = (logprobs.detach().numpy() + n for n in noise)
    policy = Policy(loaded.config)

    def objective(params):
        variables = {"params": params}
        hidden = policy.forward_group(variables, *batch)
        got, _ = policy.token_logprobs(variables, hidden, jnp.asarray(batch[2]), temperature=0.8)
        surrogate, kl = Clip(low=0.2, high=0.3), KLPenalty(0.1)
        value, _ = grpo_loss(got, old, advantages, batch[3], surrogate=surrogate, kl=kl, ref_logprobs=ref)
        return value, (got, policy.logits("pgtd,vd->pgtv", hidden, policy.head(variables)))

    (value, (got, logits)), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(loaded.params)
    mask = batch[3]
    np.testing.assert_allclose(logits[mask], expected_logits.detach().numpy()[mask], atol=1e-4)
    np.testing.assert_allclose(got[mask], logprobs.detach().numpy()[mask], atol=1e-4)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-4)
    reference.assert_gradients_agree(model, loaded.config, grads)


# What cannot stand beside the changes above.
PREFILLED = [
    ("llama", [dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))]),
    ("llama", [dict(rope_parameters=YARN | dict(attention_factor=0.5, beta_fast=2.0))]),
    ("mistral", [dict(sliding_window=3)]),
    ("smollm3", [dict(layer_types=["full_attention", "sliding_attention"])]),
    ("gemma2", [dict(final_logit_softcapping=None)]),
    ("gpt2", [dict(tie_word_embeddings=False)]),
    ("qwen2_vl", [dict(rope_parameters=YARN | dict(mrope_section=[1, 1, 2]))]),
]


@pytest.mark.parametrize(("architecture", "changes"), PREFILLED)
def test_fields_of_config_json_are_honoured(tmp_path, architecture, changes):
    """Each changes the logits, and together they are what transformers computes."""
    batch = reference.group_batch(length=9)
    model, loaded = load(tmp_path, architecture, **merged(changes))
    with torch.no_grad():
        expected = reference.completion_logits(model, batch)
    assert_each_matters(architecture, changes, batch, expected)
    tokens, mask = reference.unshared(*batch)
    policy, variables = Policy(loaded.config), {"params": loaded.params}
    states = jax.jit(policy.prefill)(variables, tokens[:, :10], mask[:, :10]).hidden
    got = policy.logits("pd,vd->pv", states, policy.head(variables))
    np.testing.assert_allclose(got, expected[:, :, 1].reshape(got.shape), atol=1e-4)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_is_that_of_transformers(name):
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), ACT2FN[name](torch.tensor(x)), atol=1e-6)
