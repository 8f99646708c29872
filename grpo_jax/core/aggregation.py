"""From values per token to a loss: the denominators, and means that survive being split.

A loss is a sum over a denominator that belongs to the whole update. A part of the batch, on one device or in one
micro-batch, sees part of the sum and is given the denominator; then the parts' losses and gradients add up.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from grpo_jax.core.masking import as_mask, check_choice, check_shape, count, masked_mean, safe_divide, select


class Mean(NamedTuple):
    """A mean on its way: add up the totals and the weights of the parts, then take the value."""

    total: ArrayLike
    weight: ArrayLike

    def value(self) -> jax.Array:
        """total / weight, and 0 if there is no weight."""
        return safe_divide(jnp.asarray(self.total), jnp.asarray(self.weight))


class Normaliser(NamedTuple):
    """Denominators of a whole update, of which a loss call may see a part."""

    loss: ArrayLike  # divides the aggregated policy loss and KL penalty
    tokens: ArrayLike  # number of tokens, for the entropy bonus, a token mean under every aggregation


@dataclass(frozen=True)
class FixedLength:
    """Aggregation: sum over all tokens / (rows · length), so that long answers weigh by their length.

    Attributes:
        length: the token budget. None takes the length of the arrays' last axis, which is the budget as long
            as they are padded to it.
    """

    length: int | None = None


Aggregation = str | FixedLength


def loss_normaliser(
    mask: ArrayLike, aggregation: Aggregation = "sequence", *, dtype: DTypeLike = jnp.float32
) -> Normaliser:
    """Denominators of an update, from the mask of all its rows.

    "sequence" counts rows, "token" tokens, `FixedLength(n)` rows times n; a row counts if its mask has a token. Parts
    of a batch have parts of the denominators: they may also be summed over devices.

    Args:
        mask: bool `[.., T]`.
        aggregation: as in `grpo_loss`.
        dtype: type of the result.

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

    ValueError for an array, or a scalar where an entropy `bonus` needs the number of tokens too.
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
    """The loss's numerator of `values` `[.., T]`, to be divided by `Normaliser.loss`."""
    if aggregation == "sequence":
        return jnp.sum(masked_mean(values, mask, axis=-1))
    return jnp.sum(select(mask, values))
