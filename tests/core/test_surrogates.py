"""What each surrogate does to the gradient of a token: stops it, bounds its weight, lets it through."""

import jax
import numpy as np
import pytest
from oracles.loss_loops import SURROGATES
from support.compiled import compiled

from grpo_jax.core.losses import CappedWeight, Clip, grpo_loss

grpo_loss = compiled(grpo_loss)
pytestmark = pytest.mark.usefixtures("strict")


@pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
def test_an_overflowing_ratio_behind_a_bound_keeps_gradients_finite(surrogate):
    """exp(200) is inf; min(inf · A, 1.2 A) is fine, its gradient was once 0 · inf."""
    logprobs = np.array([[-1.0, -2.0]], np.float32)
    old = logprobs - np.array([[200.0, 0.0]], np.float32)
    for advantage in (1.0, -1.0):
        if surrogate == SURROGATES["clip"] and advantage < 0:
            continue  # without a dual clip that loss is infinite, and should look so
        loss, gradient = jax.value_and_grad(
            lambda x, a=advantage: grpo_loss(x, old, np.float32([a]), np.ones((1, 2), bool), surrogate=surrogate)[0]
        )(logprobs)
        assert np.isfinite(loss)
        assert np.isfinite(gradient).all()


def test_clip_stops_the_gradient_where_it_says():
    ratio = np.array([[0.5, 0.9, 1.1, 1.5, 4.0]])
    mask = np.ones((1, 5), bool)
    logs = np.log(ratio).astype(np.float32)
    for advantage, surrogate, alive in (
        (1.0, Clip(), [1, 1, 1, 0, 0]),
        (-1.0, Clip(), [0, 1, 1, 1, 1]),
        (-1.0, Clip(dual=3.0), [0, 1, 1, 1, 0]),
    ):
        call = lambda x: grpo_loss(x, 0 * logs, np.float32([advantage]), mask, surrogate=surrogate)  # noqa: B023, E731
        gradient, metrics = jax.grad(call, has_aux=True)(logs)
        np.testing.assert_array_equal(gradient[0] != 0, np.array(alive, bool))
        np.testing.assert_allclose(metrics.clip_low.value() + metrics.clip_high.value(), 1 - np.mean(alive), rtol=1e-6)


def test_capped_weight_keeps_every_token():
    """What CISPO is for: a token beyond the cap still has a gradient, of bounded weight."""
    logs = np.log(np.array([[0.5, 2.0, 50.0]], np.float32))
    gradient = jax.grad(
        lambda x: grpo_loss(x, 0 * logs, np.float32([1.0]), np.ones((1, 3), bool), surrogate=CappedWeight(5.0))[0]
    )(logs)
    np.testing.assert_allclose(gradient, [[-0.5 / 3, -2.0 / 3, -5.0 / 3]], rtol=1e-5)
