"""The one-file loop gives the trainer's results."""

import jax
import numpy as np
import optax
import pytest
from support.imports import ROOT

from grpo_jax import load_policy
from grpo_jax.config.named import load_module
from grpo_jax.config.sections import AlgorithmSection, NewPolicySection, TrainingSection
from grpo_jax.models.random_init import write_policy
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.training.batch import make_batch
from grpo_jax.training.estimators import make_objectives
from grpo_jax.training.state import init_state
from grpo_jax.training.update import make_update

PATH = ROOT / "examples" / "own_loop.py"
loop = load_module(str(PATH))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy of nine tokens, of which one ends a text: the shorter, the better."""
    folder = tmp_path_factory.mktemp("own_loop")
    return write_policy(
        folder, ["water", "iron", "cloud", "bread", "falls"], NewPolicySection(width=16, layers=1, heads=2)
    )


def test_its_step_is_the_trainers(folder, monkeypatch):
    """By plain gradient descent at rate 1, of which the step is the gradient, on the batch that the loop drew."""
    monkeypatch.setattr(optax, "adamw", optax.sgd)
    run = loop.train(folder, steps=2, group_size=6, max_new_tokens=24, rate=1.0)
    value, mean = next(run)
    seen = dict(run.gi_frame.f_locals)  # as the loop left them when it told of its first step
    samples, rewards = jax.device_get((seen["samples"], seen["rewards"]))
    assert rewards.shape == (4, 6) and mean == pytest.approx(rewards.mean())
    assert (rewards.std(axis=1) > 0).sum() >= 2  # something to learn
    assert len(list(run)) == 1

    policy = load_policy(folder)
    algorithm, training = AlgorithmSection(advantage="grpo"), TrainingSection(prompts_per_batch=4)
    judged, options = jax.numpy.asarray(rewards)[..., None], {"weights": {"short": 1.0}, "max_new_tokens": 24}
    objectives = make_objectives(judged, samples.mask.sum(-1), algorithm, **options)
    rollout = Rollout([], [], rewards, rewards, samples, *policy.encode(loop.PROMPTS))
    batch = make_batch(rollout, objectives, algorithm)
    update = make_update(policy, optax.sgd(1.0), algorithm, training, temperature=1.0, max_new_tokens=24)
    start = init_state({"params": policy.params}, optax.sgd(1.0), keep_reference=False)
    state, report = update(start, batch, jax.random.key(0))

    assert value == pytest.approx(report["loss"], abs=1e-6)
    assert report["grad_norm"] > 0.01
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), seen["params"], load_policy(folder).params)
    expected = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.variables["params"], policy.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), moved, expected)
