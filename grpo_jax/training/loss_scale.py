"""The scale of the loss under float16, whose smallest numbers gradients would otherwise fall below."""

from __future__ import annotations

import jax.numpy as jnp
from flax.training.dynamic_scale import DynamicScale


def make_loss_scale(compute_dtype: str) -> DynamicScale | None:
    """Flax's dynamic scale for float16, None for types with float32's range.

    It starts at 2¹⁶, is halved by an update whose gradients overflow (which is left out), and doubled after 2,000
    updates in a row that did not. It does not fall below 1: what overflows there is not the scale's doing.

    Args:
        compute_dtype: Type of the activations.
    """
    if compute_dtype != "float16":
        return None
    start = jnp.full((), 2.0**16, jnp.float32)
    return DynamicScale(fin_steps=jnp.zeros((), jnp.int32), scale=start, minimum_scale=1.0)
