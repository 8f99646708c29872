"""The groups that an iteration learns from: its own batch, and with dynamic sampling others in place of silent ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.models.vision.pictures import joined, joined_some, taken
from grpo_jax.rollout.rollout import Judgement, Rollout, right_aligned
from grpo_jax.training.estimators import Objectives


class Judged(NamedTuple):
    """A sampled and judged batch, and what is made of its rewards.

    Attributes:
        rollout: P groups.
        objectives: What is maximised; computed once and handed on.
        teaching: bool [P], the groups that the estimator learns something from.
    """

    rollout: Rollout
    objectives: Objectives
    teaching: np.ndarray


class Drawn(NamedTuple):
    """What one iteration sampled.

    Attributes:
        batch: P groups to learn from.
        first: The groups of the iteration's own prompts: what the policy is like, before anything was left out.
        draws: Batches that were sampled and judged.
        seconds: Seconds of work by stage, of all draws.
        logged: What the rewards logged of it, {"log/NAME": mean}.
    """

    batch: Judged
    first: Judged
    draws: int
    seconds: dict[str, float]
    logged: Mapping[str, float] = {}


def draw(sample: Callable[[int], Judged], *, further: int = 0) -> Drawn:
    """An iteration's batch, and with dynamic sampling others until P groups teach something.

    DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476) with a bound. Groups that teach take their places in the
    order they were drawn; if there are too few, groups of the first draw that do not fill up.

    Args:
        sample: The batch of draw 0, 1, …, a function of that number alone.
        further: Draws after the first, at most.
    """
    drawn = [sample(0)]
    size = len(drawn[0].rollout.rows)
    while sum(one.teaching.sum() for one in drawn) < size and len(drawn) <= further:
        drawn.append(sample(len(drawn)))
    seconds = {name: sum(one.rollout.seconds[name] for one in drawn) for name in drawn[0].rollout.seconds}
    return Drawn(drawn[0] if len(drawn) == 1 and not further else _chosen(drawn, size), drawn[0], len(drawn), seconds)


def _chosen(drawn: list[Judged], size: int) -> Judged:
    """`size` groups of all draws, those that teach first; what was drawn of them stays behind."""
    teaching = np.concatenate([one.teaching for one in drawn])
    places = np.argsort(~teaching, kind="stable")[:size]
    rollouts = [one.rollout for one in drawn]

    def pick(*arrays: Any) -> Any:
        return (np if isinstance(arrays[0], np.ndarray) else jax.numpy).concatenate(arrays)[places]

    def pick_some(arrays: list[Any]) -> Any:
        return None if arrays[0] is None else pick(*arrays)

    def pick_lists(lists: list[Any]) -> list[Any]:
        joined = [item for part in lists for item in part]
        return [joined[place] for place in places]

    chosen = Rollout(
        pick_lists([rollout.rows for rollout in rollouts]),
        right_aligned([rollout.prompt_tokens for rollout in rollouts])[places],
        right_aligned([rollout.prompt_mask for rollout in rollouts])[places],
        jax.tree.map(pick, *[rollout.samples for rollout in rollouts]),
        pick_lists([rollout.completions for rollout in rollouts]),
        pick_lists([rollout.texts for rollout in rollouts]),
        pick(*(rollout.usable for rollout in rollouts)),
        Judgement(
            pick(*(rollout.judgement.rewards for rollout in rollouts)),
            pick(*(rollout.judgement.watched for rollout in rollouts)),
            [],
            pick_some([rollout.judgement.turn_rewards for rollout in rollouts]),
            pick_some([rollout.judgement.turn_watched for rollout in rollouts]),
        ),
        rollouts[0].seconds,
        taken(joined([rollout.pictures for rollout in rollouts]), places),
        None if rollouts[0].episodes is None else pick_lists([rollout.episodes for rollout in rollouts]),
        taken(joined_some([rollout.answers for rollout in rollouts], [len(one.rows) for one in rollouts]), places),
    )
    objectives = drawn[0].objectives._replace(
        rewards=pick(*(one.objectives.rewards for one in drawn)),
        returns=pick_some([one.objectives.returns for one in drawn]),
    )
    return Judged(chosen, objectives, teaching[places])
