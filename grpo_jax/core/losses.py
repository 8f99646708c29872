"""Policy losses on token log-probabilities, composed of independent choices.

`grpo_loss` takes a surrogate, a ratio level, an aggregation, a KL penalty and an entropy bonus. `PRESETS` names the
combinations that papers describe. A loss is a sum divided by a denominator of the whole update (`loss_normaliser`),
and a metric is a `Mean`, (total, weight). The parts of a batch therefore add up to the batch, however it is split.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.core.aggregation import (
    Aggregation,
    FixedLength,
    Mean,
    Normaliser,
    aggregate,
    as_normaliser,
    loss_normaliser,
)
from grpo_jax.core.kl import KLPenalty, kl_divergence
from grpo_jax.core.masking import as_float, as_mask, check_choice, check_shape, count, masked_mean, safe_divide, select
from grpo_jax.core.surrogates import (
    CappedWeight,
    Clip,
    DivergenceMask,
    DivergencePenalty,
    GammaWeight,
    SoftGate,
    Surrogate,
)


class GRPOMetrics(NamedTuple):
    """Metrics of one `grpo_loss` call; each is a `Mean` over tokens, so the parts of a batch add up."""

    policy_loss: Mean  # the aggregated surrogate, without KL and entropy
    kl: Mean  # estimated KL divergence from the reference; weight 0 without a reference
    entropy: Mean  # weight 0 when not given
    ratio: Mean  # π / π_old
    old_kl: Mean  # k3 estimate of the KL divergence from the old policy
    clip_low: Mean  # share of tokens whose gradient the lower bound stops
    clip_high: Mean  # share of tokens whose gradient (or weight) the upper bound stops
    advantage: Mean


class EntropyControl(NamedTuple):
    """Entropy coefficients, scalars: the adaptive one, and the one of the next update."""

    coef: jax.Array
    applied: jax.Array


class SFTMetrics(NamedTuple):
    """Metrics of one `sft_loss` call."""

    loss: Mean  # negative log-likelihood, mean over tokens


PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, https://arxiv.org/abs/2402.03300. Mean over rows of each row's mean over its tokens. Its
    # experiments add a KL penalty of 0.04 (k3).
    "grpo": {"surrogate": Clip(0.2, 0.2), "ratio": "token", "aggregation": "sequence"},
    # Dr. GRPO, https://arxiv.org/abs/2503.20783. Sum over tokens / (rows · token budget): neither length
    # nor the group's standard deviation (advantage scale "none") biases the gradient.
    "dr_grpo": {"surrogate": Clip(0.2, 0.2), "ratio": "token", "aggregation": FixedLength()},
    # DAPO, https://arxiv.org/abs/2503.14476. Sum over tokens / tokens of the whole update; a higher upper
    # bound ("clip higher").
    "dapo": {"surrogate": Clip(0.2, 0.28), "ratio": "token", "aggregation": "token"},
    # BNPO, TRL's name for a token mean after https://arxiv.org/abs/2506.02864. TRL divides by the tokens of
    # one micro-batch, this project by those of the update: only the bounds differ from DAPO's.
    "bnpo": {"surrogate": Clip(0.2, 0.2), "ratio": "token", "aggregation": "token"},
    # GSPO, https://arxiv.org/abs/2507.18071. One length-normalised ratio per row; mean over rows.
    "gspo": {"surrogate": Clip(3e-4, 4e-4), "ratio": "sequence", "aggregation": "sequence"},
    # LUSPO, https://arxiv.org/abs/2602.05261. GSPO's loss times the row's length; mean over rows.
    "luspo": {"surrogate": Clip(2e-3, 2.5e-3), "ratio": "sequence", "aggregation": FixedLength(1)},
    # GMPO, https://arxiv.org/abs/2507.20673. The geometric mean of a row's clipped ratios; mean over rows.
    "gmpo": {"surrogate": Clip(1 - math.exp(-0.4), math.exp(0.4) - 1), "ratio": "geometric", "aggregation": "sequence"},
    # CISPO, MiniMax-M1, https://arxiv.org/abs/2506.13585. Sum over tokens / tokens of the whole update; the
    # cap follows ScaleRL, https://arxiv.org/abs/2510.13786.
    "cispo": {"surrogate": CappedWeight(5.0), "ratio": "token", "aggregation": "token"},
    # SAPO, https://arxiv.org/abs/2511.20347. Mean over rows of each row's mean over its tokens.
    "sapo": {"surrogate": SoftGate(1.0, 1.05), "ratio": "token", "aggregation": "sequence"},
    # VESPO, https://arxiv.org/abs/2602.10693. One ratio per row, the product of its tokens'. Sum over tokens /
    # tokens of the whole update, as in TRL.
    "vespo": {"surrogate": GammaWeight(), "ratio": "product", "aggregation": "token"},
    # DPPO, https://arxiv.org/abs/2602.04879. The Binary-TV mask with the bounds of verl's recipe. Sum over tokens /
    # tokens of the whole update.
    "dppo_tv": {"surrogate": DivergenceMask(0.15, 0.15, 20.0), "ratio": "token", "aggregation": "token"},
    # DRPO, https://arxiv.org/abs/2606.09821, section 4. Sum over tokens / tokens of the whole update.
    "drpo": {"surrogate": DivergencePenalty(12.5), "ratio": "token", "aggregation": "token"},
}
"""Loss choices by name: `grpo_loss(…, **PRESETS["dapo"])`. A KL penalty is added apart: `kl=KLPenalty(0.04)`."""

PRESET_SCALES: dict[str, str] = {name: "none" if name == "dr_grpo" else "group" for name in PRESETS}
"""The `scale` of `group_advantages` that belongs to each preset."""


class _Tokens(NamedTuple):
    """Checked arguments of `grpo_loss`, `[.., T]` and 0 where masked; advantages are `[.., 1]` or `[.., T]`."""

    logprobs: jax.Array
    old: jax.Array
    advantages: jax.Array
    mask: jax.Array
    ref: jax.Array | None
    entropy: jax.Array | None


def _log_ratio(tokens: _Tokens, surrogate: Surrogate, ratio: str) -> jax.Array:
    """Return log π - log π_old, `[.., T]`, or `[.., 1]` for one ratio per row."""
    log_ratio = select(tokens.mask, tokens.logprobs - tokens.old)
    if ratio == "token":
        return log_ratio
    if ratio == "product":
        return jnp.sum(log_ratio, axis=-1, keepdims=True)
    if ratio == "geometric" and isinstance(surrogate, Clip):
        log_ratio = surrogate.bounded(log_ratio, tokens.advantages)
    mean = masked_mean(log_ratio, tokens.mask, axis=-1, keepdims=True)
    if tokens.advantages.shape != tokens.mask.shape:
        return mean
    # GSPO-token: the value is the row's ratio, the gradient is the token's own and gets the token's advantage.
    return select(tokens.mask, jax.lax.stop_gradient(mean) + log_ratio - jax.lax.stop_gradient(log_ratio))


def _prepare(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    ref_logprobs: ArrayLike | None,
    entropy: ArrayLike | None,
) -> _Tokens:
    """Check shapes and dtypes, and replace masked values everywhere."""
    logprobs = as_float("logprobs", logprobs)
    mask = as_mask("mask", mask, logprobs.shape)

    def same(name: str, value: ArrayLike) -> jax.Array:
        return select(mask, as_float(name, value, shape=logprobs.shape).astype(logprobs.dtype))

    advantages = jax.lax.stop_gradient(as_float("advantages", advantages).astype(logprobs.dtype))
    check_shape("advantages", advantages, logprobs.shape[:-1], logprobs.shape)
    if advantages.shape == logprobs.shape:
        advantages = select(mask, advantages)
    else:
        advantages = select(mask.any(axis=-1), advantages)[..., None]
    old = jax.lax.stop_gradient(same("old_logprobs", old_logprobs))
    ref = None if ref_logprobs is None else jax.lax.stop_gradient(same("ref_logprobs", ref_logprobs))
    entropy = None if entropy is None else same("entropy", entropy)
    return _Tokens(select(mask, logprobs), old, advantages, mask, ref, entropy)


def _as_token_weights(weights: ArrayLike, mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the weights as constants, 0 where the mask is False."""
    weights = jnp.asarray(weights)
    if weights.dtype != jnp.bool_:
        weights = as_float("token_weights", weights)
    check_shape("token_weights", weights, mask.shape, (*mask.shape[:-1], 1))
    return jax.lax.stop_gradient(select(mask, weights.astype(dtype)))


def _check_choices(surrogate, ratio, kl, ref_logprobs, entropy, entropy_coef) -> bool:
    """Refuse incompatible choices; return whether there is an entropy bonus."""
    check_choice("ratio", ratio, "token", "sequence", "geometric", "product")
    if ratio == "geometric" and not isinstance(surrogate, Clip):
        raise ValueError(f"surrogate must be a Clip with ratio 'geometric', which clips each token, got {surrogate}")
    bonus = not (isinstance(entropy_coef, (int, float)) and entropy_coef == 0)
    if kl is not None and ref_logprobs is None:
        raise ValueError("ref_logprobs must be given with a KL penalty, got None")
    if bonus and entropy is None:
        raise ValueError("entropy must be given with an entropy coefficient, got None")
    return bonus


def regularisers(
    tokens: _Tokens,
    denominators: Normaliser,
    *,
    aggregation: Aggregation,
    kl: KLPenalty | None,
    entropy_coef: float | None,
) -> list[jax.Array]:
    """Return the terms beside the policy's: the KL penalty, and the entropy bonus with a minus (None: no bonus)."""
    terms = []
    if kl is not None and tokens.ref is not None:
        penalty = kl.per_token(tokens.logprobs, tokens.old, tokens.ref)
        terms.append(kl.coef * safe_divide(aggregate(penalty, tokens.mask, aggregation), denominators.loss))
    if entropy_coef is not None and tokens.entropy is not None:
        terms.append(-(entropy_coef * safe_divide(jnp.sum(tokens.entropy), denominators.tokens)))
    return terms


def _metrics(
    tokens: _Tokens, log_ratio: jax.Array, policy_loss: Mean, *, surrogate: Surrogate, ratio: str, estimator: str
) -> GRPOMetrics:
    """Return the policy loss and the token means; one ratio per row is shown only with ratio "sequence"."""
    logprobs, old, mask = tokens.logprobs, tokens.old, tokens.mask
    number = count(mask, dtype=logprobs.dtype)

    def token_mean(values: jax.Array | None) -> Mean:
        if values is None:
            return Mean(jnp.zeros_like(number), jnp.zeros_like(number))
        values = jnp.broadcast_to(values, mask.shape).astype(logprobs.dtype)
        return Mean(jnp.sum(select(mask, values)), number)

    shown = log_ratio if ratio == "sequence" else select(mask, logprobs - old)
    low, high = surrogate.clipped(shown, logprobs, tokens.advantages)
    return GRPOMetrics(
        policy_loss=policy_loss,
        kl=token_mean(None if tokens.ref is None else kl_divergence(logprobs, tokens.ref, estimator=estimator)),
        entropy=token_mean(tokens.entropy),
        ratio=token_mean(jnp.exp(shown)),
        old_kl=token_mean(kl_divergence(old, logprobs)),
        clip_low=token_mean(low),
        clip_high=token_mean(high),
        advantage=token_mean(tokens.advantages),
    )


def grpo_loss(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    surrogate: Surrogate = Clip(),
    ratio: str = "token",
    aggregation: Aggregation = "sequence",
    normaliser: Normaliser | ArrayLike | None = None,
    kl: KLPenalty | None = None,
    ref_logprobs: ArrayLike | None = None,
    entropy: ArrayLike | None = None,
    entropy_coef: float = 0.0,
    token_weights: ArrayLike | None = None,
) -> tuple[jax.Array, GRPOMetrics]:
    """Compute the policy loss of GRPO and its variants.

        loss = aggregate(-w · surrogate(ρ, A) + kl.coef · KL) - entropy_coef · mean over tokens of the entropy

    The ratio ρ is π / π_old of the token, or one for the row: the geometric mean of its tokens' ratios (GSPO) or of
    their clipped ratios (GMPO), or their product (VESPO). Gradients reach only `logprobs` and `entropy`. Masked tokens
    and rows without tokens have no influence, even if they hold NaN; if nothing remains, the loss and its gradient are
    0. For a part of an update, pass the whole update's `normaliser`: the losses and gradients of the parts then add up.
    (https://arxiv.org/abs/2402.03300; see `PRESETS`.)

    Args:
        logprobs: `[.., T]`, floating.
        old_logprobs: `[.., T]`, of the policy that sampled the tokens.
        advantages: `[..]`, or `[.., T]`.
        mask: bool `[.., T]`.
        surrogate: `Clip`, `CappedWeight`, `SoftGate`, `GammaWeight`, `DivergenceMask` or `DivergencePenalty`.
        ratio: "token", "sequence", "geometric" (with `Clip`), or "product".
        aggregation: "sequence" (mean of row means), "token" (mean over tokens) or `FixedLength(n)`.
        normaliser: `loss_normaliser` of the whole update; that of the given mask by default. Without an entropy
            bonus, a scalar (its `loss`) is enough.
        kl: penalty, which needs `ref_logprobs`.
        ref_logprobs: `[.., T]`; without a penalty they only enter the metrics.
        entropy: `[.., T]`; without a coefficient it only enters the metrics.
        entropy_coef: weight of the entropy bonus.
        token_weights: w, `[.., T]` or `[.., 1]`, floating or bool; ones by default. Only the policy term and the
            metric `policy_loss` use them, not the penalty, the bonus or the denominators. For `high_entropy_mask`
            and `importance_weights`.

    Returns:
        (loss, metrics); the loss a scalar of at least float32.

    Raises:
        ValueError: shapes that do not match, an unknown choice, a penalty without `ref_logprobs`, a bonus
            without `entropy`.
    """
    bonus = _check_choices(surrogate, ratio, kl, ref_logprobs, entropy, entropy_coef)
    tokens = _prepare(logprobs, old_logprobs, advantages, mask, ref_logprobs, entropy)
    local = loss_normaliser(tokens.mask, aggregation, dtype=tokens.logprobs.dtype)
    whole = as_normaliser(normaliser, local, aggregation, bonus)

    log_ratio = _log_ratio(tokens, surrogate, ratio)
    objective = surrogate.objective(log_ratio, tokens.logprobs, tokens.advantages)
    policy = -jnp.broadcast_to(objective, tokens.mask.shape)
    if token_weights is not None:
        policy *= _as_token_weights(token_weights, tokens.mask, policy.dtype)
    total = aggregate(policy, tokens.mask, aggregation)
    others = regularisers(tokens, whole, aggregation=aggregation, kl=kl, entropy_coef=entropy_coef if bonus else None)
    loss = sum(others, safe_divide(total, whole.loss))

    estimator = kl.estimator if kl else "k3"
    policy_loss = Mean(total, local.loss)
    metrics = _metrics(tokens, log_ratio, policy_loss, surrogate=surrogate, ratio=ratio, estimator=estimator)
    return loss, jax.lax.stop_gradient(metrics)


def adapt_entropy_coef(
    control: EntropyControl, entropy: jax.Array, *, target: float, delta: float = 0.005
) -> EntropyControl:
    """Move the entropy coefficient after an update, towards a target entropy.

        coef ← clip(coef + delta if entropy ≤ target else coef - delta, 0, 1)

    The next update applies it if entropy ≤ target, else 0. The first update applies 0. From Skywork-OR1
    (https://arxiv.org/abs/2505.22312), as TRL 1.16's `use_adaptive_entropy`.

    Args:
        control: the coefficients of this update.
        entropy: scalar, the update's mean over tokens, in nats.
        target: the entropy to maintain.
        delta: step of the coefficient.
    """
    short = entropy <= target
    coef = jnp.clip(control.coef + jnp.where(short, delta, -delta), 0, 1)
    return EntropyControl(coef, jnp.where(short, coef, 0))


def sft_loss(
    logprobs: ArrayLike, mask: ArrayLike, *, normaliser: Normaliser | ArrayLike | None = None
) -> tuple[jax.Array, SFTMetrics]:
    """Compute the supervised loss: the mean over tokens of -log π.

    Args:
        logprobs: `[.., T]`, floating.
        mask: bool `[.., T]`, the tokens to learn.
        normaliser: the whole update's number of tokens, or its `loss_normaliser`; that of the mask by default.

    Returns:
        (loss, metrics); the loss a scalar of at least float32.

    Raises:
        ValueError: shapes that differ.
    """
    logprobs = as_float("logprobs", logprobs)
    mask = as_mask("mask", mask, logprobs.shape)
    local = loss_normaliser(mask, "token", dtype=logprobs.dtype)
    denominators = as_normaliser(normaliser, local, "token", bonus=False)
    total = -jnp.sum(select(mask, logprobs))
    return safe_divide(total, denominators.tokens), SFTMetrics(jax.lax.stop_gradient(Mean(total, local.tokens)))
