"""Losses, gradients and advantages against TRL's own code, in float64."""

import dataclasses

import jax
import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is the oracle of this file: pip install -e '.[diffusion,oracles]'")

from oracles.oracle import policy_batch, run
from oracles.oracle_trl import tensor, trainer, trl_loss, trl_scored
from oracles.oracle_trl_cases import BONUS, CASES, TRL_PRESETS, our_loss, per_token_advantages
from oracles.oracle_trl_selection import CASES as SELECTION
from oracles.oracle_trl_selection import sampler_options
from trl import GRPOConfig

from grpo_jax.config.sections import AlgorithmSection, OptimizerSection
from grpo_jax.core.advantages import group_advantages, sum_rewards
from grpo_jax.core.losses import PRESETS, KLPenalty
from grpo_jax.core.selection import high_entropy_mask, importance_weights
from grpo_jax.core.surrogates import Clip
from grpo_jax.training.objectives import loss_options

TOLERANCE = 1e-6


OF_GRPO = ("clip 0", "dual clip", "entropy bonus", "KL", "sampler weights", "tokens of high entropy")
OF_GRPO += ("on policy", "advantages per token")
"""Settings that grpo has in the default run; presets of its ratio and surrogate have "both, KL, entropy bonus"."""


def marks(case):
    """Of settings that differ from one of grpo's by the aggregation alone."""
    alike = case.function in ("grpo_loss, dr_grpo", "grpo_loss, dapo", "grpo_loss, bnpo")
    repeated = case.setting.startswith(OF_GRPO) and not case.setting.startswith("KL corrected")
    return [pytest.mark.wide] * (alike and repeated)


@pytest.mark.parametrize(
    ("seed", "case"),
    [pytest.param(*numbered, marks=marks(numbered[1])) for numbered in enumerate(CASES + SELECTION)],
    ids=lambda part: getattr(part, "id", ""),
)
def test_agrees_with_trl(seed, case):
    """Each on numbers of its own; docs/make_oracles.py draws more."""
    value, gradient = run(case, seed)
    assert value < TOLERANCE
    assert gradient is None or gradient < TOLERANCE


# What docs/oracles.md says about where TRL means something else; each shows both sides.


def both(preset, parts, ours=None, theirs=None):
    """(value, gradient of the log-probabilities) of ours and of TRL's."""
    value, gradient, _ = our_loss(parts, PRESETS[preset] | (ours or {}))
    expected, slope, _ = trl_loss(parts, **TRL_PRESETS[preset] | (theirs or {}))
    return (float(value), gradient[0]), (expected, slope[0])


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo"])
def test_a_row_without_tokens_counts_in_trl(preset, x64):
    """It makes the other rows' gradients smaller there, as a larger denominator does here."""
    parts = policy_batch(0)
    parts["mask"][0] = False
    ours, theirs = both(preset, parts)
    assert abs(ours[0] * 5 / 6 - theirs[0]) < 1e-12
    np.testing.assert_allclose(ours[1] * 5 / 6, theirs[1], atol=1e-12)


def test_defaults_that_are_trls_and_those_that_the_page_names():
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    algorithm, optimizer = AlgorithmSection(), OptimizerSection()
    assert theirs["use_bias_correction_kl"] is algorithm.kl_corrected is True
    assert loss_options(AlgorithmSection(kl_coef=0.1), max_new_tokens=4)["kl"] == KLPenalty(0.1, corrected=True)
    assert (theirs["lr_scheduler_type"], theirs["adam_beta2"], theirs["loss_type"]) == ("linear", 0.999, "dapo")
    assert (optimizer.schedule, optimizer.beta2, algorithm.preset) == ("constant", 0.99, "grpo")


def test_a_missing_reward_is_0_in_trl():
    """The row whose second judge failed is punished there like the row that failed the first."""
    rewards = np.array([[[1, 1], [1, np.nan], [0, 1], [1, 1]]])
    ours = np.asarray(jax.jit(lambda rewards: group_advantages(sum_rewards(rewards)))(rewards))[0]
    theirs = trl_scored(rewards)["advantages"][0]
    assert ours[1] == ours[0] > 0 > ours[2]
    assert theirs[1] == theirs[2] < 0 < theirs[0]


def test_a_row_ratio_moves_every_token_of_the_row_in_trl(x64):
    """Ours is GSPO-token: the same value, and a gradient only where a token has an advantage of its own."""
    parts = per_token_advantages(policy_batch(0, spread=0.0))
    parts["advantages"][:, 1:] = 0
    ours, theirs = both("gspo", parts)
    assert abs(ours[0] - theirs[0]) < 1e-12
    assert (ours[1][:, 1:] == 0).all()
    assert (theirs[1][:, 1:] != 0).any()


def test_a_row_ratio_corrects_the_penalty_in_trl(x64):
    """On-policy both ratios are 1 and the values agree; the gradients do not."""
    penalty = {"kl": KLPenalty(0.3, corrected=True)}, {"beta": 0.3, "args": {"use_bias_correction_kl": True}}
    ours, theirs = both("gspo", policy_batch(0, spread=0.0) | {"ref": policy_batch(1)["logprobs"]}, *penalty)
    assert abs(ours[0] - theirs[0]) < 1e-12
    assert np.abs(ours[1] - theirs[1]).max() > 1e-3


def test_a_low_delta_bounds_positive_advantages_in_trl(x64):
    parts = policy_batch(0)
    parts |= {"old": parts["logprobs"] - np.log(1.15), "advantages": np.ones(6)}  # within 1 + high, above delta
    ours, theirs = both("grpo", parts, {"surrogate": Clip(dual=1.1)}, {"args": {"delta": 1.1}})
    assert (ours[1][parts["mask"]] < 0).all()
    assert (theirs[1] == 0).all()


def test_the_bonus_is_over_selected_tokens_in_trl(x64):
    parts = policy_batch(0)
    chosen = np.asarray(high_entropy_mask(parts["entropy"], parts["mask"], share=0.37))
    _, slopes, _ = our_loss(parts, PRESETS["grpo"], token_weights=chosen, entropy_coef=0.2)
    _, theirs, _ = trl_loss(parts, top_entropy_quantile=0.37, **BONUS)
    np.testing.assert_array_equal(slopes[1] != 0, parts["mask"])
    np.testing.assert_array_equal(theirs[1] != 0, chosen)


def test_a_quantile_that_falls_on_a_token_may_lose_it_in_trl(x64):
    """Of 21 tokens the .6 quantile is the 13th: nine are at least that. In float32 .6 is a little more."""
    entropy, mask = np.arange(21.0)[None] / 7, np.ones((1, 21), bool)
    assert int(high_entropy_mask(entropy, mask, share=0.4).sum()) == 9
    assert int(trainer().get_high_entropy_mask(tensor(entropy), tensor(mask).long(), 0.6).sum()) == 8


def test_a_mask_has_no_lower_bound_by_default_in_trl(x64):
    parts = policy_batch(0)
    parts["sampler"] = parts["old"] + 2  # a ratio of .14, below 1 / 3
    ours = importance_weights(parts["old"], parts["sampler"], parts["mask"], cap=3.0, mode="token_mask")
    options = sampler_options("token_mask", 3.0) | {"vllm_importance_sampling_clip_min": None}
    theirs = trl_scored(np.zeros((2, 3, 1)), parts=parts, **options)["importance_sampling_ratio"]
    assert ours[0, 0] == 0
    np.testing.assert_allclose(theirs[0, 0], np.exp(-2))


def test_an_unknown_probability_is_right_in_trl(x64):
    parts = policy_batch(0)
    parts["sampler"][0, 0] = np.nan
    ours = importance_weights(parts["old"], parts["sampler"], parts["mask"], cap=1.3)
    theirs = trl_scored(np.zeros((2, 3, 1)), parts=parts, **sampler_options("token_truncate", 1.3))[
        "importance_sampling_ratio"
    ]
    assert np.isnan(ours[0, 0])
    assert theirs[0, 0] == 1
