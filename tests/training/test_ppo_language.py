"""PPO for language: estimates by hand, one loss for trunk and head, and a run that learns and resumes."""

import jax
import numpy as np
import pytest
from support import tiny_update
from support.compiled import compiled
from support.tiny_update import CONFIG, GROUP, PROMPTS, STEPS, TEMPERATURE

from grpo_jax.config.sections import AlgorithmSection, PPOSection
from grpo_jax.core.ppo import ppo_loss
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.policy import Policy
from grpo_jax.models.variables import VALUE, init_value_head
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import loss_options, make_estimates, make_forward, make_policy_objective
from grpo_jax.training.state import reference_variables, refresh_reference, restored_state, saved_parts

SECTION = AlgorithmSection(preset="bnpo", advantage="gae", entropy_coef=0.05)
PPO = PPOSection(kl_coef=0.1, value_coef=0.5)


@pytest.fixture(scope="module")
def batch():
    scores = np.random.default_rng(5).normal(size=(PROMPTS, GROUP)).astype(np.float32)
    return tiny_update.make_batch()._replace(advantages=None, scores=scores)


def two_tokens(scores, mask, ref=((-1.5, -1.0),)):
    return Batch(
        np.zeros((1, 1), np.int32),
        np.ones((1, 1), bool),
        np.zeros((1, 1, 2), np.int32),
        np.array([[mask]]),
        scores=np.float32([[scores]]),
        old_logprobs=np.float32([[[-1.0, -2.0]]]),
        ref_logprobs=np.float32([ref]),
    )


def test_two_tokens_by_hand():
    """r = (-β·0.5, 1 + β·1); δ1 = r1 - V1; δ0 = r0 + γ V1 - V0; A0 = δ0 + γλ δ1."""
    estimate = make_estimates(PPOSection(gamma=0.9, gae_lambda=0.8, kl_coef=0.2))
    values = np.float32([[[0.3, 0.7]]])
    done, measured = estimate(two_tokens(1.0, (True, True)), values)
    first, second = -0.2 * 0.5, 1.0 + 0.2 * 1.0
    last = second - 0.7
    expected = [first + 0.9 * 0.7 - 0.3 + 0.9 * 0.8 * last, last]
    whitened = (expected - np.mean(expected)) / (np.std(expected, ddof=1) + 1e-4)
    np.testing.assert_allclose(done.advantages[0, 0], whitened, rtol=1e-5)
    np.testing.assert_allclose(done.returns[0, 0], np.add(expected, [0.3, 0.7]), rtol=1e-6)
    np.testing.assert_allclose(measured.completion_kl, 0.5 - 1.0, rtol=1e-6)
    np.testing.assert_allclose(measured.advantages, 0, atol=1e-6)
    assert done.scores is None


def test_values_of_a_short_row_end_with_it():
    """The score comes at the last token there is, and the value of the padding's state is nobody's."""
    estimate = make_estimates(PPOSection(gamma=0.9, gae_lambda=0.8, kl_coef=0.2))
    values = np.float32([[[0.3, np.nan]]])
    done, _ = estimate(two_tokens(1.0, (True, False), ref=((-1.5, np.nan),)), values)
    np.testing.assert_allclose(done.returns[0, 0], [1.0 - 0.2 * 0.5, 0.0], rtol=1e-6)


def test_advantages_are_whitened_and_the_values_targets_are_not(batch):
    values = np.random.default_rng(1).normal(size=batch.mask.shape).astype(np.float32)
    batch = batch._replace(old_logprobs=values - 2)
    white, measured = make_estimates(PPOSection())(batch, values)
    mask, returns = np.asarray(batch.mask), np.asarray(white.returns)
    tokens, before = np.asarray(white.advantages)[mask], (returns - values)[mask]
    assert abs(tokens.mean()) < 1e-6 and tokens.std(ddof=1) == pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(np.corrcoef(tokens, before)[0, 1], 1, rtol=1e-5)
    target = returns[mask]
    assert measured.explained_variance == pytest.approx(1 - before.var() / target.var(), rel=1e-4)


def updated(batch, **others):
    return tiny_update.updated(batch, SECTION, ppo=PPO, **others)


def test_accumulation_gives_the_gradient_of_the_whole_batch_which_moves_policy_and_head(batch):
    variables, state, report = updated(batch)
    _, split, split_report = updated(batch, grad_accumulation_steps=4)
    for a, b in zip(jax.tree.leaves(state.variables), jax.tree.leaves(split.variables), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)
    assert split_report["grad_norm"] == pytest.approx(report["grad_norm"], rel=1e-4)
    for part in ("policy", "value"):
        for a, b in zip(report["metrics"][part], split_report["metrics"][part], strict=True):
            np.testing.assert_allclose(a.value(), b.value(), atol=1e-5)
    assert state.step == 1 and set(state.variables) == {"params", VALUE}
    moved = jax.tree.map(lambda a, b: (np.asarray(a) != np.asarray(b)).any(), state.variables, variables)
    assert all(jax.tree.leaves(moved)) and report["metrics"]["value"].loss.value() > 0
    assert set(reference_variables(state)) == {"params"}
    assert set(saved_parts(state)["variables"]) == {"params", VALUE}


def test_the_value_loss_reaches_head_and_trunk(batch):
    """With advantages of 0 the policy loss has no gradient: what is left is the values'."""
    forward = make_forward(Policy(CONFIG, remat="none"), temperature=TEMPERATURE)
    options = loss_options(AlgorithmSection(preset="bnpo", advantage="gae"), max_new_tokens=STEPS)
    ones = np.ones(batch.mask.shape, np.float32)
    flat = batch._replace(scores=None, advantages=0 * ones, returns=ones, old_values=ones, old_logprobs=-ones)
    objective = make_policy_objective(forward, options, PPOSection(value_coef=1.0))
    gradient = jax.jit(jax.grad(lambda v: objective(v, flat, None)[0]))
    variables = tiny_update.make_variables(value=True)
    grads = gradient(variables)
    assert float(np.abs(grads[VALUE]["kernel"]).max()) > 0 and float(grads[VALUE]["bias"]) != 0
    assert all(float(np.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads["params"]["layers"]))
    # a head of zeros learns, and hands nothing down yet: the first update leaves the trunk to the policy
    start = {**variables, VALUE: init_value_head(CONFIG.hidden_size)}
    grads = gradient(start)
    assert float(np.abs(grads[VALUE]["kernel"]).max()) > 0
    assert not any(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads["params"]))


def test_preset_bnpo_is_ppo(batch):
    """The policy's part is `ppo_loss`, the value's half the mean squared error where nothing is clipped."""
    forward = make_forward(Policy(CONFIG, remat="none"), temperature=TEMPERATURE)
    variables = tiny_update.make_variables(value=True)
    seen = jax.device_get(jax.jit(forward)(variables, batch))
    batch = batch._replace(
        advantages=np.random.default_rng(3).normal(size=batch.mask.shape).astype(np.float32), scores=None,
        old_logprobs=seen.logprobs - np.float32(0.3), old_values=seen.values, returns=seen.values + np.float32(2),
    )  # fmt: skip
    objective = make_policy_objective(forward, loss_options(SECTION, max_new_tokens=STEPS), PPO)
    loss = jax.jit(lambda *given: objective(*given, None)[0])(variables, batch)
    policy, _ = compiled(ppo_loss)(
        seen.logprobs, batch.old_logprobs, batch.advantages, batch.mask, entropy=seen.entropy, entropy_coef=0.05
    )
    assert float(loss) == pytest.approx(float(policy) + 0.5 * 0.5 * 2.0**2, rel=1e-5)


def test_only_adapters_and_head_are_trained(batch):
    lora = LoraConfig(2, 4.0, ("q_proj", "v_proj"))
    variables, state, _ = updated(batch, lora=lora)
    assert jax.tree.leaves(state.variables["params"])[0] is jax.tree.leaves(variables["params"])[0]
    assert set(saved_parts(state)["variables"]) == {"lora", VALUE}
    assert set(reference_variables(state)) == {"params"}
    assert not np.array_equal(state.variables[VALUE]["kernel"], variables[VALUE]["kernel"])
    assert reference_variables(refresh_reference(state)).keys() == {"params", "lora"}
    restored = restored_state(saved_parts(state), variables)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
