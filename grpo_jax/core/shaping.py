"""Rewards before they become advantages: a KL penalty per token, and a penalty on length."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.core.kl import kl_divergence
from grpo_jax.core.masking import as_float, as_mask, check_shape, select


def kl_penalised_rewards(
    scores: ArrayLike,
    logprobs: ArrayLike,
    ref_logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    kl_coef: ArrayLike,
    estimator: str = "k1",
) -> jax.Array:
    """PPO's reward per token: the distance from the reference costs at each token, the score comes at the last.

        r[t] = -kl_coef · KL[t] + (score if t is the row's last token else 0)

    From InstructGPT (https://arxiv.org/abs/2203.02155) and Ziegler et al. (https://arxiv.org/abs/1909.08593).
    The result is a constant to gradients. A row without tokens has no place for its score and is all 0.

    Args:
        scores: `[..]`, floating: one score for each row.
        logprobs: `[.., T]`, floating, of the policy that drew the tokens.
        ref_logprobs: `[.., T]`, of the reference policy.
        mask: bool `[.., T]`.
        kl_coef: the penalty's weight, a scalar; it may be traced.
        estimator: of the divergence, as in `kl_divergence`; with k1 the penalties of a row add up to its log
            probability ratio, and the expected return is the score less kl_coef times the true divergence.

    Returns:
        `[.., T]`, at least float32; 0 where the mask is False.

    Raises:
        ValueError: shapes that do not fit, an unknown estimator.
    """
    logprobs = as_float("logprobs", logprobs)
    mask = as_mask("mask", mask, logprobs.shape)
    ref_logprobs = as_float("ref_logprobs", ref_logprobs, shape=logprobs.shape).astype(logprobs.dtype)
    scores = as_float("scores", scores, shape=logprobs.shape[:-1]).astype(logprobs.dtype)
    kl_coef = jnp.asarray(kl_coef, logprobs.dtype)
    check_shape("kl_coef", kl_coef, ())
    penalty = kl_divergence(select(mask, logprobs), select(mask, ref_logprobs), estimator=estimator)
    places = jnp.arange(mask.shape[-1])
    last = mask & (places == jnp.max(jnp.where(mask, places, -1), axis=-1, keepdims=True))
    return jax.lax.stop_gradient(select(mask, -kl_coef * penalty) + select(last, scores[..., None]))


def overlong_penalty(lengths: ArrayLike, *, limit: int, buffer: int) -> jax.Array:
    """DAPO's soft punishment of long answers, counted in tokens.

        0 up to limit - buffer tokens, then down in a straight line, -1 from the limit on

    From DAPO, equation 13 (https://arxiv.org/abs/2503.14476). It is added to the reward.

    Args:
        lengths: int `[..]`, tokens of each completion, its end token included.
        limit: tokens at which the punishment is full.
        buffer: over how many tokens it grows.

    Returns:
        `[..]`, float32, from -1 to 0.
    """
    lengths = jnp.asarray(lengths)
    return jnp.clip((limit - buffer - lengths.astype(jnp.float32)) / buffer, -1.0, 0.0)
