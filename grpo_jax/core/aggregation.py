"""Aggregation of per-token values to a loss, and means that do not depend on the split of a batch.

A loss is a sum divided by a denominator of the whole update. A part of the batch, on one device or in one
micro-batch, computes part of the sum with the whole denominator. The parts' losses and gradients then add up.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from grpo_jax.core.masking import as_mask, check_choice, check_shape, count, masked_mean, safe_divide, select


class Mean(NamedTuple):
    """Running mean: add the totals and the weights of the parts, then take the value."""

    total: ArrayLike
    weight: ArrayLike

    def value(self) -> jax.Array:
        """Return total / weight, or 0 if the weight is 0."""
        return safe_divide(jnp.asarray(self.total), jnp.asarray(self.weight))


class Normaliser(NamedTuple):
    """Denominators of a whole update; a loss call may see only part of it."""

    loss: ArrayLike  # divides the aggregated policy loss and KL penalty
    tokens: ArrayLike  # number of tokens, for the entropy bonus, a token mean under every aggregation


@dataclass(frozen=True)
class FixedLength:
    """Aggregation: sum over all tokens / (rows · length), so a completion's weight grows with its length.

    Attributes:
        length: the token budget. None takes the length of the last axis, which must then be padded to the budget.
    """

    length: int | None = None


Aggregation = str | FixedLength


def loss_normaliser(
    mask: ArrayLike, aggregation: Aggregation = "sequence", *, dtype: DTypeLike = jnp.float32
) -> Normaliser:
    """Compute the denominators of an update from the mask of all its rows.

    "sequence" counts rows, "token" counts tokens, and `FixedLength(n)` counts rows times n. A row counts if its mask
    has a token. Denominators of the parts of a batch may be summed, over devices for example.

    Args:
        mask: bool `[.., T]`.
        aggregation: as in `grpo_loss`.
        dtype: dtype of the result.

    Raises:
        ValueError: an unknown aggregation.
    """
    mask = as_mask("mask", mask)
    tokens, rows = count(mask, dtype=dtype), count(mask.any(axis=-1), dtype=dtype)
    if isinstance(aggregation, FixedLength):
        return Normaliser(rows * (mask.shape[-1] if aggregation.length is None else aggregation.length), tokens)
    check_choice("aggregation", aggregation, "sequence", "token")
    return Normaliser(rows if aggregation == "sequence" else tokens, tokens)


def as_normaliser(normaliser, local: Normaliser, aggregation: Aggregation, bonus: bool) -> Normaliser:
    """Check the caller's normaliser; return `local` if there is none.

    ValueError for an array of another rank, or for a scalar if an entropy `bonus` also needs the number of tokens.
    """
    if normaliser is None:
        return local
    if isinstance(normaliser, Normaliser):
        return Normaliser(*(jnp.asarray(x, jnp.result_type(local.loss)) for x in normaliser))
    normaliser = jnp.asarray(normaliser, jnp.result_type(local.loss))
    check_shape("normaliser", normaliser, ())
    if bonus and aggregation != "token":
        raise ValueError("normaliser must be a Normaliser when there is an entropy bonus, got a scalar")
    return Normaliser(normaliser, normaliser)


def aggregate(values: jax.Array, mask: jax.Array, aggregation: Aggregation) -> jax.Array:
    """Return the numerator of the loss for `values` `[.., T]`; the denominator is `Normaliser.loss`."""
    if aggregation == "sequence":
        return jnp.sum(masked_mean(values, mask, axis=-1))
    return jnp.sum(select(mask, values))
