"""Shaped rewards against loops."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.core.shaping import kl_penalised_rewards, overlong_penalty

pytestmark = pytest.mark.usefixtures("strict")

PENALISED = jax.jit(kl_penalised_rewards, static_argnames="estimator")
seeds = st.integers(0, 10_000)


def batch(seed, rows=4, length=5):
    random = np.random.default_rng(seed)
    logprobs, ref = -random.exponential(size=(2, rows, length)).astype(np.float32)
    mask = random.random((rows, length)) > 0.3
    mask[0] = False
    return random.normal(size=rows).astype(np.float32), logprobs, ref, mask


def loop_rewards(scores, logprobs, ref, mask, coef, estimator):
    out = np.zeros(logprobs.shape)
    for row in range(len(mask)):
        places = np.flatnonzero(mask[row])
        for t in places:
            d = float(ref[row, t]) - float(logprobs[row, t])
            out[row, t] = -coef * {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - d - 1}[estimator]
        if len(places):
            out[row, places[-1]] += scores[row]
    return out


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(seed=seeds)
def test_penalised_rewards_are_the_loop(estimator, seed):
    scores, logprobs, ref, mask = batch(seed)
    expected = loop_rewards(scores, logprobs, ref, mask, 0.3, estimator)
    dirty = [np.where(mask, part, np.float32(bad)) for part, bad in ((logprobs, np.nan), (ref, -np.inf))]
    scores[0] = np.nan  # of the row without tokens
    got = PENALISED(scores, *dirty, mask, kl_coef=np.float32(0.3), estimator=estimator)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(got)[~mask], 0)


def test_penalised_rewards_are_constants_to_gradients():
    scores, logprobs, ref, mask = batch(2)
    slope = jax.grad(lambda x: kl_penalised_rewards(scores, x, ref, mask, kl_coef=0.3).sum())(logprobs)
    np.testing.assert_array_equal(slope, 0)


def test_overlong_is_the_papers_equation():
    lengths = np.arange(0, 25)
    expected = [0.0 if n <= 12 else (12 - n) / 8 if n <= 20 else -1.0 for n in lengths]
    np.testing.assert_allclose(overlong_penalty(lengths, limit=20, buffer=8), expected, rtol=1e-6)
    got = jax.jit(lambda n: overlong_penalty(n, limit=20, buffer=20))(lengths.reshape(5, 5))
    np.testing.assert_allclose(got, np.maximum(-lengths / 20, -1).reshape(5, 5), rtol=1e-6)
    np.testing.assert_array_equal(overlong_penalty(np.uint8([3, 21]), limit=20, buffer=8), [0, -1])
