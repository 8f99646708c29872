"""Per-token surrogates of a policy loss: clipped ratio, capped or smooth weight, soft gate, and divergence bounds.

A surrogate is any object with the two methods `objective` and `clipped`; here each is a frozen dataclass. Arguments:
`log_ratio` (log π / π_old, `[.., T]`, or `[.., 1]` for one ratio per row), `logprobs` `[.., T]`, and `advantages`
(`[.., 1]` or `[.., T]`).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Clip:
    """Surrogate: PPO's clipped ratio (https://arxiv.org/abs/1707.06347).

        min(ρ A, clip(ρ, 1 - low, 1 + high) A); with a dual clip, at least dual · A for A < 0

    Attributes:
        low: clipping range of the ratio below 1.
        high: clipping range above 1 (DAPO's "clip higher" if larger than `low`).
        dual: upper bound of the ratio for negative advantages, more than 1 (https://arxiv.org/abs/1912.09729). TRL's
            `delta` bounds both signs; above 1 + high, its normal range, both agree.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual is the largest ratio itself and must be more than 1, got {self.dual}")

    def bounded(self, log_ratio: jax.Array, advantages: jax.Array) -> jax.Array:
        """Return the log ratio, clipped on the side that the advantage's sign clips."""
        lower = jnp.where(advantages < 0, jnp.log1p(-self.low), -jnp.inf)
        dual = jnp.inf if self.dual is None else jnp.log(self.dual)
        upper = jnp.where(advantages < 0, dual, jnp.log1p(self.high))
        log_ratio, lower, upper = jnp.broadcast_arrays(log_ratio, lower, upper)
        return jnp.where(log_ratio < lower, lower, jnp.where(log_ratio > upper, upper, log_ratio))

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """Return the objective per token."""
        # Bound before the exponential: an infinite ratio would give a gradient of 0 · inf.
        return jnp.exp(self.bounded(log_ratio, advantages)) * advantages

    def clipped(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the tokens whose gradient the lower bound stops, and those of the upper bound."""
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

    cap: float = 5.0  # largest weight (1 + ε_high in the paper's notation), more than 1

    def __post_init__(self) -> None:
        if not self.cap > 1:
            raise ValueError(f"cap is the largest weight itself and must be more than 1, got {self.cap}")

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """Return the objective per token."""
        return _capped(log_ratio, self.cap) * advantages * logprobs

    def clipped(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return no tokens for the lower bound, and the tokens whose weight is capped."""
        high = (log_ratio > jnp.log(self.cap)) & (advantages != 0)
        return jnp.zeros_like(high), high


def _clips_nothing(
    self: object, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return no tokens: the surrogate is smooth."""
    nowhere = jnp.zeros(jnp.broadcast_shapes(log_ratio.shape, advantages.shape), jnp.bool_)
    return nowhere, nowhere


@dataclass(frozen=True)
class SoftGate:
    """Surrogate: SAPO's smooth gate in place of clipping (https://arxiv.org/abs/2511.20347).

        4 / τ · sigmoid(τ (ρ - 1)) · A,  τ = positive where A > 0, else negative

    Its slope is 1 at ρ = 1 and falls off on both sides.
    """

    positive: float = 1.0  # τ for positive advantages
    negative: float = 1.05  # τ for the others; larger, since their gradients raise all other tokens

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """Return the objective per token."""
        temperature = jnp.where(advantages > 0, self.positive, self.negative).astype(log_ratio.dtype)
        ratio = _bounded_ratio(log_ratio)  # the gate is flat far below this bound
        return 4 / temperature * jax.nn.sigmoid(temperature * (ratio - 1)) * advantages

    clipped = _clips_nothing


@dataclass(frozen=True)
class GammaWeight:
    """Surrogate: REINFORCE with VESPO's smooth weight in place of clipping (https://arxiv.org/abs/2602.10693).

        stop_gradient(exp(λ + k · log ρ - λ ρ)) · A · log π,  (k, λ) by the sign of A

    The weight is 1 at ρ = 1, largest at ρ = k / λ, and falls to 0 on both sides. For one ratio per row, its product.
    """

    k_positive: float = 2.0  # k where A ≥ 0
    lambda_positive: float = 3.0
    k_negative: float = 3.0  # k where A < 0
    lambda_negative: float = 2.0

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """Return the objective per token."""
        k = jnp.where(advantages < 0, self.k_negative, self.k_positive).astype(log_ratio.dtype)
        decay = jnp.where(advantages < 0, self.lambda_negative, self.lambda_positive).astype(log_ratio.dtype)
        weight = jnp.exp(decay + k * log_ratio - decay * _bounded_ratio(log_ratio))
        return jax.lax.stop_gradient(weight) * advantages * logprobs

    clipped = _clips_nothing


@dataclass(frozen=True)
class DivergenceMask:
    """Surrogate: DPPO's mask on the change of probability, its Binary-TV (https://arxiv.org/abs/2602.04879).

        stop_gradient(min(ρ, cap)) · A · log π, but 0 if A > 0 and π - π_old > high, or A < 0 and π - π_old < -low

    Ratio clipping hits rare tokens first, whose probability hardly changes. This mask bounds the largest changes of
    probability. Below it a rare token's ratio may be very large, so the weight has a cap. Token ratios only.
    """

    low: float = 0.15  # largest decrease of a probability
    high: float = 0.15  # largest increase
    cap: float = 20.0  # largest weight, as in verl

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """Return the objective per token."""
        low, high = self.clipped(log_ratio, logprobs, advantages)
        return jnp.where(low | high, 0, _capped(log_ratio, self.cap) * advantages * logprobs)

    def clipped(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the tokens masked for a decrease of probability, and those masked for an increase."""
        change = jnp.exp(logprobs) - jnp.exp(logprobs - log_ratio)
        return (advantages < 0) & (change < -self.low), (advantages > 0) & (change > self.high)


@dataclass(frozen=True)
class DivergencePenalty:
    """Surrogate: DRPO's smooth penalty in place of DPPO's mask (https://arxiv.org/abs/2606.09821).

        ρ A - |A| · π_old · (ρ - 1)² / (2 ε)

    Its slope is 0 at π - π_old = ±ε, with the sign of A, and reverses beyond it. |π - π_old| is at most 1, so the
    paper's default only makes gradients up to 8 % smaller or larger. Token ratios only.
    """

    epsilon: float = 12.5  # the paper's default

    def objective(self, log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
        """Return the objective per token."""
        ratio, old = _bounded_ratio(log_ratio), jnp.exp(jax.lax.stop_gradient(logprobs - log_ratio))
        return ratio * advantages - jnp.abs(advantages) * old * jnp.square(ratio - 1) / (2 * self.epsilon)

    clipped = _clips_nothing


def _capped(log_ratio: jax.Array, cap: float) -> jax.Array:
    """Return min(ρ, cap), a constant to gradients."""
    return jnp.minimum(jnp.exp(jax.lax.stop_gradient(log_ratio)), cap)


def _bounded_ratio(log_ratio: jax.Array) -> jax.Array:
    """Return exp(min(log ratio, 20)): an infinite ratio would give a gradient of 0 · inf."""
    return jnp.exp(jnp.minimum(log_ratio, 20.0))


Surrogate = Clip | CappedWeight | SoftGate | GammaWeight | DivergenceMask | DivergencePenalty
