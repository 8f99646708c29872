"""KL divergence from a reference policy: its estimators and the penalty in the loss."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.core.masking import as_float, check_choice

ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class KLPenalty:
    """Penalty on the KL divergence from a reference policy, aggregated like the policy loss.

    Attributes:
        coef: weight of the penalty.
        estimator: "k1", "k2" or "k3". Uncorrected and on-policy, the expected gradient of k1 is 0. That of k2 is the
            gradient of KL(π ‖ π_ref), and that of k3 the gradient of KL(π_ref ‖ π).
        corrected: multiplies by the token's ratio, whose gradient makes the estimate unbiased off-policy too
            (https://arxiv.org/abs/2512.02556, section 3.1).
        straight_through: the value of the estimator with the gradient of k2, which is right on-policy (verl's
            "k1+" and "k3+").
    """

    coef: float
    estimator: str = "k3"
    corrected: bool = False
    straight_through: bool = False

    def __post_init__(self) -> None:
        if self.corrected and self.straight_through:
            raise ValueError(
                "corrected and straight_through must not both be True: each fixes the gradient by itself, "
                "together they count it twice"
            )

    def per_token(self, logprobs: jax.Array, old_logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
        """Return the penalty at each token, without the weight; all arguments have one shape."""
        estimate = kl_divergence(logprobs, ref_logprobs, estimator=self.estimator)
        if self.corrected:
            return estimate * jnp.exp(logprobs - old_logprobs)
        if self.straight_through:
            carrier = kl_divergence(logprobs, ref_logprobs, estimator="k2")
            return jax.lax.stop_gradient(estimate) + (carrier - jax.lax.stop_gradient(carrier))
        return estimate


def kl_divergence(logprobs: ArrayLike, ref_logprobs: ArrayLike, *, estimator: str = "k3") -> jax.Array:
    """Estimate KL(policy ‖ reference) from the log-probabilities of tokens that the policy sampled.

    With d = log π_ref - log π:

        k1 = -d,  k2 = d² / 2,  k3 = exp(d) - d - 1

    The values of k1 and k3 are unbiased. k3 is never negative and has less variance near the reference
    (http://joschu.net/blog/kl-approx.html). For their gradients see `KLPenalty`.

    Args:
        logprobs: any shape, floating.
        ref_logprobs: the same shape.
        estimator: "k1", "k2" or "k3".

    Returns:
        The estimate of each element, at least float32.

    Raises:
        ValueError: shapes that differ, or an unknown estimator.
    """
    check_choice("estimator", estimator, *ESTIMATORS)
    logprobs = as_float("logprobs", logprobs)
    ref_logprobs = as_float("ref_logprobs", ref_logprobs, shape=logprobs.shape)
    difference = ref_logprobs.astype(logprobs.dtype) - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    value = jnp.expm1(difference) - difference
    return value - jax.lax.stop_gradient(jnp.minimum(value, 0))  # rounding near 0 may be negative
