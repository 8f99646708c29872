"""Objectives of a policy loss per token: clipped ratio, capped weight, soft gate, and bounds in probability.

A surrogate is a frozen dataclass with two methods, of `log_ratio` (log π / π_old, `[.., T]`, or `[.., 1]` for one
ratio per row), `logprobs` `[.., T]` and `advantages` (`[.., 1]` or `[.., T]`). Any object with both will do.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Clip:
    """Surrogate: PPO's clipped ratio (https://arxiv.org/abs/1707.06347).

        min(ρ A, clip(ρ, 1 - low, 1 + high) A), for A < 0 and with a dual clip no less than dual · A

    Attributes:
        low: how far below 1 the ratio pays.
        high: how far above 1 (DAPO's "clip higher" when it is more than `low`).
        dual: upper bound of the ratio where the advantage is negative (https://arxiv.org/abs/1912.09729). TRL's
            `delta` bounds both signs; above 1 + high, where it belongs, that is the same.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """The objective per token."""
        del logprobs
        # Bounded before the exponential: an infinite ratio behind a bound would give a gradient of 0 · inf.
        lower = jnp.where(advantages < 0, jnp.log1p(-self.low), -jnp.inf)
        dual = jnp.inf if self.dual is None else jnp.log(self.dual)
        upper = jnp.where(advantages < 0, dual, jnp.log1p(self.high))
        log_ratio, lower, upper = jnp.broadcast_arrays(log_ratio, lower, upper)
        bounded = jnp.where(log_ratio < lower, lower, jnp.where(log_ratio > upper, upper, log_ratio))
        return jnp.exp(bounded) * advantages

    def clipped(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where the lower and where the upper bound stops the gradient."""
        low = (advantages < 0) & (log_ratio < jnp.log1p(-self.low))
        high = (advantages > 0) & (log_ratio > jnp.log1p(self.high))
        if self.dual is not None:
            high = high | ((advantages < 0) & (log_ratio > jnp.log(self.dual)))
        return low, high


@dataclass(frozen=True)
class CappedWeight:
    """Surrogate: REINFORCE with a truncated importance weight, CISPO (https://arxiv.org/abs/2506.13585).

        stop_gradient(min(ρ, cap)) · A · log π

    Every token keeps a gradient; only its weight is bounded.
    """

    cap: float = 5.0  # the largest weight itself (1 + ε_high in the paper's notation), more than 1

    def __post_init__(self) -> None:
        if not self.cap > 1:
            raise ValueError(f"cap is the largest weight itself and must be more than 1, got {self.cap}")

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """The objective per token."""
        weight = jnp.minimum(jnp.exp(jax.lax.stop_gradient(log_ratio)), self.cap)
        return weight * advantages * logprobs

    def clipped(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Nowhere, and where the weight is capped."""
        high = (log_ratio > jnp.log(self.cap)) & (advantages != 0)
        return jnp.zeros_like(high), high


@dataclass(frozen=True)
class SoftGate:
    """Surrogate: SAPO's smooth gate in place of clipping (https://arxiv.org/abs/2511.20347).

        4 / τ · sigmoid(τ (ρ - 1)) · A,  τ = positive where A > 0, else negative

    Its slope is 1 at ρ = 1 and falls off on both sides.
    """

    positive: float = 1.0  # τ for positive advantages
    negative: float = 1.05  # τ for the others; larger, since their gradients spread over all other tokens

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """The objective per token."""
        del logprobs
        temperature = jnp.where(advantages > 0, self.positive, self.negative).astype(log_ratio.dtype)
        ratio = _bounded_ratio(log_ratio)  # the gate is flat long before
        return 4 / temperature * jax.nn.sigmoid(temperature * (ratio - 1)) * advantages

    def clipped(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Nowhere: the gate has no edge."""
        return _nowhere(log_ratio, advantages)


@dataclass(frozen=True)
class DivergenceMask:
    """Surrogate: DPPO's mask on the change of probability, its Binary-TV (https://arxiv.org/abs/2602.04879).

        ρ A, and nothing where A > 0 and π - π_old > high, or A < 0 and π - π_old < -low

    A ratio clips rare tokens first, whose probability hardly changes; this bounds what changes most. Token ratios only.
    """

    low: float = 0.15  # how far a probability may fall
    high: float = 0.15  # how far it may rise

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """The objective per token."""
        low, high = self.clipped(log_ratio, logprobs, advantages)
        return jnp.where(low | high, 0, _bounded_ratio(log_ratio) * advantages)

    def clipped(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where a probability that falls and where one that rises leaves the loss."""
        change = jnp.exp(logprobs) - jnp.exp(logprobs - log_ratio)
        return (advantages < 0) & (change < -self.low), (advantages > 0) & (change > self.high)


@dataclass(frozen=True)
class DivergencePenalty:
    """Surrogate: DRPO's smooth penalty in place of DPPO's mask (https://arxiv.org/abs/2606.09821).

        ρ A - |A| · π_old · (ρ - 1)² / (2 ε)

    Its slope is 0 where π - π_old = ±ε with the sign of A, and pulls back beyond it. Token ratios only.
    """

    epsilon: float = 12.5  # the paper's

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """The objective per token."""
        ratio, old = _bounded_ratio(log_ratio), jnp.exp(jax.lax.stop_gradient(logprobs - log_ratio))
        return ratio * advantages - jnp.abs(advantages) * old * jnp.square(ratio - 1) / (2 * self.epsilon)

    def clipped(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Nowhere: the penalty has no edge."""
        return _nowhere(log_ratio, advantages)


def _bounded_ratio(log_ratio: jax.Array) -> jax.Array:
    """exp of a log ratio of at most 20: an infinite ratio would give a gradient of 0 · inf."""
    return jnp.exp(jnp.minimum(log_ratio, 20.0))


def _nowhere(log_ratio: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
    nowhere = jnp.zeros(jnp.broadcast_shapes(log_ratio.shape, advantages.shape), jnp.bool_)
    return nowhere, nowhere


Surrogate = Clip | CappedWeight | SoftGate | DivergenceMask | DivergencePenalty
