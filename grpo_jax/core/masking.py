"""Masked statistics, and the one rule for an empty mask: a statistic of nothing is 0.

Masked values (NaN and inf included) reach neither a value nor a gradient: they are replaced before any arithmetic, so
that no cotangent is ever multiplied by them.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Axis = int | tuple[int, ...] | None


def as_float(
    name: str, value: ArrayLike, *, ndim: int | None = None, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """Return `value` as an array of at least float32 (float64 stays float64).

    Raises:
        TypeError: it is not of a floating type.
        ValueError: it has not `ndim` axes, or another shape.
    """
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be of a floating type, got {array.dtype}")
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {array.shape}")
    check_shape(name, array, shape)
    return array if array.dtype == jnp.float64 else array.astype(jnp.float32)


def as_mask(name: str, value: ArrayLike, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Return `value` as a bool array; TypeError if it is not bool, ValueError for another shape."""
    array = jnp.asarray(value)
    if array.dtype != jnp.bool_:
        raise TypeError(f"{name} must be of type bool, got {array.dtype}")
    check_shape(name, array, shape)
    return array


def check_shape(name: str, array: jax.Array, *shapes: tuple[int, ...] | None) -> None:
    """Raise ValueError for an array of none of the shapes, which might broadcast to a wrong result; None allows all."""
    if None not in shapes and array.shape not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {array.shape}")


def check_choice(name: str, value: str | None, *choices: str | None) -> None:
    """Raise ValueError for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def safe_divide(numerator: ArrayLike, denominator: ArrayLike) -> jax.Array:
    """Quotient that is 0, with gradient 0, where the denominator is 0."""
    empty = jnp.equal(denominator, 0)
    return jnp.where(empty, 0, numerator / jnp.where(empty, 1, denominator))


def select(mask: jax.Array, x: jax.Array) -> jax.Array:
    """`x` where the mask is True and 0 elsewhere; use it before the arithmetic, not after."""
    return jnp.where(mask, x, 0)


def count(mask: jax.Array, *, axis: Axis = None, keepdims: bool = False, dtype=jnp.float32) -> jax.Array:
    """Number of True places, as a float."""
    return jnp.sum(mask, axis=axis, keepdims=keepdims, dtype=dtype)


def masked_mean(x: jax.Array, mask: jax.Array, *, axis: Axis = None, keepdims: bool = False) -> jax.Array:
    """Mean of `x` over the places where `mask` is True; 0 if there are none.

    Args:
        x: array of a floating type.
        mask: bool, broadcastable against `x`.
        axis: axes to reduce; all of them by default.
        keepdims: keeps the reduced axes with length 1.
    """
    mask = jnp.broadcast_to(mask, x.shape)
    total = jnp.sum(select(mask, x), axis=axis, keepdims=keepdims)
    return safe_divide(total, count(mask, axis=axis, keepdims=keepdims, dtype=x.dtype))


def binary_scale(x: jax.Array, mask: jax.Array, *, axis: Axis = None) -> jax.Array:
    """Return the power of two next to the largest |x| under the mask, reduced axes kept; a constant to gradients.

    Divide by it before squaring: the division is exact, and squares of the quotients neither overflow nor vanish.
    """
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True, where=mask, initial=0)
    bound = jnp.finfo(x.dtype).maxexp - 2  # the scale and its inverse are normal numbers
    exponent = jnp.clip(jnp.frexp(largest)[1], -bound, bound)
    return jax.lax.stop_gradient(jnp.ldexp(jnp.ones_like(largest), exponent))


def masked_std(x: jax.Array, mask: jax.Array, *, axis: Axis = None, keepdims: bool = False, ddof: int = 1) -> jax.Array:
    """Standard deviation of `x` over the places where `mask` is True.

    Exactly 0 (and gradient 0) where the values are all equal or there are not more than `ddof` of them; a plain
    formula gives rounding noise there, and dividing by noise makes signal of nothing.

    Args:
        x: array of a floating type.
        mask: bool, broadcastable against `x`.
        axis: axes to reduce; all of them by default.
        keepdims: keeps the reduced axes with length 1.
        ddof: subtracted from the number of values in the variance's denominator.
    """
    mask = jnp.broadcast_to(mask, x.shape)
    lowest = jnp.min(x, axis=axis, keepdims=True, where=mask, initial=jnp.inf)
    highest = jnp.max(x, axis=axis, keepdims=True, where=mask, initial=-jnp.inf)
    number = count(mask, axis=axis, keepdims=True, dtype=x.dtype)
    varies = (lowest != highest) & (number > ddof)  # true for a NaN too, which must not become a quiet 0
    # Deviations are taken from the smallest value first: 1000.1, 1000.2, ... would lose digits in their mean.
    scale = binary_scale(x, mask, axis=axis)
    shifted = select(mask & varies, x / scale - jax.lax.stop_gradient(select(varies, lowest / scale)))
    deviation = select(mask, shifted - masked_mean(shifted, mask, axis=axis, keepdims=True))
    variance = jnp.sum(jnp.square(deviation), axis=axis, keepdims=True)
    variance = safe_divide(variance, jnp.maximum(number - ddof, 0))
    std = jnp.where(varies, scale * jnp.sqrt(jnp.where(varies, variance, 1)), 0)
    return std if keepdims else jnp.squeeze(std, axis)


def masked_whiten(x: jax.Array, mask: jax.Array, *, axis: Axis = None, eps: float = 1e-4) -> jax.Array:
    """(x - mean) / (std + eps) over the True places, 0 at the others and where all values are equal."""
    mask = jnp.broadcast_to(mask, x.shape)
    scale = binary_scale(x, mask, axis=axis)
    x, eps_scaled = x / scale, eps / scale
    std = masked_std(x, mask, axis=axis, keepdims=True)
    centred = select(mask, x) - masked_mean(x, mask, axis=axis, keepdims=True)
    return select(mask & (std != 0), safe_divide(centred, jnp.where(std != 0, std + eps_scaled, 0)))
