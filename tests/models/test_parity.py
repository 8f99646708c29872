"""The decoder against transformers: logits, log-probabilities, gradients, activations, every config field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support import torch_reference as reference  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

from grpo_jax.core.losses import Clip, KLPenalty, grpo_loss  # noqa: E402
from grpo_jax.models import hf  # noqa: E402
from grpo_jax.models.layers import ACTIVATIONS  # noqa: E402
from grpo_jax.models.policy import make_policy  # noqa: E402

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
WINDOW = dict(use_sliding_window=True, sliding_window=3, max_window_layers=1)


def load(tmp_path, family, **overrides):
    """Torch model and the same weights loaded from its folder."""
    model = reference.model(family, **overrides)
    model.save_pretrained(tmp_path / "source")
    return model, hf.load_folder(tmp_path / "source", tokenizer=False)


def last_logits(loaded, tokens, mask):
    policy = make_policy(loaded.config)
    variables = {"params": loaded.params}
    return policy.logits("pd,vd->pv", jax.jit(policy.prefill)(variables, tokens, mask).hidden, policy.head(variables))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", dict(tie_word_embeddings=True)),
        ("qwen3", {}),
        ("llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)),
        pytest.param("mistral", dict(sliding_window=3, head_dim=12), marks=pytest.mark.wide),
        ("gpt2", {}),
        ("smollm3", {}),
        ("phi3", dict(sliding_window=3)),
        ("qwen3_moe", dict(norm_topk_prob=True)),
        ("gemma2", dict(tie_word_embeddings=True)),
        ("gemma3_text", dict(final_logit_softcapping=3.0, attention_bias=True)),
    ],
)
def test_logprobs_and_gradients_of_grpo_are_those_of_torch(tmp_path, family, changes):
    """One prompt shared by its group here, a copy per completion there: same losses, same gradients."""
    model, loaded = load(tmp_path, family, **changes)
    batch = reference.group_batch()
    advantages = np.random.default_rng(1).normal(size=batch[2].shape[:2]).astype(np.float32)
    noise = np.random.default_rng(2).normal(size=(2, *batch[2].shape)).astype(np.float32) * 0.3

    expected_logits = reference.completion_logits(model, batch)
    logprobs, loss = reference.grpo(expected_logits, batch, advantages, noise)
    old, ref = (logprobs.detach().numpy() + n for n in noise)
    policy = make_policy(loaded.config)

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


FIELDS = [
    ("qwen2", dict(rope_parameters=dict(rope_type="default", rope_theta=100.0))),
    ("qwen2", WINDOW),
    ("qwen2", WINDOW | dict(layer_types=["sliding_attention", "full_attention"])),
    ("qwen2", dict(rms_norm_eps=0.5)),
    ("qwen2", dict(num_key_value_heads=4)),
    ("qwen3", dict(head_dim=8)),
    ("llama", dict(head_dim=12)),
    ("llama", dict(hidden_act="gelu_pytorch_tanh")),
    ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    ("llama", dict(rope_parameters=YARN | dict(attention_factor=0.5, beta_fast=2.0, truncate=False))),
    ("llama", dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.5))),
    ("mistral", dict(sliding_window=3)),
    ("smollm3", dict(no_rope_layers=None, no_rope_layer_interval=2, mlp_bias=True)),
    ("smollm3", dict(layer_types=["full_attention", "sliding_attention"], attention_bias=True)),
    ("phi3", dict(rope_parameters=reference.LONGROPE | SU)),
    ("qwen3_moe", dict(num_experts_per_tok=3, use_sliding_window=True, sliding_window=3)),
    ("gemma2", dict(final_logit_softcapping=None, query_pre_attn_scalar=100, hidden_activation="silu")),
    ("gemma3_text", dict(rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_theta=1e3)))),
    ("qwen2_vl", dict(rope_parameters=YARN | dict(mrope_section=[1, 1, 2]))),
    ("gpt2", dict(layer_norm_epsilon=0.5)),
    ("gpt2", dict(scale_attn_weights=False)),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False)),
]

# The same for another family, or of a field that the gradients above have too.
MORE = [
    ("qwen3", dict(attention_bias=True)),
    ("qwen3", WINDOW),
    ("qwen3", dict(num_hidden_layers=1)),
    ("llama", dict(attention_bias=True)),
    ("llama", dict(mlp_bias=True)),
    ("llama", dict(hidden_act="gelu")),
    ("llama", dict(hidden_act="relu")),
    ("llama", dict(tie_word_embeddings=True)),
    ("llama", dict(rope_parameters=YARN)),
    ("mistral", dict(sliding_window=None, num_key_value_heads=4)),
    ("phi3", dict(rope_parameters=None, sliding_window=3, tie_word_embeddings=True)),
    ("gemma2", dict(attn_logit_softcapping=None, layer_types=["full_attention", "sliding_attention"])),
    ("gpt2", dict(n_inner=None)),
    ("gpt2", dict(activation_function="relu")),
]


@pytest.mark.parametrize(
    ("family", "change"),
    [*FIELDS, *(pytest.param(*more, marks=pytest.mark.wide) for more in MORE)],
    ids=lambda v: v if isinstance(v, str) else "-".join(v),
)
def test_a_field_of_config_json_is_honoured(tmp_path, family, change):
    """Changing a field changes the logits, and to what transformers computes."""
    tokens, mask = reference.unshared(*reference.group_batch(length=9))
    tokens, mask = tokens[:, :12], mask[:, :12]
    mask[:, 9:] = True
    model, loaded = load(tmp_path, family, **change)
    got = last_logits(loaded, tokens, mask)
    with torch.no_grad():
        np.testing.assert_allclose(got, reference.logits(model, tokens, mask)[:, -1], atol=1e-4)
        default = reference.logits(reference.model(family), tokens, mask)[:, -1].numpy()
    assert np.abs(np.asarray(got) - default).max() > 1e-2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_logits_of_other_vision_models(tmp_path, family):
    tokens, mask = reference.unshared(*reference.group_batch())
    mask[:, 6:] = True
    model, loaded = load(tmp_path, family)
    with torch.no_grad():
        expected = reference.logits(model, tokens, mask)[:, -1]
    np.testing.assert_allclose(last_logits(loaded, tokens, mask), expected, atol=1e-4)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_is_that_of_transformers(name):
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), ACT2FN[name](torch.tensor(x)), atol=1e-6)
