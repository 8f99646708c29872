"""Matrix products with bfloat16 factors and float32 accumulation, in the form that is fast on CPUs.

XLA's CPU compiler has fast kernels if the result is float32 and the left factor is not transposed; else it multiplies
in float32. A product that XLA later fuses with a transposition cannot run, so barriers keep them apart.
"""

import jax
import jax.numpy as jnp


def narrow_dot(a: jax.Array, b: jax.Array, axis: int = 0) -> jax.Array:
    """Contract K of a [M, K] with this axis of b, [K, N] or [N, K]: float32 [M, N]."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    product = jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(product)


def narrow_outer(a: jax.Array, b: jax.Array) -> jax.Array:
    """Contract K of a [K, M] and b [K, N]: float32 [M, N].

    A product with the identity transposes the narrower factor, in a quarter of the time of XLA's transposition.
    """
    if b.shape[1] < a.shape[1]:
        return narrow_outer(b, a).T
    return narrow_dot(narrow_dot(jnp.eye(a.shape[1]), a, 1), b)


@jax.custom_vjp
def narrow_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return x [N, in] · kernel [in, out] in x's dtype; both products of its gradient are narrow too."""
    return narrow_dot(x, kernel).astype(x.dtype)


def _backward(factors: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = factors
    return narrow_dot(gradient, kernel, 1).astype(x.dtype), narrow_outer(x, gradient).astype(kernel.dtype)


narrow_product.defvjp(lambda x, kernel: (narrow_product(x, kernel), (x, kernel)), _backward)
