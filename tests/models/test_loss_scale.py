"""float16: the scaled loss gives the same update, an overflow leaves everything but the scale as it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_update

from grpo_jax.config.sections import AlgorithmSection
from grpo_jax.core import losses
from grpo_jax.models.policy import Policy
from grpo_jax.models.variables import make_loss_scale
from grpo_jax.training.objectives import loss_options, make_forward, make_policy_objective
from grpo_jax.training.state import init_state, restored_state, saved_parts
from grpo_jax.training.update import make_train_step


@functools.cache
def make_step(dtype, grad_accumulation_steps, shrink):
    """A compiled step of plain gradient descent, for all tests that take such a one."""
    forward = make_forward(Policy(tiny_update.CONFIG, compute_dtype=dtype), temperature=tiny_update.TEMPERATURE)
    inner = make_policy_objective(forward, loss_options(AlgorithmSection(), max_new_tokens=tiny_update.STEPS))

    def objective(variables, batch, normaliser):
        loss, metrics = inner(variables, batch, normaliser)
        return loss * shrink, metrics

    return make_train_step(
        objective,
        optax.sgd(1.0),
        normaliser=lambda batch: losses.loss_normaliser(batch.mask, "sequence"),
        grad_accumulation_steps=grad_accumulation_steps,
    )


def stepped(batch, dtype, *, scale, grad_accumulation_steps=1, shrink=1.0):
    """The start, the state after one step, the report."""
    variables = tiny_update.make_variables()
    state = init_state(variables, optax.sgd(1.0), keep_reference=False, loss_scale=scale)
    return variables, *make_step(dtype, grad_accumulation_steps, shrink)(state, batch)


def moves(before, after):
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after.variables), strict=True)
    return np.concatenate([np.ravel(np.asarray(new, np.float64) - np.asarray(old)) for old, new in pairs])


@pytest.fixture(scope="module")
def batch():
    return tiny_update.make_batch()


def test_gradients_too_small_for_float16_survive(batch):
    """A loss a millionth of its size: without the scale half of the gradients are lost on the way."""
    exact = moves(*stepped(batch, "float32", scale=make_loss_scale("float16"))[:2])
    shrink = 2.0**-20
    scaled = moves(*stepped(batch, "float16", scale=make_loss_scale("float16"), shrink=shrink)[:2]) / shrink
    plain = moves(*stepped(batch, "float16", scale=None, shrink=shrink)[:2]) / shrink
    error, lost = (np.linalg.norm(found - exact) / np.linalg.norm(exact) for found in (scaled, plain))
    assert error < 0.05 < lost


def test_splitting_a_batch_changes_neither_update_nor_scale(batch):
    scale = make_loss_scale("float16")
    before, whole, _ = stepped(batch, "float32", scale=scale)
    _, split, _ = stepped(batch, "float32", scale=scale, grad_accumulation_steps=4)
    np.testing.assert_allclose(moves(before, split), moves(before, whole), atol=2e-6)
    assert whole.loss_scale == split.loss_scale == scale.replace(fin_steps=1)


@pytest.mark.parametrize("grad_accumulation_steps", [1, 4])
def test_an_overflow_changes_nothing_but_the_scale(batch, grad_accumulation_steps):
    """One prompt of four overflows; with micro-batches the other three are finite."""
    wild = batch._replace(advantages=batch.advantages.at[2].set(1e38))
    before, after, report = stepped(
        wild, "float32", scale=make_loss_scale("float16"), grad_accumulation_steps=grad_accumulation_steps
    )
    assert not np.isfinite(report["grad_norm"])
    assert not moves(before, after).any() and int(after.step) == 0
    assert float(after.loss_scale.scale) == 2**15 and int(after.loss_scale.fin_steps) == 0


def test_a_checkpoint_holds_the_scale():
    state = init_state(
        {"params": {"w": jnp.ones(2)}}, optax.sgd(1.0), keep_reference=False, loss_scale=make_loss_scale("float16")
    )
    restored = restored_state(saved_parts(state), {"params": {"w": jnp.ones(2)}})
    assert float(restored.loss_scale.scale) == 2**16 and len(jax.tree.leaves(saved_parts(state)["loss_scale"])) == 2
