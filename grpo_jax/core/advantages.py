"""Advantage estimators: group-relative, leave-one-out, RAFT, MaxRL, max@k, GDPO, REINFORCE++, OTB; conditions.

Rewards are `[P, G]`, or `[P, G, N]` before objectives are summed. NaN marks a missing reward. It enters no statistic;
a sum of objectives replaces it by the group's mean (`sum_rewards`). A group without signal has fewer than two present
rewards, or equal ones. It gives exactly 0, not rounding noise divided by eps. Standard deviations are sample
standard deviations plus eps.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.core.masking import (
    as_float,
    as_mask,
    binary_scale,
    check_choice,
    check_shape,
    count,
    masked_mean,
    masked_std,
    masked_whiten,
    safe_divide,
    select,
    shifted,
)


class Condition(NamedTuple):
    """Objective `easy` counts only if objective `hard` reaches `threshold`."""

    easy: int  # index of the objective that is conditioned
    hard: int  # index of the objective it depends on
    threshold: float  # the least raw reward of `hard` for which `easy` counts


def _as_rewards(rewards: ArrayLike, ndim: int) -> jax.Array:
    rewards = as_float("rewards", rewards, ndim=ndim)
    if rewards.shape[1] < 2:
        raise ValueError(
            f"rewards must hold at least 2 completions per prompt (axis 1), got shape {rewards.shape}: "
            "a group of one has nothing to be compared with"
        )
    return rewards


def _signal(rewards: jax.Array) -> jax.Array:
    """Return whether the present rewards of each group differ, `[P, 1]` or `[P, 1, N]`."""
    present = ~jnp.isnan(rewards)
    lowest = jnp.min(rewards, axis=1, keepdims=True, where=present, initial=jnp.inf)
    highest = jnp.max(rewards, axis=1, keepdims=True, where=present, initial=-jnp.inf)
    return lowest < highest


def group_mean(rewards: jax.Array, present: jax.Array) -> jax.Array:
    """Return the mean of each group's present rewards, `[P, 1, N]`; 0 if there are none."""
    lowest, differences = shifted(rewards, present, axis=1)
    mean = masked_mean(differences, present, axis=1, keepdims=True)
    return select(present.any(axis=1, keepdims=True), lowest) + mean


def _centred(rewards: jax.Array) -> jax.Array:
    """Subtract the group's mean; 0 for missing rewards and groups without signal."""
    present = ~jnp.isnan(rewards) & _signal(rewards)
    _, differences = shifted(rewards, present, axis=1)
    return select(present, differences - masked_mean(differences, present, axis=1, keepdims=True))


def _scaled(rewards: jax.Array, eps: float, axis: int | None) -> jax.Array:
    """Divide `_centred` rewards by the standard deviation along an axis, or of all rewards."""
    present = ~jnp.isnan(rewards)
    scale = binary_scale(rewards, present, axis=axis)
    rewards = rewards / scale
    std = masked_std(rewards, present, axis=axis, keepdims=True)
    return safe_divide(_centred(rewards), jnp.where(std == 0, 0, std + eps / scale))


def group_advantages(rewards: ArrayLike, *, scale: str = "group", eps: float = 1e-4) -> jax.Array:
    """Compute GRPO's group-relative advantages.

        A[p, g] = (r[p, g] - mean_g r[p, :]) / (std + eps)

    From DeepSeekMath (https://arxiv.org/abs/2402.03300). Scale "none" gives Dr. GRPO
    (https://arxiv.org/abs/2503.20783); scale "batch" gives "Lite PPO" (https://arxiv.org/abs/2508.08221).

    Args:
        rewards: `[P, G]`, floating; NaN is missing.
        scale: the standard deviation to divide by: "group", "batch" (of all rewards), or "none".
        eps: added to the standard deviation.

    Returns:
        `[P, G]`, at least float32.

    Raises:
        ValueError: another rank, a group of one, an unknown scale.
    """
    rewards = _as_rewards(rewards, 2)
    check_choice("scale", scale, "group", "batch", "none")
    if scale == "none":
        return _centred(rewards)
    return _scaled(rewards, eps, axis=1 if scale == "group" else None)


def leave_one_out_advantages(rewards: ArrayLike) -> jax.Array:
    """Compute RLOO's advantages: each reward minus the mean of its group's other rewards.

        A[p, g] = r[p, g] - 1 / (G - 1) · Σ_{h ≠ g} r[p, h]

    From "Back to Basics" (https://arxiv.org/abs/2402.14740).

    Args:
        rewards: `[P, G]`, floating; NaN is missing.

    Returns:
        `[P, G]`, at least float32.

    Raises:
        ValueError: another rank, or a group of one.
    """
    rewards = _as_rewards(rewards, 2)
    number = count(~jnp.isnan(rewards), axis=1, keepdims=True, dtype=rewards.dtype)
    # r_g - mean of the other rewards = n / (n - 1) · (r_g - mean of all)
    return _centred(rewards) * safe_divide(number, jnp.maximum(number - 1, 0))


def raft_advantages(rewards: ArrayLike) -> jax.Array:
    """Compute RAFT's weights, which train on each group's best completion alone (rejection sampling, best-of-n).

        A[p, g] = 1 / number of best completions if g is one of the best of group p, else 0

    From RAFT (https://arxiv.org/abs/2304.06767). On-policy, the gradient of `grpo_loss` is 1 / G of that of `sft_loss`
    on the best completions, if all are equally long and each group has signal. With the clipped ratio it is RAFT++
    (https://arxiv.org/abs/2504.11343). RAFT itself also trains on groups without signal.

    Args:
        rewards: `[P, G]`, floating; NaN is missing.

    Returns:
        `[P, G]`, at least float32; each group with signal adds up to 1.

    Raises:
        ValueError: another rank, or a group of one.
    """
    rewards = _as_rewards(rewards, 2)
    present = ~jnp.isnan(rewards)
    best = (rewards == jnp.max(rewards, axis=1, keepdims=True, where=present, initial=-jnp.inf)) & _signal(rewards)
    return safe_divide(best.astype(rewards.dtype), count(best, axis=1, keepdims=True, dtype=rewards.dtype))


def maxrl_advantages(rewards: ArrayLike) -> jax.Array:
    """Compute MaxRL's advantages: the centred reward divided by the group's mean, for rewards of 0 or 1.

        A[p, g] = (r[p, g] - r̄) / r̄,   r̄ = mean_g r[p, :], and 0 if r̄ = 0

    Its expected gradient is that of a truncated log-likelihood of success, so rare successes get more weight. From
    "Maximum Likelihood Reinforcement Learning" (https://arxiv.org/abs/2602.02710).

    Args:
        rewards: `[P, G]`, floating, 0 or 1; NaN is missing.

    Returns:
        `[P, G]`, at least float32.

    Raises:
        ValueError: another rank, or a group of one.
    """
    rewards = _as_rewards(rewards, 2)
    return safe_divide(_centred(rewards), group_mean(rewards, ~jnp.isnan(rewards)))


def max_at_k_advantages(rewards: ArrayLike, *, k: int) -> jax.Array:
    """Compute PKPO's advantages, which maximise the expected best reward of k completions (pass@k for 0 and 1).

        A[p, g] = G · Σ_S (max S - max S \\ g) / C(G, k),   S: the sets of k completions with g
                = G · Σ_(j < rank of g) C(j - 1, k - 2) (r[p, g] - r_j) / C(G, k),   r_1 ≤ r_2 ≤ … sorted

    Their mean with ∇ log π is an unbiased gradient; max S \\ g is the baseline. From "Pass@K Policy Optimization"
    (https://arxiv.org/abs/2505.15201), with "loo minus one" as the baseline.

    Args:
        rewards: `[P, G]`, floating; NaN is missing, and G the number of present rewards.
        k: from 2 to G.

    Returns:
        `[P, G]`, at least float32; 0 in a group with fewer than k rewards.

    Raises:
        ValueError: another rank, or a k out of range.
    """
    rewards = _as_rewards(rewards, 2)
    group = rewards.shape[1]
    if not 2 <= k <= group:
        raise ValueError(f"k must be from 2 to {group}, the completions per prompt, got {k}")
    sets = [
        [n * math.comb(j, k - 2) / math.comb(n, k) if j < n >= k else 0.0 for j in range(group)]
        for n in range(group + 1)
    ]
    present = ~jnp.isnan(rewards)
    order = jnp.argsort(jnp.where(present, rewards, jnp.inf), axis=1)
    ranked = jnp.take_along_axis(select(present, rewards), order, axis=1)
    weights = jnp.asarray(sets, rewards.dtype)[present.sum(axis=1)]
    gains = (ranked[:, :, None] - ranked[:, None, :]) * weights[:, None, :]
    by_rank = jnp.sum(jnp.tril(gains, -1), axis=2)
    return select(present, jnp.take_along_axis(by_rank, jnp.argsort(order, axis=1), axis=1))


def optimal_token_advantages(
    returns: ArrayLike,
    logprobs: ArrayLike,
    sum_pi_squared: ArrayLike,
    mask: ArrayLike,
    *,
    weights: ArrayLike | None = None,
) -> jax.Array:
    """Compute the advantages of the optimal token baseline: returns minus the group's mean, weighted at each token.

        A[p, g, t] = R[p, g, t] - Σ_h W[p, h, t] R[p, h, t] / Σ_h W[p, h, t]
        W[p, g, t] = Σ_(u ≤ t) w[p, g, u]² (1 - 2 π[p, g, u] + Σ_v π_v[p, g, u]²)

    A summand of W is the squared norm of w ∇ log π by the logits: completions with a large gradient so far count most.
    h runs over the completions with a present reward and at least t tokens; masked tokens are not counted. From "The
    Optimal Token Baseline" (https://arxiv.org/abs/2602.07078). A token that no other completion reaches gets 0, as
    with verl's `handle_zero_tail=False`.

    Args:
        returns: `[P, G]`, or `[P, G, T]` from each token on, floating; NaN is missing.
        logprobs: `[P, G, T]`, floating: log π of each token.
        sum_pi_squared: `[P, G, T]`, the sum of the squared probabilities of all tokens in its place.
        mask: bool `[P, G, T]`.
        weights: w, `[P, G, T]`, of each token's policy gradient; ones by default.

    Returns:
        `[P, G, T]`, at least float32; a constant to gradients.

    Raises:
        ValueError: shapes that do not match, or a group of one.
    """
    returns = _as_rewards(returns, 2 if jnp.ndim(returns) == 2 else 3)
    logprobs = as_float("logprobs", logprobs, ndim=3)
    returns = jnp.broadcast_to(returns[..., None] if returns.ndim == 2 else returns, logprobs.shape)
    mask = as_mask("mask", mask, logprobs.shape) & ~jnp.isnan(returns)
    weights = 1.0 if weights is None else select(mask, as_float("weights", weights, shape=mask.shape))
    squares = as_float("sum_pi_squared", sum_pi_squared, shape=mask.shape)
    norms = select(mask, 1 - 2 * jnp.exp(select(mask, logprobs)) + select(mask, squares)) * jnp.square(weights)
    order = jnp.argsort(~mask, axis=-1)  # compare the t-th tokens of the policy
    energy = jnp.cumsum(jnp.maximum(norms, 0), axis=-1)
    mask, returns, energy = (jnp.take_along_axis(x, order, axis=-1) for x in (mask, returns, energy))
    _, differences = shifted(returns, mask, axis=1)
    energy = select(mask, energy)
    total = jnp.sum(energy, axis=1, keepdims=True)
    baseline = safe_divide(jnp.sum(energy * differences, axis=1, keepdims=True), total)
    advantages = select(mask & (total > 0), differences - baseline)
    return jax.lax.stop_gradient(jnp.take_along_axis(advantages, jnp.argsort(order, axis=-1), axis=-1))


def distillation_advantages(teacher_logprobs: ArrayLike, logprobs: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Compute the advantages of on-policy distillation: each token's log ratio of teacher to policy.

        A[t] = log π_teacher - log π,  a constant to gradients

    Summed over tokens that the policy sampled, the policy gradient is that of the per-token -KL(π ‖ π_teacher)
    (https://arxiv.org/abs/2306.13649; TRL's and verl's k1).

    Args:
        teacher_logprobs: `[.., T]`, floating, of the policy's tokens.
        logprobs: `[.., T]`, of the trained policy.
        mask: bool `[.., T]`.

    Returns:
        `[.., T]`, at least float32; 0 where the mask is False.

    Raises:
        ValueError: shapes that differ.
    """
    teacher = as_float("teacher_logprobs", teacher_logprobs)
    logprobs = as_float("logprobs", logprobs, shape=teacher.shape).astype(teacher.dtype)
    mask = as_mask("mask", mask, teacher.shape)
    return jax.lax.stop_gradient(select(mask, teacher) - select(mask, logprobs))


def batch_whitened_advantages(rewards: ArrayLike, *, centre: str = "batch", eps: float = 1e-4) -> jax.Array:
    """Compute REINFORCE++'s advantages: rewards whitened over the whole batch.

        A[p, g] = (c[p, g] - mean(c)) / (std(c) + eps)

    With `centre="batch"`, c is the reward. With `"group"`, c is the reward minus its group's mean: the paper's
    REINFORCE++-baseline. From https://arxiv.org/abs/2501.03262. Each completion counts once. Under "group", a group
    without signal gives exactly 0, and its zeros count in the standard deviation, as in `gdpo_advantages`.

    The paper's reward has a KL penalty at each token. For that form, whiten the returns over tokens:
    `masked_whiten(discounted_returns(kl_penalised_rewards(…), gamma=1.0, mask=mask), mask)`.

    Args:
        rewards: `[P, G]`, floating; NaN is missing. G may be 1 with "batch".
        centre: "batch" or "group".
        eps: added to the standard deviation.

    Returns:
        `[P, G]`, at least float32.

    Raises:
        ValueError: another rank, a group of one under "group", an unknown centre.
    """
    check_choice("centre", centre, "batch", "group")
    rewards = _as_rewards(rewards, 2) if centre == "group" else as_float("rewards", rewards, ndim=2)
    present = ~jnp.isnan(rewards)
    if centre == "batch":
        return masked_whiten(rewards, present, eps=eps)
    return select(present & _signal(rewards), masked_whiten(_centred(rewards), present, eps=eps))


SUM_ESTIMATORS: dict[str, Callable[..., jax.Array]] = {
    "grpo": group_advantages,
    "rloo": leave_one_out_advantages,
    "raft": raft_advantages,
    "max_at_k": max_at_k_advantages,
    "maxrl": maxrl_advantages,
    "batch": batch_whitened_advantages,
}
"""Estimators of summed rewards `[P, G]` by their names in a config."""


def as_objective_weights(weights: Sequence[float] | ArrayLike | None, objectives: int, dtype) -> jax.Array:
    """Return the objectives' weights, `[N]`; ones by default. ValueError for another length."""
    if weights is None:
        return jnp.ones(objectives, dtype)
    weights = jnp.asarray(weights, dtype)
    check_shape("weights", weights, (objectives,))
    return weights


def sum_rewards(rewards: ArrayLike, *, weights: Sequence[float] | ArrayLike | None = None) -> jax.Array:
    """Return the weighted sum over the objectives, as GRPO uses it.

        s[p, g] = Σ_n w[n] · r'[p, g, n],   r' = r, or if r is missing the mean of the present r[p, :, n]

    A failed reward thus neither punishes nor rewards; 0 would be a reward like any other. An objective that is
    missing in a whole group adds nothing to its rows. An objective of weight 0 counts as absent.

    Args:
        rewards: `[P, G, N]`, floating; NaN is missing.
        weights: `[N]`; ones by default.

    Returns:
        `[P, G]`; NaN if every objective of non-zero weight is missing.

    Raises:
        ValueError: another rank, or weights of another length.
    """
    rewards = as_float("rewards", rewards, ndim=3)
    weights = as_objective_weights(weights, rewards.shape[-1], rewards.dtype)
    present = ~jnp.isnan(rewards) & (weights != 0)
    total = jnp.sum(jnp.where(present, rewards, group_mean(rewards, present)) * weights, axis=-1)
    return jnp.where(present.any(axis=-1), total, jnp.nan)


def gdpo_advantages(
    rewards: ArrayLike,
    *,
    weights: Sequence[float] | ArrayLike | None = None,
    eps: float = 1e-4,
    whiten: str | None = "sequence",
    mask: ArrayLike | None = None,
) -> jax.Array:
    """Compute GDPO's advantages: each objective is normalised in its group before the objectives are summed.

        A[p, g] = Σ_n w[n] · (r[p, g, n] - mean_g r[p, :, n]) / (std_g r[p, :, n] + eps)

    They are then whitened over the batch, (A - mean) / (std + eps). Different combinations of rewards with the same
    sum stay different. From "GDPO" (https://arxiv.org/abs/2601.05242). Published implementations whiten differently:
    `whiten="sequence"` counts each completion once, `"token"` counts each of its tokens. A row without any reward is
    0 and does not count. A row of a group without signal in any objective is 0 too, and its zero counts.

    Args:
        rewards: `[P, G, N]`, floating; NaN is missing.
        weights: `[N]`; ones by default. An objective of weight 0 counts as absent.
        eps: added to the standard deviations.
        whiten: "sequence", "token", or None.
        mask: bool `[P, G, T]`, the tokens of each completion; needed for "token". Rows without a token do not
            count in the whitening, and get 0.

    Returns:
        `[P, G]`, at least float32.

    Raises:
        ValueError: another rank, a group of one, weights of another length, an unknown `whiten`, a missing mask or
            one of another shape.
    """
    rewards = _as_rewards(rewards, 3)
    check_choice("whiten", whiten, "sequence", "token", None)
    if whiten == "token" and mask is None:
        raise ValueError("mask must be given for whiten='token': it says how many tokens each row has")
    weights = as_objective_weights(weights, rewards.shape[-1], rewards.dtype)
    counted = weights != 0
    terms = _scaled(jnp.where(counted, rewards, jnp.nan), eps, axis=1) * weights
    rows = (~jnp.isnan(rewards) & counted).any(axis=-1)
    alive = (_signal(rewards) & counted).any(axis=-1)
    votes = jnp.ones(rows.shape, rewards.dtype)
    if mask is not None:
        mask = as_mask("mask", mask, (*rows.shape, *jnp.shape(mask)[2:3]))
        rows = rows & mask.any(axis=-1)
        votes = count(mask, axis=-1, dtype=rewards.dtype) if whiten == "token" else votes
    advantages = select(rows & alive, jnp.sum(terms, axis=-1))
    if whiten is None:
        return advantages
    noise = 8 * jnp.finfo(terms.dtype).eps * jnp.max(jnp.sum(jnp.abs(terms), axis=-1))
    return select(rows & alive, _whitened(advantages, select(rows, votes), eps, noise))


def _whitened(x: jax.Array, votes: jax.Array, eps: float, noise: jax.Array) -> jax.Array:
    """Whiten x, (x - mean) / (std + eps), counting each place `votes` times; 0 if std is within rounding `noise`."""
    number = jnp.sum(votes)
    centred = x - safe_divide(jnp.sum(votes * x), number)
    std = jnp.sqrt(safe_divide(jnp.sum(votes * jnp.square(centred)), jnp.maximum(number - 1, 0)))
    # Objectives that cancel (weights 1 and -1, or opposed rewards) leave rounding errors; do not amplify them.
    return safe_divide(centred, jnp.where(std <= noise, 0, std + eps))


def groups_without_signal(rewards: ArrayLike) -> jax.Array:
    """Return the groups without signal: fewer than two present rewards, or equal ones.

    The test is per objective: GDPO can still learn from a group whose summed rewards are equal.

    Args:
        rewards: `[P, G]` or `[P, G, N]`, floating; NaN is missing.

    Returns:
        bool `[P]` or `[P, N]`.

    Raises:
        ValueError: another rank.
    """
    rewards = as_float("rewards", rewards)
    if rewards.ndim not in (2, 3):
        raise ValueError(f"rewards must be [P, G] or [P, G, N], got shape {rewards.shape}")
    return ~jnp.squeeze(_signal(rewards), axis=1)


def _chains(conditions: Sequence[Condition], objectives: int) -> dict[int, set[tuple[int, float]]]:
    """Return all (hard, threshold) pairs that each easy objective depends on, along the whole chain."""
    waits: dict[int, set[tuple[int, float]]] = {}
    for easy, hard, threshold in conditions:
        if not (0 <= easy < objectives and 0 <= hard < objectives):
            raise ValueError(f"conditions: indices must be in 0..{objectives - 1}, got {easy} and {hard}")
        waits.setdefault(int(easy), set()).add((int(hard), float(threshold)))

    def follow(easy: int, path: tuple[int, ...]) -> set[tuple[int, float]]:
        if easy in path:
            raise ValueError(f"conditions must not form a cycle, got {' -> '.join(map(str, (*path, easy)))}")
        direct = waits.get(easy, set())
        return direct.union(*(follow(hard, (*path, easy)) for hard, _ in direct))

    return {easy: follow(easy, ()) for easy in waits}


def condition_rewards(rewards: ArrayLike, conditions: Sequence[Condition]) -> jax.Array:
    """Count an easy objective only if its hard objective reaches the threshold.

        r'[p, g, easy] = r[p, g, easy] if r[p, g, hard] ≥ threshold else min(0, lowest present r[p, :, easy])

    For non-negative rewards this is the paper's 0. For penalties, 0 would be the best value and would reward missing
    the condition; the group's lowest value never does.

    Conditions compare raw rewards. They may form chains: if `a` depends on `b` and `b` on `c`, `a` counts only if
    both thresholds are reached. An easy objective is missing if its own reward or any reward of its chain is missing.
    From "GDPO" (https://arxiv.org/abs/2601.05242).

    Args:
        rewards: `[P, G, N]`, floating; NaN is missing.
        conditions: any number of them; several on one easy objective must all hold.

    Returns:
        `[P, G, N]`, at least float32.

    Raises:
        ValueError: another rank, an index out of range, conditions that form a cycle.
    """
    rewards = as_float("rewards", rewards, ndim=3)
    if not conditions:
        return rewards
    columns = [rewards[..., n] for n in range(rewards.shape[-1])]
    lowest = jnp.min(rewards, axis=1, keepdims=True, where=~jnp.isnan(rewards), initial=0)
    for easy, waits in _chains(conditions, rewards.shape[-1]).items():
        column = rewards[..., easy]
        missing = jnp.isnan(column)
        reached = jnp.ones_like(missing)
        for hard, threshold in sorted(waits):
            missing = missing | jnp.isnan(rewards[..., hard])
            reached = reached & (rewards[..., hard] >= threshold)
        columns[easy] = jnp.where(missing, jnp.nan, jnp.where(reached, column, lowest[..., easy]))
    return jnp.stack(columns, axis=-1)
