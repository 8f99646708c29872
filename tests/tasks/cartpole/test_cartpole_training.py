"""Training on CartPole: one compiled function, alike for one seed and for many, and it learns."""

import jax
import numpy as np
import pytest

from grpo_jax.config.run import make_config
from grpo_jax.tasks.cartpole.program import seed_keys
from grpo_jax.tasks.cartpole.training import make_train

SMALL = {
    "optimizer": {"learning_rate": 3e-3},
    "training": {"iterations": 4},
    "evaluation": {"every": 2},
}
GDPO = {"name": "gdpo", "epochs": 3, "group_size": 8, "objectives": ["upright", "centred"], "condition": 20}


def small(algorithm):
    return make_config(SMALL, task="cartpole", algorithm=algorithm)


@pytest.fixture(scope="module")
def train():
    """train(seed) → (final state of three seeds, metrics [3, 4], measures [3] after each of two blocks)."""
    training = make_train(small(GDPO))
    block = jax.jit(jax.vmap(training.block))

    def train_from(seed):
        state, blocks = jax.vmap(training.init)(seed_keys(seed, 3)), []
        for _ in range(2):
            state, *found = block(state)
            blocks.append(found)
        assert block._cache_size() == 1
        metrics = {name: np.concatenate([found[0][name] for found in blocks], axis=1) for name in blocks[0][0]}
        return state, metrics, [found[1] for found in blocks]

    return train_from


def test_every_iteration_is_counted_and_measured_and_a_seed_is_a_run(train):
    state, metrics, measures = train(0)
    assert (state.iteration == 4).all()
    steps = metrics["environment_steps"]
    assert steps.shape == (3, 4) and (np.diff(steps) > 0).all() and (steps[:, -1] == state.steps).all()
    for after, found in zip((2, 4), measures, strict=True):
        np.testing.assert_array_equal(found["iteration"], [after] * 3)
        np.testing.assert_array_equal(found["environment_steps"], steps[:, after - 1])
    for name in ("loss", "entropy", "mean_ratio", "clip_low", "clip_high", "grad_norm"):
        assert np.isfinite(metrics[name]).all(), name
    assert (metrics["grad_norm"] > 0).all() and len(np.unique(metrics["episode_return"])) > 3
    # Real steps alone are counted: eight episodes of the mean length.
    np.testing.assert_allclose(np.diff(steps, prepend=0, axis=1), 8 * metrics["episode_return"], rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, state.params, train(0)[0].params)
    assert not np.array_equal(metrics["loss"], train(7)[1]["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"optimizer": {"learning_rate": 1e-3}, "training": {"iterations": 40}}, id="grpo"),
        pytest.param(
            {
                "algorithm": {"name": "ppo", "gamma": 0.99},
                "optimizer": {"learning_rate": 3e-3},
                "training": {"iterations": 30},
            },
            id="ppo",
            marks=pytest.mark.wide,  # loss and gradient are PyTorch's (test_benchmarks.py), GAE a loop's
        ),
    ],
)
def test_it_learns(sections):
    """Two seeds, from falling to standing."""
    config = make_config(sections, task="cartpole", evaluation={"every": 10})
    training = make_train(config)
    # What runs for long is worth XLA's time.
    block = jax.jit(jax.vmap(training.block), compiler_options={"xla_backend_optimization_level": 1})
    state, played = jax.vmap(training.init)(seed_keys(20, 2)), []
    for _ in range(config.training.iterations // 10):
        state, metrics, measures = block(state)
        played.append(metrics["episode_return"])
    assert played[0][:, 0].mean() < 150 and measures["episode_return"].min() > 450
