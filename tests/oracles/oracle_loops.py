"""The cases of oracle.py whose oracle is a slow NumPy loop; the loops stand in the tests that run them."""

import numpy as np
from core.test_advantages import loop_gdpo, loop_group
from core.test_returns import episodes, loop_gae, loop_returns
from core.test_shaping import loop_rewards
from oracles.loss_loops import CHOICES, EXTRAS, loop_loss
from oracles.oracle import Case, Compared, policy_batch

from grpo_jax.core.advantages import Condition, condition_rewards, gdpo_advantages, group_advantages, sum_rewards
from grpo_jax.core.losses import grpo_loss
from grpo_jax.core.returns import discounted_returns, gae_advantages
from grpo_jax.core.selection import truncated_importance_weights
from grpo_jax.core.shaping import AdaptiveKL, kl_penalised_rewards

WEIGHTS = (2.0, -0.5)


def rewards_of(seed, dtype):
    """In quarters, with ties, some missing; and a mask of tokens."""
    random = np.random.default_rng(seed)
    rewards = random.integers(-8, 9, (4, 5, 2)) / 4
    rewards[random.random(rewards.shape) < 0.2] = np.nan
    return rewards.astype(dtype), random.random((4, 5, 3)) > 0.4


def at_group_mean(rewards):
    """Each missing reward as the mean of the others in its group, 0 where there are none."""
    filled = rewards.astype(np.float64)
    for p, g, n in np.argwhere(np.isnan(rewards)):
        others = [r for r in rewards[p, :, n] if not np.isnan(r)]
        filled[p, g, n] = sum(others) / len(others) if others else 0
    return filled


def group(scale):
    def run(seed, dtype):
        rewards = rewards_of(seed, dtype)[0][..., 0]
        return Compared((group_advantages(rewards, scale=scale, eps=1e-2), loop_group(rewards, scale, 1e-2)))

    return Case("group_advantages", f"scale {scale}, missing rewards", "loop", run)


def gdpo(whiten):
    def run(seed, dtype):
        rewards, mask = rewards_of(seed, dtype)
        ours = gdpo_advantages(rewards, weights=WEIGHTS, eps=1e-2, whiten=whiten, mask=mask)
        return Compared((ours, loop_gdpo(rewards, WEIGHTS, 1e-2, whiten, mask)))

    return Case("gdpo_advantages", f"whiten {whiten}, missing rewards", "loop", run)


def summed(seed, dtype):
    rewards, _ = rewards_of(seed, dtype)
    theirs, filled = np.full(rewards.shape[:2], np.nan), at_group_mean(rewards)
    for p, g in np.ndindex(theirs.shape):
        if not np.isnan(rewards[p, g]).all():
            theirs[p, g] = sum(w * r for w, r in zip(WEIGHTS, filled[p, g], strict=True))
    return Compared((sum_rewards(rewards, weights=WEIGHTS), theirs))


def conditioned(seed, dtype):
    rewards, _ = rewards_of(seed, dtype)
    theirs = rewards.astype(np.float64)
    for p, g in np.ndindex(theirs.shape[:2]):
        easy, hard = rewards[p, g]
        theirs[p, g, 0] = np.nan if np.isnan(easy) or np.isnan(hard) else (easy if hard >= 0.5 else 0)
    return Compared((condition_rewards(rewards, [Condition(0, 1, 0.5)]), theirs))


def steps(seed, dtype):
    parts = episodes(seed, dtype)
    wide = {name: np.asarray(part, np.float64 if part.dtype == dtype else part.dtype) for name, part in parts.items()}
    return parts, wide


def returns(seed, dtype):
    parts, wide = steps(seed, dtype)
    ours = discounted_returns(parts["rewards"], discount=parts["discount"], mask=parts["mask"])
    return Compared((ours, loop_returns(wide["rewards"], wide["discount"], wide["mask"])))


def gae(seed, dtype):
    parts, wide = steps(seed, dtype)
    names = "discount", "trace", "mask", "boundary", "next_values"
    ours = gae_advantages(parts["rewards"], parts["values"], **{name: parts[name] for name in names})
    return Compared((ours, loop_gae(wide, wide["mask"], wide["boundary"], wide["next_values"])))


def penalised(estimator):
    def run(seed, dtype):
        parts = policy_batch(seed, dtype)
        arrays = parts["advantages"], parts["logprobs"], parts["ref"], parts["mask"]
        ours = kl_penalised_rewards(*arrays, kl_coef=0.3, estimator=estimator)
        return Compared((ours, loop_rewards(*arrays, 0.3, estimator)))

    return Case("kl_penalised_rewards", estimator, "loop", run)


def adaptive(seed, dtype):
    random = np.random.default_rng(seed)
    ours, theirs = [], []
    controller = AdaptiveKL(target=6.0, horizon=10_000)
    for coef, observed in random.uniform(0.1, 12, (20, 2)).astype(dtype):
        ours.append(controller.update(coef, observed, 256))
        error = min(max(float(observed) / 6.0 - 1, -0.2), 0.2)
        theirs.append(float(coef) * (1 + error * 256 / 10_000))
    return Compared((np.array(ours), np.array(theirs)))


def importance(level):
    def run(seed, dtype):
        parts = policy_batch(seed, dtype)
        old, sampler, mask = parts["old"], parts["sampler"], parts["mask"]
        ours = truncated_importance_weights(old, sampler, mask, cap=1.3, level=level)
        theirs = np.ones(ours.shape)
        for row, places in enumerate(mask):
            ratios = [np.exp(float(old[row, t]) - float(sampler[row, t])) for t in np.flatnonzero(places)]
            if level == "token":
                theirs[row, places] = np.minimum(ratios, 1.3)
            else:
                theirs[row] = min(np.prod(ratios), 1.3)
        return Compared((ours, theirs))

    return Case("truncated_importance_weights", level, "loop", run)


def loss(name, choices, extras):
    def run(seed, dtype):
        parts = policy_batch(seed, dtype)
        wide = {key: part if part.dtype == bool else part.astype(np.float64) for key, part in parts.items()}
        given = {"ref_logprobs": parts["ref"], "entropy": parts["entropy"]} | extras
        value, _ = grpo_loss(
            parts["logprobs"], parts["old"], parts["advantages"], parts["mask"], **choices, **given
        )  # fmt: skip
        return Compared((value, loop_loss(wide, choices, **extras)))

    return Case("grpo_loss", name + (", KL corrected, entropy bonus" if extras else ""), "loop", run)


CASES = [
    *(group(scale) for scale in ("group", "batch", "none")),
    *(gdpo(whiten) for whiten in ("sequence", "token", None)),
    Case("sum_rewards", "weights, missing rewards", "loop", summed),
    Case("condition_rewards", "missing rewards", "loop", conditioned),
    Case("discounted_returns", "terminations, mask", "loop", returns),
    Case("gae_advantages", "terminations, mask, boundaries, next values", "loop", gae),
    *(penalised(estimator) for estimator in ("k1", "k2", "k3")),
    Case("AdaptiveKL", "update", "loop", adaptive),
    *(importance(level) for level in ("token", "sequence")),
    *(loss(choice.id, choice.values[0], extras) for choice in CHOICES for extras in ({}, EXTRAS)),
]
