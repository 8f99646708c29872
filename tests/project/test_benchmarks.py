"""The PyTorch peer of the CartPole benchmark is the same algorithm: rollout, loss and gradient are equal."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from grpo_jax.cartpole import training
from grpo_jax.cartpole.environment import Steps
from grpo_jax.cartpole.settings import MAX_STEPS, SETTINGS, Settings
from grpo_jax.models.layers import make_mlp

pytestmark = pytest.mark.wide  # of a benchmark alone
TOLERANCE = 1e-5
HIDDEN = [16]
SGD = optax.sgd(1.0)  # the parameters it takes off are the gradient


def load_peer():
    path = Path(__file__).parents[2] / "benchmarks" / "cartpole_torch.py"
    spec = importlib.util.spec_from_file_location("cartpole_torch", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["cartpole_torch"] = module
    spec.loader.exec_module(module)
    return module


peer = load_peer()


def network(seed: int, gain: float):
    """Our parameters, and a PyTorch network that holds them."""
    ours = make_mlp(4, hidden=HIDDEN, output_scale=gain)
    params = ours.init(jax.random.key(seed))
    return ours, params, filled(peer.make_network(HIDDEN, gain), params)


def filled(theirs, params):
    """The PyTorch network with our parameters."""
    linear = [layer for layer in theirs if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        for index, layer in enumerate(linear):
            layer.weight.copy_(torch.from_numpy(np.array(params[f"Dense_{index}"]["kernel"]).T))
            layer.bias.copy_(torch.from_numpy(np.array(params[f"Dense_{index}"]["bias"])))
    return theirs


def gradients(theirs) -> dict:
    """PyTorch's gradients under our names."""
    linear = [layer for layer in theirs if isinstance(layer, torch.nn.Linear)]
    return {
        f"Dense_{index}": {"kernel": layer.weight.grad.numpy().T, "bias": layer.bias.grad.numpy()}
        for index, layer in enumerate(linear)
    }


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE), actual, expected)


def step_down(before, after):
    return jax.tree.map(lambda a, b: np.asarray(a - b), before, after)


def play(seed: int, policy, count: int):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    carts = peer.Carts(count, rng)
    starts = np.repeat(peer.starts(rng, 2), count // 2, axis=0)
    return peer.play_episodes(carts, policy, starts)


def padded(array: np.ndarray) -> np.ndarray:
    return np.pad(array, [(0, MAX_STEPS - len(array))] + [(0, 0)] * (array.ndim - 1))


def test_the_group_algorithm_has_our_loss_and_gradient():
    settings = Settings(epochs=1, group_size=4)
    _, _, old = network(1, 1.0)
    ours, params, theirs = network(2, 1.0)
    steps = play(5, old, 8)
    batch = peer.group_batch(steps, old, settings)
    loss = peer.policy_loss(theirs, batch, settings)
    loss.backward()

    mask = padded(steps.mask)
    grouped = jnp.asarray(mask.T.reshape(2, 4, MAX_STEPS))
    rewards = jnp.where(grouped, 1.0, 0.0)[..., None]
    advantages, _ = training.group_step_advantages(settings, rewards, grouped)
    advantages = advantages.reshape(8, MAX_STEPS).T
    assert_close(np.asarray(advantages)[mask], batch.advantages.numpy())
    old_logprobs = np.zeros(mask.shape, np.float32)
    old_logprobs[mask] = batch.old_logprobs.numpy()
    observations, actions = padded(steps.observations), padded(steps.actions) == 1
    given = training.Batch(*map(jnp.asarray, (observations, actions, old_logprobs, advantages, mask)))
    start = {"policy": params}
    (after, _), figures = training.group_updates(settings, ours.apply, SGD, (start, SGD.init(start)), given)

    assert abs(figures["mean_ratio"] - 1) > 1e-3  # the policy has moved, so that ratio, clip and KL take part
    assert figures["clip_low"] + figures["clip_high"] > 0.01
    assert float(figures["loss"]) == pytest.approx(loss.item(), abs=TOLERANCE)
    assert_close(step_down(params, after["policy"]), gradients(theirs))


def test_ppo_has_our_loss_and_gradient(monkeypatch):
    monkeypatch.setattr(training, "MINIBATCHES", 1)
    settings = replace(SETTINGS["ppo"], epochs=1)
    _, _, old = network(1, 1.0)
    ours, params, policy = network(2, 1.0)
    critic, value_params, value = network(3, 1.0)
    _, moved, _ = network(4, 1.0)
    learner = peer.Learner(settings, 0)
    steps, _ = peer.play_steps(learner.carts, old, learner.observations, 60)
    assert steps.terminated.sum() > 3
    steps.truncated[20] = ~steps.terminated[20]  # time limits too
    batch = peer.value_batch(steps, old, value, settings)

    odds = old(torch.from_numpy(steps.observations))[..., 0].detach().numpy()
    lengths = np.ones(steps.mask.shape, np.int32)
    ends = (steps.terminated, steps.truncated, lengths)
    played = Steps(*map(jnp.asarray, (steps.observations, steps.actions == 1, odds, steps.following, *ends)))
    given, _ = training.step_batch(settings, critic.apply, {"value": value_params}, played)
    assert_close(np.ravel(given.advantages), batch.advantages.numpy().ravel())
    assert_close(np.ravel(given.returns), batch.returns.numpy().ravel())
    assert_close(np.ravel(given.old_logprobs), batch.old_logprobs.numpy().ravel())

    # Networks that have moved since: another policy, and values a little elsewhere.
    value_params = jax.tree.map(lambda a, b: a + 0.05 * b, value_params, moved)
    learner.policy, learner.value = policy, filled(value, value_params)
    loss = learner.loss(batch)
    loss.backward()
    start = {"policy": params, "value": value_params}
    (after, _), figures = training.step_updates(
        settings, ours.apply, SGD, (start, SGD.init(start)), given, jax.random.key(0)
    )
    assert float(figures["loss"]) == pytest.approx(loss.item(), abs=TOLERANCE)
    assert_close(step_down(params, after["policy"]), gradients(policy))
    assert_close(step_down(value_params, after["value"]), gradients(value))
