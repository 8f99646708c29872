"""Products of bfloat16 factors with float32 sums, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core.products import narrow_product


def rounded(x) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 10), (10, 6), (7, 7)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_only_the_factors_are_rounded(inputs, outputs, dtype):
    """Result and both gradients, also transposed, which XLA would join with the product."""
    random = np.random.default_rng(inputs)
    x, kernel, pull = (random.normal(size=s) for s in [(33, inputs), (inputs, outputs), (33, outputs)])
    x, kernel, pull = jnp.asarray(x, dtype), jnp.asarray(kernel, jnp.float32), jnp.asarray(pull, dtype)

    @jax.jit
    def products(x, kernel, pull):
        y, back = jax.vjp(narrow_product, x, kernel)
        return y.T, jax.tree.map(jnp.transpose, back(pull))

    y, (for_x, for_kernel) = products(x, kernel, pull)
    assert (y.dtype, for_x.dtype, for_kernel.dtype) == (dtype, dtype, jnp.float32)
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
    wide_x, wide_kernel, wide_pull = map(rounded, (x, kernel, pull))
    pairs = [(y, wide_x @ wide_kernel), (for_x, wide_pull @ wide_kernel.T), (for_kernel, wide_x.T @ wide_pull)]
    for (got, expected), within in zip(pairs, (tolerance, tolerance, 1e-6), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), expected.T, rtol=within, atol=1e-5)
