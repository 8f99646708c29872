"""The cases of oracle.py whose oracle is TRL: selection of tokens and rows, and rewards before the loss."""

import jax
import numpy as np
from oracles.oracle import Case, Compared, policy_batch
from oracles.oracle_trl import tensor, trainer, trl_loss, trl_scored
from oracles.oracle_trl_cases import BONUS, LOSS, RARE, SCORES, TRL_PRESETS, our_loss, random_rewards
from support.compiled import compiled
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.rloo_trainer import RLOOTrainer

from grpo_jax.core.advantages import batch_whitened_advantages, leave_one_out_advantages
from grpo_jax.core.aggregation import loss_normaliser
from grpo_jax.core.losses import PRESETS, KLPenalty
from grpo_jax.core.returns import kl_penalised_rewards, overlong_penalty
from grpo_jax.core.selection import (
    IMPORTANCE_MODES,
    high_entropy_mask,
    importance_weights,
    off_policy_mask,
    without_truncated,
)

batch_whitened_advantages, leave_one_out_advantages, kl_penalised_rewards = map(
    compiled, (batch_whitened_advantages, leave_one_out_advantages, kl_penalised_rewards)
)
SAMPLER = {"use_vllm": True, "vllm_importance_sampling_correction": True}
RLOO_SCORES = "RLOOTrainer._generate_and_score_completions"


def sampler_options(mode, cap):
    return SAMPLER | {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": 1 / cap if mode.endswith("mask") else None,
        "vllm_importance_sampling_clip_max": cap,
    }


# Shares whose quantile falls between two tokens: where it falls on one, TRL's float32 quantile may round past it.
SHARE = 0.37


def high_entropy(seed, dtype):
    """Of six shares."""
    parts = policy_batch(seed, dtype)
    shares = (0.07, 0.23, SHARE, 0.5, 0.79, 1.0)
    masks = jax.jit(lambda *given: [high_entropy_mask(*given, share=share) for share in shares])
    ours = masks(parts["entropy"], parts["mask"])
    entropy, mask = tensor(parts["entropy"]), tensor(parts["mask"]).long()
    theirs = [trainer().get_high_entropy_mask(entropy, mask, 1 - share).numpy() for share in shares]
    return Compared((np.stack(ours), np.stack(theirs)))


def importance_case(mode, cap):
    def run(seed, dtype):
        parts = policy_batch(seed, dtype)
        ours = importance_weights(parts["old"], parts["sampler"], parts["mask"], cap=cap, mode=mode)
        rewards = random_rewards(seed, dtype, shape=(2, 3))
        theirs = trl_scored(rewards, parts=parts, **sampler_options(mode, cap))["importance_sampling_ratio"]
        width = theirs.shape[1]  # TRL pads to the longest row
        return Compared((np.asarray(ours)[:, :width], theirs))

    return Case("importance_weights", f"{mode}, cap {cap}", SCORES, run)


def off_policy(seed, dtype):
    """Of three thresholds, each leaving other rows out; a third of the rows has a token without a score."""
    parts = policy_batch(seed, dtype, rows=200)
    parts["sampler"][::3, 0] = np.nan
    given = [parts[name] for name in ("logprobs", "sampler", "advantages", "mask")]
    masks = jax.jit(lambda *given: [off_policy_mask(*given, threshold=t)[:, 0] for t in (0.05, 0.1, 0.3)])
    drawn, now, advantages = (tensor(parts[name]) for name in ("sampler", "logprobs", "advantages"))
    mask = tensor(parts["mask"]).long()
    theirs = [
        trainer().get_off_policy_mask(advantages[:, None], now, drawn, mask, t)[:, 0].numpy() for t in (0.05, 0.1, 0.3)
    ]
    return Compared((np.stack(masks(*given)), np.stack(theirs)))


def truncated(seed, dtype):
    parts = policy_batch(seed, dtype)
    cut = np.random.default_rng(seed).random(len(parts["mask"])) < 0.5
    rewards = random_rewards(seed, dtype, shape=(2, 3))
    theirs = trl_scored(rewards, parts=parts, finished=~cut, mask_truncated_completions=True)["completion_mask"]
    return Compared((np.asarray(without_truncated(parts["mask"], cut))[:, : theirs.shape[1]], theirs))


def overlong(seed, dtype):
    del dtype  # lengths are integers; the penalty is float32
    lengths = np.random.default_rng(seed).integers(1, 40, 50)
    theirs = get_soft_overlong_punishment(30, 16)(completion_ids=[[0] * n for n in lengths])
    return Compared((overlong_penalty(lengths, limit=30, buffer=16), np.array(theirs)))


def whitened_leave_one_out(seed, dtype):
    """Leave-one-out is G / (G - 1) times the centred reward: whitening takes the factor out, but for eps."""
    rewards = random_rewards(seed, dtype)
    group = rewards.shape[1]
    ours = batch_whitened_advantages(rewards[..., 0], centre="group", eps=1e-4 * (group - 1) / group)
    return Compared((ours, trl_scored(rewards, kind=RLOOTrainer, normalize_advantages=True)["advantages"]))


def penalised(seed, dtype):
    """The penalised rewards of a row add up to RLOO's penalised score."""
    parts = policy_batch(seed, dtype)
    rewards = random_rewards(seed, dtype, shape=(2, 3))
    each = kl_penalised_rewards(rewards.reshape(6), parts["old"], parts["ref"], parts["mask"], kl_coef=0.3)
    ours = leave_one_out_advantages(np.asarray(each).sum(-1).reshape(2, 3))
    return Compared((ours, trl_scored(rewards, kind=RLOOTrainer, parts=parts, beta=0.3)["advantages"]))


def weighted_loss(preset, setting):
    """Tokens of high entropy, weights of the sampler, or both with penalty and bonus."""

    def run(seed, dtype):
        parts = policy_batch(seed, dtype)
        theirs = dict(TRL_PRESETS[preset])
        weights, options, ratios = np.ones_like(parts["logprobs"]), {}, None
        if setting != "sampler weights":
            chosen = np.asarray(high_entropy_mask(parts["entropy"], parts["mask"], share=SHARE))
            weights = weights * chosen
            theirs["top_entropy_quantile"] = SHARE
        if setting != "tokens of high entropy":
            ratios = importance_weights(parts["old"], parts["sampler"], parts["mask"], cap=1.2)
            weights = weights * np.asarray(ratios)
            theirs |= SAMPLER
        if setting == "both, KL, entropy bonus":
            # TRL's bonus is a mean over the chosen tokens alone; so is ours if entropy and normaliser say so.
            whole = loss_normaliser(parts["mask"], PRESETS[preset]["aggregation"], dtype=dtype)
            options = {"kl": KLPenalty(0.3), "entropy_coef": 0.2, "entropy_mask": chosen}
            options["normaliser"] = whole._replace(tokens=chosen.sum().astype(dtype))
            theirs |= {"beta": 0.3} | BONUS
        value, gradient, _ = our_loss(parts, PRESETS[preset], token_weights=weights.astype(dtype), **options)
        expected, slope, _ = trl_loss(parts, weights=ratios, **theirs)
        return Compared((value, expected), (gradient, slope))

    return Case(f"grpo_loss, {preset}", setting, LOSS, run)


CASES = [
    *(
        weighted_loss(preset, setting)
        for preset in TRL_PRESETS
        if preset not in RARE
        for setting in ("tokens of high entropy", "sampler weights", "both, KL, entropy bonus")
    ),
    Case("high_entropy_mask", "shares .07 to 1", "GRPOTrainer.get_high_entropy_mask", high_entropy),
    *(importance_case(mode, cap) for mode in IMPORTANCE_MODES for cap in (1.1, 3.0)),
    Case("off_policy_mask", "three thresholds", "GRPOTrainer.get_off_policy_mask", off_policy),
    Case("without_truncated", "half of the rows", SCORES, truncated),
    Case("overlong_penalty", "limit 30, buffer 16", "trl.rewards.get_soft_overlong_punishment", overlong),
    Case("batch_whitened_advantages", "centre group", RLOO_SCORES, whitened_leave_one_out),
    Case("kl_penalised_rewards", "k1, sum over tokens", RLOO_SCORES, penalised),
]
