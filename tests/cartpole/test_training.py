"""Training on CartPole: one compiled function, equal for one seed and many, and a learning claim."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from grpo_jax.cartpole.program import seed_keys
from grpo_jax.cartpole.settings import OBJECTIVES, SETTINGS, Settings
from grpo_jax.cartpole.training import make_training

GDPO = Settings("gdpo", OBJECTIVES, condition=20, learning_rate=3e-3, iterations=4, group_size=8, epochs=3)


def trainer(settings, every, **options):
    """(train, block): train(keys) → the last state, metrics [seeds, blocks, every], measures [seeds, blocks]."""
    training = make_training(settings)
    start = jax.jit(jax.vmap(training.init))
    block = jax.jit(jax.vmap(partial(training.train, iterations=every)), **options)

    def train(keys):
        state, made = start(keys), []
        for _ in range(settings.iterations // every):
            state, *rows = block(state)
            made.append(rows)
        return state, jax.tree.map(lambda *parts: np.stack(parts, axis=1), *made)

    return train, block


def test_every_iteration_is_counted_and_measured_and_a_seed_is_a_run():
    train, block = trainer(GDPO, 2)
    state, (metrics, measures) = train(seed_keys(0, 3))
    assert (state.iteration == 4).all()
    metrics = {name: np.reshape(values, (3, 4)) for name, values in metrics.items()}  # [seeds, blocks, every]
    steps = metrics["environment_steps"]
    assert (np.diff(steps) > 0).all() and (steps[:, -1] == state.steps).all()
    assert measures["episode_return"].shape == (3, 2)
    for name in ("loss", "entropy", "mean_ratio", "clip_low", "clip_high", "grad_norm"):
        assert np.isfinite(metrics[name]).all(), name
    assert (metrics["grad_norm"] > 0).all() and len(np.unique(metrics["episode_return"])) > 3
    # Real steps alone are counted: eight episodes of the mean length.
    np.testing.assert_allclose(np.diff(steps, prepend=0, axis=1), 8 * metrics["episode_return"], rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, state.variables, train(seed_keys(0, 3))[0].variables)
    assert not np.array_equal(metrics["loss"].ravel(), np.ravel(train(seed_keys(7, 3))[1][0]["loss"]))
    assert block._cache_size() == 1


GRPO = replace(SETTINGS["grpo"], learning_rate=1e-3, iterations=40)
PPO = replace(SETTINGS["ppo"], iterations=30)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [GRPO, pytest.param(PPO, marks=pytest.mark.wide)], ids=["grpo", "ppo"])
def test_it_learns(settings):
    """Two seeds, from falling to standing."""
    # What runs for long is worth XLA's time.
    train, _ = trainer(settings, 10, compiler_options={"xla_backend_optimization_level": 1})
    _, (metrics, measures) = train(seed_keys(20, 2))
    assert metrics["episode_return"][:, 0, 0].mean() < 150 and measures["episode_return"][:, -1].min() > 450
