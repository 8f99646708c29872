"""Training on CartPole: one compiled function, alike for one seed and for many, and it learns."""

import jax
import numpy as np
import pytest

from grpo_jax.config import make_config
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
def trained():
    """(functions, compiled train over seeds, its answer for three of them)."""
    training = make_train(small(GDPO))
    train = jax.jit(jax.vmap(training.train))
    return training, train, jax.block_until_ready(train(seed_keys(0, 3)))


def assert_measured(history):
    """Every iteration has its numbers, and there was something to learn."""
    for name in ("loss", "entropy", "mean_ratio", "clip_low", "clip_high", "grad_norm"):
        assert np.isfinite(history.iterations[name]).all(), name
    assert (history.iterations["grad_norm"] > 0).all()


def test_history(trained):
    _, _, (state, history) = trained
    assert (state.iteration == 4).all()
    steps = history.iterations["environment_steps"]
    assert steps.shape == (3, 4) and (np.diff(steps) > 0).all() and (steps[:, -1] == state.steps).all()
    np.testing.assert_array_equal(history.evaluations["iteration"], [[0, 2, 4]] * 3)
    np.testing.assert_array_equal(history.evaluations["environment_steps"][:, 1:], steps[:, [1, 3]])
    assert_measured(history)
    assert len(np.unique(history.evaluations["episode_return"])) > 3
    # Real steps alone are counted: eight episodes of the mean length.
    returns = history.iterations["episode_return"]
    np.testing.assert_allclose(np.diff(steps, prepend=0, axis=1), 8 * returns, rtol=1e-5)


def test_a_second_call_does_not_compile(trained):
    _, train, first = trained
    again = train(seed_keys(0, 3))
    other = train(seed_keys(7, 3))
    assert train._cache_size() == 1
    jax.tree.map(np.testing.assert_array_equal, first[0].params, again[0].params)
    assert not np.array_equal(first[1].iterations["loss"], other[1].iterations["loss"])


def test_blocks_are_the_whole_run(trained):
    """What the command calls in turn is what `train` does at once, to rounding."""
    training, _, (state, history) = trained
    block = jax.jit(jax.vmap(training.block))
    middle, first, _ = block(jax.vmap(training.init)(seed_keys(0, 3)))
    end, second, measures = block(middle)
    np.testing.assert_array_equal(end.steps, state.steps)
    for name in ("loss", "episode_return"):
        joined = np.concatenate([first[name], second[name]], axis=1)
        np.testing.assert_allclose(joined, history.iterations[name], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(measures["episode_return"], history.evaluations["episode_return"][:, -1], rtol=1e-3)


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
