"""Judged rollouts without a policy."""

from types import MappingProxyType

import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import Episode, Turn
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.runs.batches import collect_batch
from grpo_jax.training.batch import make_batch


def rollout_of(rewards, eval_rewards, last=None, columns=MappingProxyType({})):
    """A rollout of given texts with rewards [P, G, U, N] and eval rewards [P, G, U, W]; `last` [P, G] is a turn."""
    prompts, group, turns, _ = rewards.shape
    last = np.full((prompts, group), turns - 1) if last is None else last
    episodes = [[Episode((Turn(""),) * (last[p, g] + 1)) for g in range(group)] for p in range(prompts)]
    rows = [Row(p, f"prompt {p}") for p in range(prompts)]
    return Rollout(rows, episodes, rewards, eval_rewards, columns=columns)


def single_turns(texts):
    """Ended episodes of one turn with texts `[P][G]`."""
    return [[Episode((Turn(text),), final=True) for text in group] for group in texts]


def batch_of(ctx, rollout, objectives):
    """The update's batch, as the trainer makes it."""
    algorithm = ctx.config.resolved_algorithm
    return make_batch(rollout, objectives, algorithm, device=ctx.policy_device, mesh=ctx.policy.mesh)


def drawn(ctx, variables, iteration=0):
    """The rollout of an iteration and the update's batch, as the trainer makes them."""
    rollout, objectives, _ = collect_batch(ctx, variables, iteration)
    return rollout, batch_of(ctx, rollout, objectives)
