"""The update: invariance to splits, frozen weights, and the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_update
from support.tiny_decoders import drawn
from support.tiny_update import PROMPTS, STEPS

from grpo_jax.config.sections import AlgorithmSection, TrainingSection
from grpo_jax.core.losses import EntropyControl
from grpo_jax.models.policy import Policy
from grpo_jax.training.batch import minibatches
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import init_state
from grpo_jax.training.update import make_configured_step, make_update


@pytest.fixture(scope="module")
def batch():
    return tiny_update.make_batch()


def test_minibatches_are_a_partition_with_whole_groups(batch):
    parts = minibatches(batch, 2, jax.random.key(3))
    rows = np.concatenate([part.tokens for part in parts]).reshape(PROMPTS, -1)
    assert sorted(map(tuple, rows)) == sorted(map(tuple, np.asarray(batch.tokens).reshape(PROMPTS, -1)))


def test_an_update_writes_the_new_state_where_the_old_one_lay_and_frees_what_a_checkpoint_still_writes(batch):
    """Weights and moments are donated: no second copy of them exists at any time. What NumPy views cannot be, on a CPU:
    a caller that holds the old state would keep it in memory."""
    optimizer = optax.adam(0.1)
    forward = make_forward(Policy(tiny_update.CONFIG, remat="none"), temperature=1.0)
    training = TrainingSection(prompts_per_batch=PROMPTS, grad_accumulation_steps=2)
    step = make_configured_step(forward, optimizer, AlgorithmSection(), training, max_new_tokens=STEPS)
    state = init_state(tiny_update.make_variables(), optimizer, keep_reference=False)

    def moving():
        return jax.tree.leaves((state.variables, state.opt_state))

    def places():
        return sorted(leaf.unsafe_buffer_pointer() for leaf in moving() if leaf.ndim)

    before, old = places(), moving()
    state, _ = step(state, batch)
    assert all(leaf.is_deleted() for leaf in old) and places() == before

    old = moving()
    views = [np.asarray(leaf) for leaf in old]
    written = [view.copy() for view in views]
    state, _ = step(state, batch)
    assert all(leaf.is_deleted() for leaf in old)
    step(state, batch)
    for view, expected in zip(views, written, strict=True):
        np.testing.assert_array_equal(view, expected)


def test_the_heads_gradient_is_float32_under_bfloat16(batch):
    """Against sums over tokens in float64 of the same narrow products; rounded again they are off by a thousandth."""
    config = dataclasses.replace(tiny_update.CONFIG, tie_word_embeddings=False)
    variables = drawn(config, start=config.initializer_range)
    policy, section = Policy(config, compute_dtype="bfloat16", remat="none"), AlgorithmSection(advantage="grpo")
    training, optimizer = TrainingSection(prompts_per_batch=PROMPTS), optax.sgd(1.0)
    update = make_update(policy, optimizer, section, training, temperature=1.0, max_new_tokens=STEPS)
    state, _ = update(init_state(variables, optimizer, keep_reference=False), batch, jax.random.key(2))
    head = np.asarray(variables["params"]["lm_head"])
    gradient = head - np.asarray(state.variables["params"]["lm_head"])

    def narrow(x):
        return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)

    states = np.asarray(jax.jit(policy.forward_group)(variables, *batch.read_by_policy()[:4]), np.float64)
    logits = np.einsum("pgtd,vd->pgtv", states, narrow(head))
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    mask, advantages = np.asarray(batch.mask), np.asarray(batch.advantages)
    rows = PROMPTS * tiny_update.GROUP * mask.sum(-1, keepdims=True)
    pull = np.where(mask, -advantages[..., None] / rows, 0)[..., None]
    chosen = np.eye(config.vocab_size)[np.asarray(batch.tokens)]
    expected = np.einsum("pgtv,pgtd->vd", narrow(pull * (chosen - probabilities)), states)
    error, rounding = (np.linalg.norm(x - expected) / np.linalg.norm(expected) for x in (gradient, narrow(gradient)))
    assert error < 1e-5 < 1e-3 < rounding


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.wide), 2])
def test_gradients_of_kernels_are_rounded_on_request_and_the_others_are_not(batch, parts):
    """By half of bfloat16's last bit at most; sums of micro-batches are not rounded again."""

    def gradients(grad_dtype):
        training = {"grad_dtype": grad_dtype, "grad_accumulation_steps": parts}
        start, state, report = tiny_update.updated(batch, AlgorithmSection(), **training)
        moved = jax.tree.map(np.subtract, *jax.device_get((start["params"], state.variables["params"])))
        return jax.tree_util.tree_leaves_with_path(moved), report["grad_norm"]

    (wide, norm), (narrow, narrow_norm) = gradients("float32"), gradients("bfloat16")
    assert narrow_norm == pytest.approx(norm, rel=1e-3)
    errors = {
        jax.tree_util.keystr(path): np.linalg.norm(x - y) / np.linalg.norm(x)
        for (path, x), (_, y) in zip(wide, narrow, strict=True)
    }
    rounded = {name: error for name, error in errors.items() if "kernel" in name}
    assert len(rounded) == 7 and all(5e-4 < error < 2.5e-3 for error in rounded.values()), errors
    assert all(error < 1e-6 for name, error in errors.items() if name not in rounded), errors


def test_the_entropy_coefficient_stays_after_an_update_without_tokens(batch):
    forward, optimizer = make_forward(Policy(tiny_update.CONFIG, remat="none"), temperature=1.0), optax.sgd(1.0)
    section, training = AlgorithmSection(entropy_target=100.0), TrainingSection(prompts_per_batch=PROMPTS)
    step = make_configured_step(forward, optimizer, section, training, max_new_tokens=STEPS)
    for masked, coefficient in ((False, 0.105), (True, 0.1)):
        state = init_state(tiny_update.make_variables(), optimizer, keep_reference=False)
        state = state._replace(entropy_control=EntropyControl(jnp.float32(0.1), jnp.float32(0.1)))
        state, _ = step(state, batch._replace(mask=np.asarray(batch.mask) & (not masked)))
        assert float(state.entropy_control.coef) == pytest.approx(coefficient)


def test_a_program_holds_the_model_once_however_many_micro_batches(batch):
    """As many products as without micro-batches, not twice as many."""
    forward, optimizer = make_forward(Policy(tiny_update.CONFIG, remat="none"), temperature=1.0), optax.sgd(1.0)
    state = init_state(tiny_update.make_variables(), optimizer, keep_reference=False)

    def products(grad_accumulation_steps):
        training = TrainingSection(prompts_per_batch=PROMPTS, grad_accumulation_steps=grad_accumulation_steps)
        step = make_configured_step(forward, optimizer, AlgorithmSection(), training, max_new_tokens=STEPS)
        return str(jax.make_jaxpr(step)(state, batch)).count("dot_general")

    assert products(1) == products(2) > 10
