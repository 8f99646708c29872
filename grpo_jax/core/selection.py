"""Selection of the tokens, rows and groups of an update, and their weights."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.core.advantages import as_objective_weights, groups_without_signal
from grpo_jax.core.masking import as_float, as_mask, check_choice, check_shape, count, masked_mean, select


def off_policy_mask(
    logprobs: ArrayLike, sampler_logprobs: ArrayLike, advantages: ArrayLike, mask: ArrayLike, *, threshold: float
) -> jax.Array:
    """The rows that stay where a policy has moved away from the one that sampled them.

        a row leaves if A < 0 and mean_t(log π_sampler - log π) > threshold

    Bad samples that the policy would not draw any more push it at random; good ones stay. From DeepSeek-V3.2
    (https://arxiv.org/abs/2512.02556, section 3.1), as TRL's `off_policy_mask_threshold`. Give it to `grpo_loss` as
    `token_weights`.

    Args:
        logprobs: `[.., T]`, floating: the policy's, as it is now.
        sampler_logprobs: `[.., T]`, of the policy that drew the tokens, when it drew them.
        advantages: `[..]`, or `[.., T]`, of which then tokens leave.
        mask: bool `[.., T]`.
        threshold: the largest mean over a row's tokens, in nats.

    Returns:
        bool `[.., 1]`, or `[.., T]` with advantages of tokens.

    Raises:
        ValueError: shapes that do not fit.
    """
    logprobs = as_float("logprobs", logprobs)
    mask = as_mask("mask", mask, logprobs.shape)
    sampler = as_float("sampler_logprobs", sampler_logprobs, shape=logprobs.shape).astype(logprobs.dtype)
    advantages = as_float("advantages", advantages)
    check_shape("advantages", advantages, logprobs.shape[:-1], logprobs.shape)
    advantages = advantages if advantages.shape == logprobs.shape else advantages[..., None]
    moved = masked_mean(select(mask, sampler) - select(mask, logprobs), mask, axis=-1, keepdims=True)
    return ~((advantages < 0) & (moved > threshold))


IMPORTANCE_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def high_entropy_mask(entropy: ArrayLike, mask: ArrayLike, *, share: float) -> jax.Array:
    """The tokens at which the policy is least certain: those that decide where a text goes.

        entropy[t] ≥ the (1 - share) quantile of all entropies under the mask

    From "Beyond the 80/20 Rule" (https://arxiv.org/abs/2506.01939), which trains on a share of 0.2. Give it to
    `grpo_loss` as `token_weights`: the other tokens' policy term is 0 and the denominators stay. The quantile is
    interpolated linearly and tokens equal to it are in, so there may be more than the share. It is that of the
    arrays given: ask for a whole batch at once if its parts are to agree. The selection is TRL's
    `get_high_entropy_mask`; an entropy bonus there sees the selected tokens alone, in `grpo_loss` all of them.

    Args:
        entropy: `[.., T]`, floating.
        mask: bool `[.., T]`.
        share: of the tokens, more than 0 and at most 1.

    Returns:
        bool `[.., T]`.

    Raises:
        ValueError: shapes that differ.
    """
    entropy = jax.lax.stop_gradient(as_float("entropy", entropy))
    mask = as_mask("mask", mask, entropy.shape)
    if not entropy.size:
        return mask
    ordered = jnp.sort(jnp.where(mask, entropy, jnp.inf), axis=None)
    place = (1 - share) * jnp.maximum(count(mask, dtype=entropy.dtype) - 1, 0)
    lower = jnp.floor(place).astype(jnp.int32)
    upper = jnp.ceil(place).astype(jnp.int32)
    below, above = ordered[lower], ordered[upper]
    step = select(upper > lower, above - below)  # nothing under the mask: inf - inf
    threshold = below + (place - lower.astype(place.dtype)) * step
    return mask & (entropy >= threshold)


def without_truncated(mask: ArrayLike, truncated: ArrayLike) -> jax.Array:
    """The mask without the rows that were cut off before they ended.

    Their reward judges a text that the policy did not finish; DAPO's "overlong filtering"
    (https://arxiv.org/abs/2503.14476, section 3.4). A row without tokens counts in no denominator; TRL leaves it
    in the number of rows, which makes the other rows' gradients smaller.

    Args:
        mask: bool `[.., T]`.
        truncated: bool `[..]`.

    Returns:
        bool `[.., T]`.

    Raises:
        ValueError: shapes that do not fit.
    """
    mask = as_mask("mask", mask)
    return mask & ~as_mask("truncated", truncated, mask.shape[:-1])[..., None]


def groups_with_signal(rewards: ArrayLike, *, weights: Sequence[float] | ArrayLike | None = None) -> jax.Array:
    """The groups that teach something: in at least one objective two present rewards differ.

    Groups of dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476). With `[P, G, N]` it is judged per
    objective, as GDPO learns: a group whose sums are equal is kept. For GRPO give the sums, `[P, G]`.

    Args:
        rewards: `[P, G]` or `[P, G, N]`, floating; NaN is missing.
        weights: `[N]`, of `[P, G, N]` alone; an objective of weight 0 is as good as absent.

    Returns:
        bool `[P]`.

    Raises:
        ValueError: another rank, or weights that do not fit.
    """
    signal = ~groups_without_signal(rewards)
    if signal.ndim == 1:
        return signal
    return (signal & (as_objective_weights(weights, signal.shape[-1], jnp.float32) != 0)).any(axis=-1)


def importance_weights(
    old_logprobs: ArrayLike,
    sampler_logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    cap: float,
    mode: str = "token_truncate",
) -> jax.Array:
    """Weights that correct for a sampler whose probabilities are not the trainer's.

        w = min(ρ, cap)  to truncate,  w = ρ if 1 / cap ≤ ρ ≤ cap else 0  to mask,  ρ = π_old / π_sampler

    of each token, or of the whole row: the product of its tokens' ratios. An inference engine in another
    precision draws from a slightly different policy. From "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (https://fengyao.notion.site/off-policy-rl). Give them to `grpo_loss` as
    `token_weights`. They are constants to gradients. The same as TRL's `vllm_importance_sampling_mode`,
    save that a NaN from the sampler stays one; TRL takes such a token for right.

    Args:
        old_logprobs: `[.., T]`, floating: the trainer's, of the policy that drew the tokens.
        sampler_logprobs: `[.., T]`, of the same tokens as the sampler reports them.
        mask: bool `[.., T]`.
        cap: the largest weight, at least 1.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".

    Returns:
        `[.., T]` (1 where the mask is False), or `[.., 1]` for a sequence; at least float32.

    Raises:
        ValueError: shapes that differ, an unknown mode.
    """
    old = as_float("old_logprobs", old_logprobs)
    mask = as_mask("mask", mask, old.shape)
    sampler = as_float("sampler_logprobs", sampler_logprobs, shape=old.shape).astype(old.dtype)
    check_choice("mode", mode, *IMPORTANCE_MODES)
    difference = select(mask, old) - select(mask, sampler)
    if mode.startswith("sequence"):
        difference = jnp.sum(difference, axis=-1, keepdims=True)
    ratio = jax.lax.stop_gradient(jnp.exp(difference))
    if mode.endswith("truncate"):
        return jnp.minimum(ratio, cap)
    return jnp.where((ratio < 1 / cap) | (ratio > cap), 0, ratio)
