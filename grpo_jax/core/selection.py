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
    """Return the rows to keep after the policy has moved away from the policy that sampled them.

        a row is masked if A < 0 and mean_t(log π_sampler - log π) > threshold

    Bad samples that the policy has become unlikely to draw only add noise; good samples stay. A token whose difference
    is NaN adds 0 to the mean. From DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556, section 3.1), as TRL's
    `off_policy_mask_threshold`. Pass it to `grpo_loss` as `token_weights`.

    Args:
        logprobs: `[.., T]`, floating, of the current policy.
        sampler_logprobs: `[.., T]`, of the policy that sampled the tokens, at that time.
        advantages: `[..]`, or `[.., T]`, which masks single tokens.
        mask: bool `[.., T]`.
        threshold: largest allowed mean over a row's tokens, in nats.

    Returns:
        bool `[.., 1]`, or `[.., T]` with per-token advantages.

    Raises:
        ValueError: shapes that do not match.
    """
    logprobs = as_float("logprobs", logprobs)
    mask = as_mask("mask", mask, logprobs.shape)
    sampler = as_float("sampler_logprobs", sampler_logprobs, shape=logprobs.shape).astype(logprobs.dtype)
    advantages = as_float("advantages", advantages)
    check_shape("advantages", advantages, logprobs.shape[:-1], logprobs.shape)
    advantages = advantages if advantages.shape == logprobs.shape else advantages[..., None]
    difference = select(mask, sampler) - select(mask, logprobs)
    moved = masked_mean(select(~jnp.isnan(difference), difference), mask, axis=-1, keepdims=True)
    return ~((advantages < 0) & (moved > threshold))


IMPORTANCE_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def high_entropy_mask(entropy: ArrayLike, mask: ArrayLike, *, share: float) -> jax.Array:
    """Return the tokens with the highest entropy, the "forking tokens".

        entropy[t] ≥ the (1 - share) quantile of all entropies under the mask

    From "Beyond the 80/20 Rule" (https://arxiv.org/abs/2506.01939), which trains on a share of 0.2. Pass it to
    `grpo_loss` as `token_weights`: the other tokens' policy term is 0 and the denominators stay. The quantile is
    interpolated linearly and tokens equal to it are included, so the share may be exceeded. The quantile is that of
    the given arrays: call it on a whole batch, so that its parts agree. The selection is TRL's
    `get_high_entropy_mask`. TRL's entropy bonus uses only the selected tokens, `grpo_loss` uses all.

    Args:
        entropy: `[.., T]`, floating.
        mask: bool `[.., T]`.
        share: share of the tokens, more than 0 and at most 1.

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
    lower, upper = (end(place).astype(jnp.int32) for end in (jnp.floor, jnp.ceil))
    below, above = ordered[lower], ordered[upper]
    step = select(upper > lower, above - below)  # an empty mask would give inf - inf
    threshold = below + (place - lower.astype(place.dtype)) * step
    return mask & (entropy >= threshold)


def without_truncated(mask: ArrayLike, truncated: ArrayLike) -> jax.Array:
    """Return the mask without truncated completions, DAPO's "overlong filtering".

    Their reward judges an unfinished completion (https://arxiv.org/abs/2503.14476, section 3.4). A row without tokens
    counts in no denominator. TRL keeps it in the number of rows, which makes the other rows' gradients smaller.

    Args:
        mask: bool `[.., T]`.
        truncated: bool `[..]`.

    Returns:
        bool `[.., T]`.

    Raises:
        ValueError: shapes that do not match.
    """
    mask = as_mask("mask", mask)
    return mask & ~as_mask("truncated", truncated, mask.shape[:-1])[..., None]


def groups_with_signal(rewards: ArrayLike, *, weights: Sequence[float] | ArrayLike | None = None) -> jax.Array:
    """Return the groups with signal: in at least one objective two present rewards differ.

    Dynamic sampling keeps these groups (DAPO, https://arxiv.org/abs/2503.14476). With `[P, G, N]` the test is per
    objective, as for GDPO: a group with equal sums is kept. For GRPO pass the sums, `[P, G]`.

    Args:
        rewards: `[P, G]` or `[P, G, N]`, floating; NaN is missing.
        weights: `[N]`, only with `[P, G, N]`; an objective of weight 0 counts as absent.

    Returns:
        bool `[P]`.

    Raises:
        ValueError: another rank, or weights of another length.
    """
    signal = ~groups_without_signal(rewards)
    if signal.ndim == 1:
        return signal
    return (signal & (as_objective_weights(weights, signal.shape[-1], jnp.float32) != 0)).any(axis=-1)


def importance_weights(
    old_logprobs: ArrayLike, sampler_logprobs: ArrayLike, mask: ArrayLike, *, cap: float, mode: str = "token_truncate"
) -> jax.Array:
    """Compute importance weights for the mismatch between trainer and sampler.

        w = min(ρ, cap)  to truncate,  w = ρ if 1 / cap ≤ ρ ≤ cap else 0  to mask,  ρ = π_old / π_sampler

    The ratio ρ is that of each token, or the product over the whole row. An inference engine in another precision
    samples from a slightly different policy. From "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (https://fengyao.notion.site/off-policy-rl). Pass them to `grpo_loss` as `token_weights`. They are
    constants to gradients. They equal TRL's with `vllm_importance_sampling_clip_min` 1 / cap for a mask (by default it
    has none), except for a NaN from the sampler: it stays NaN here, while TRL gives such a token weight 1.

    Args:
        old_logprobs: `[.., T]`, floating: the trainer's, of the policy that sampled the tokens.
        sampler_logprobs: `[.., T]`, of the same tokens, from the sampler.
        mask: bool `[.., T]`.
        cap: largest weight, at least 1.
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
