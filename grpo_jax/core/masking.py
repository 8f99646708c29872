"""Masked statistics; under an empty mask every statistic is 0.

Masked values (NaN and inf included) reach neither a value nor a gradient. They are replaced before any arithmetic, so
no cotangent is ever multiplied by them.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Axis = int | tuple[int, ...] | None


def as_float(
    name: str, value: ArrayLike, *, ndim: int | None = None, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """Return `value` as an array of at least float32 (float64 stays float64).

    TypeError if it is not floating, ValueError for another number of axes than `ndim`, or another shape.
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
    """Raise ValueError unless the array has one of the shapes: broadcasting might hide a mistake. None allows all."""
    if None not in shapes and array.shape not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {array.shape}")


def check_choice(name: str, value: str | None, *choices: str | None) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def safe_divide(numerator: ArrayLike, denominator: ArrayLike) -> jax.Array:
    """Return the quotient, or 0 with gradient 0 where the denominator is 0."""
    empty = jnp.equal(denominator, 0)
    return jnp.where(empty, 0, numerator / jnp.where(empty, 1, denominator))


def select(mask: jax.Array, x: jax.Array) -> jax.Array:
    """Return `x` where the mask is True, else 0; use it before the arithmetic, not after."""
    return jnp.where(mask, x, 0)


def count(mask: jax.Array, *, axis: Axis = None, keepdims: bool = False, dtype=jnp.float32) -> jax.Array:
    """Return the number of True places as a float."""
    return jnp.sum(mask, axis=axis, keepdims=keepdims, dtype=dtype)


def masked_mean(x: jax.Array, mask: jax.Array, *, axis: Axis = None, keepdims: bool = False) -> jax.Array:
    """Return the mean of `x` where `mask` is True; 0 under an empty mask.

    Args:
        x: floating array.
        mask: bool, broadcastable against `x`.
        axis: axes to reduce; all of them by default.
        keepdims: keeps the reduced axes with length 1.
    """
    mask = jnp.broadcast_to(mask, x.shape)
    total = jnp.sum(select(mask, x), axis=axis, keepdims=keepdims)
    return safe_divide(total, count(mask, axis=axis, keepdims=keepdims, dtype=x.dtype))


def binary_scale(x: jax.Array, mask: jax.Array, *, axis: Axis = None) -> jax.Array:
    """Return the power of two next to the largest |x| under the mask, reduced axes kept; a constant to gradients.

    Divide by it before squaring: the division is exact, and the squares neither overflow nor underflow.
    """
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True, where=mask, initial=0)
    bound = jnp.finfo(x.dtype).maxexp - 2  # the scale and its inverse are normal numbers
    exponent = jnp.clip(jnp.frexp(largest)[1], -bound, bound)
    return jax.lax.stop_gradient(jnp.ldexp(jnp.ones_like(largest), exponent))


def shifted(x: jax.Array, mask: jax.Array, *, axis: Axis = None) -> tuple[jax.Array, jax.Array]:
    """Return the smallest value under the mask, reduced axes kept, and the differences from it, 0 elsewhere.

    Differences of close values are exact, so their mean loses no digits. The mean of 1000.1, 1000.2, ... would.
    """
    lowest = jax.lax.stop_gradient(jnp.min(x, axis=axis, keepdims=True, where=mask, initial=jnp.inf))
    return lowest, select(mask, x - lowest)


def masked_std(x: jax.Array, mask: jax.Array, *, axis: Axis = None, keepdims: bool = False) -> jax.Array:
    """Return the sample standard deviation (ddof 1) of `x` where `mask` is True.

    It is exactly 0, with gradient 0, if all values are equal or there are fewer than two. A plain formula gives
    rounding noise there, and division by noise would invent signal. Arguments are those of `masked_mean`.
    """
    mask = jnp.broadcast_to(mask, x.shape)
    lowest = jnp.min(x, axis=axis, keepdims=True, where=mask, initial=jnp.inf)
    highest = jnp.max(x, axis=axis, keepdims=True, where=mask, initial=-jnp.inf)
    number = count(mask, axis=axis, keepdims=True, dtype=x.dtype)
    varies = (lowest != highest) & (number > 1)  # true for NaN too: it must not silently become 0
    scale = binary_scale(x, mask, axis=axis)
    _, differences = shifted(x / scale, mask & varies, axis=axis)
    deviation = select(mask, differences - masked_mean(differences, mask, axis=axis, keepdims=True))
    variance = jnp.sum(jnp.square(deviation), axis=axis, keepdims=True)
    variance = safe_divide(variance, jnp.maximum(number - 1, 0))
    std = jnp.where(varies, scale * jnp.sqrt(jnp.where(varies, variance, 1)), 0)
    return std if keepdims else jnp.squeeze(std, axis)


def masked_whiten(x: jax.Array, mask: jax.Array, *, axis: Axis = None, eps: float = 1e-4) -> jax.Array:
    """Return (x - mean) / (std + eps) where the mask is True; 0 elsewhere, and if all values are equal."""
    mask = jnp.broadcast_to(mask, x.shape)
    scale = binary_scale(x, mask, axis=axis)
    x, eps_scaled = x / scale, eps / scale
    std = masked_std(x, mask, axis=axis, keepdims=True)
    _, differences = shifted(x, mask, axis=axis)
    centred = differences - masked_mean(differences, mask, axis=axis, keepdims=True)
    return select(mask & (std != 0), safe_divide(centred, jnp.where(std != 0, std + eps_scaled, 0)))
