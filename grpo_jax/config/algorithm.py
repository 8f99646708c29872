"""Sections `algorithm` and `ppo` of the config: advantages and loss. Help lines stand in the docstrings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Le

from grpo_jax.config.fields import (
    COEFFICIENT,
    Coefficient,
    Count,
    Positive,
    PositiveCount,
    Share,
    check_ranges,
    require,
)


@dataclass(frozen=True)
class AlgorithmSection:
    """Advantages and loss.

    Args:
        preset: Loss preset: grpo, dr_grpo, dapo, bnpo, gspo, cispo or sapo.
        advantage: "gdpo" normalises each reward in its group; "grpo" the weighted sum; "rloo" leaves one out;
            "batch" whitens the sum over the whole batch (REINFORCE++); "gae" is PPO: a value head for the sum (ppo).
        scale: What "grpo" divides by, the deviation of the "group", of the "batch", or "none"; null takes the
            preset's.
        whiten: What GDPO whitens over the batch: "sequence", "token" or "none".
        clip_low: Lower clip bound; null takes the preset's.
        clip_high: Upper clip bound; null takes the preset's.
        kl_coef: Weight of the KL term of the loss against the reference; with 0 here (and in ppo) it never runs.
        kl_estimator: KL estimator of the loss.
        kl_corrected: Weigh the KL term by the policy ratio, which makes its gradient unbiased.
        kl_straight_through: Give the KL term its estimator's value and the gradient of k2.
        entropy_coef: Weight of the entropy bonus.
        entropy_share: Share of the batch's tokens, those of highest entropy, that the policy gradient uses; 1 for all.
        importance_cap: Weigh each token by the trainer's probability over the sampler's, at most this; 0 for never.
            For a sampler that older weights (training.lag), top_k, top_p, min_p or another number type set apart from
            the trainer. null: 2 with training.lag 1, else 0.
        update_ref_every: Refresh the reference every so many iterations; 0 keeps the start.
        mask_truncated: Leave completions that hit max_new_tokens out of the loss.
        overlong_buffer: Length of the last stretch of max_new_tokens in which a completion loses up to 1, as an
            objective of its own called "overlong", of weight 1; 0 for no penalty.
        dead_groups: Groups that teach nothing (gdpo: no reward varies in them; else: their sum does not): "keep"
            them as zeros, "drop" them out of the loss and its denominators, or "resample" other prompts for them.
        resample_rounds: Further draws of one iteration, at most, with dead_groups "resample".
        turn_advantage: What weighs the tokens of an episode: "last", the rewards of its last turn alone, alike for all
            turns; "return", of each turn the rewards from there on, compared with the same turn of the group.
        turn_discount: Discount of later turns' rewards with turn_advantage "return".
    """

    preset: Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo"] = "grpo"
    advantage: Literal["gdpo", "grpo", "rloo", "batch", "gae"] = "gdpo"
    scale: Literal["group", "batch", "none"] | None = None
    whiten: Literal["sequence", "token", "none"] = "sequence"
    clip_low: Annotated[Positive, Le(1)] | None = None
    clip_high: Positive | None = None
    kl_coef: Coefficient = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_corrected: bool = False
    kl_straight_through: bool = False
    entropy_coef: Coefficient = 0.0
    entropy_share: Annotated[Positive, Le(1)] = 1.0
    importance_cap: float | None = None
    update_ref_every: Count = 0
    mask_truncated: bool = False
    overlong_buffer: Count = 0
    dead_groups: Literal["keep", "drop", "resample"] = "keep"
    resample_rounds: PositiveCount = 3
    turn_advantage: Literal["last", "return"] = "last"
    turn_discount: Share = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm")
        cap = self.importance_cap
        require(not cap or cap >= 1, "algorithm.importance_cap", "null, 0 or a number >= 1", cap)
        by_turn = self.turn_advantage == "last" or not self.learns_values
        require(by_turn, "algorithm.turn_advantage", "'last' with advantage 'gae'", self.turn_advantage)
        scaled = self.scale is None or self.advantage == "grpo"
        own_scale = f"null with advantage {self.advantage!r}, which has a scale of its own"
        require(scaled, "algorithm.scale", own_scale, self.scale)
        grouped = self.dead_groups == "keep" or self.compares_groups
        no_groups = f"'keep' with advantage {self.advantage!r}, which compares no groups"
        require(grouped, "algorithm.dead_groups", no_groups, self.dead_groups)
        one_gradient = not (self.kl_corrected and self.kl_straight_through)
        require(one_gradient, "algorithm.kl_straight_through", "false with kl_corrected", self.kl_straight_through)
        if self.preset in ("cispo", "sapo"):
            for name in ("clip_low", "clip_high"):
                bound = getattr(self, name)
                unbounded = f"null with preset {self.preset!r}, which has no clip bounds"
                require(bound is None, f"algorithm.{name}", unbounded, bound)

    @property
    def learns_values(self) -> bool:
        """Whether a value head gives the advantages (PPO), rather than the group."""
        return self.advantage == "gae"

    @property
    def compares_groups(self) -> bool:
        """Whether a completion is compared with the others of its prompt."""
        return self.advantage not in ("gae", "batch")


@dataclass(frozen=True)
class PPOSection:
    """What algorithm.advantage "gae" adds: a value head, a reward for each token, and the value loss.

    Args:
        discount: Discount of later rewards (gamma).
        trace: How far advantages look past the value of the next state (lambda): 0 one token, 1 to the end.
        whiten: Give the advantages of the batch's tokens mean 0 and deviation 1.
        value_coef: Weight of the value loss.
        value_rate: Learning rate of the value head as a multiple of the policy's: it starts at 0 and must be quicker.
        value_clip: How far a value may move from the old one before its gradient stops; null for never.
        kl_coef: Weight of the KL against the reference in each token's reward.
        kl_estimator: KL estimator of the reward.
        kl_target: KL of one completion, summed over its tokens, that kl_coef is steered to; 0 keeps kl_coef.
        kl_horizon: Completions in which the steering changes kl_coef by a fifth, at most (smaller is faster).
    """

    discount: Share = 1.0
    trace: Share = 0.95
    whiten: bool = True
    value_coef: Coefficient = 0.5
    value_rate: Annotated[Positive, Le(COEFFICIENT)] = 1.0
    value_clip: Positive | None = 0.2
    kl_coef: Coefficient = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_target: Coefficient = 0.0
    kl_horizon: PositiveCount = 10_000

    def __post_init__(self) -> None:
        check_ranges(self, "ppo")
        steerable = self.kl_target == 0 or self.kl_coef > 0
        require(steerable, "ppo.kl_coef", "a number > 0 to start from when there is a kl_target", self.kl_coef)
