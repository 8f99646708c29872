"""The groups that an iteration learns from: its own batch, and with dynamic sampling others for those without signal.

Every row and every random number is a function of (seed, iteration, draw), so a resumed run draws the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.rollout.data import further_batch_at
from grpo_jax.rollout.rollout import Judgement, Rollout, collect
from grpo_jax.runs.parts import Parts
from grpo_jax.training.estimators import Objectives, learning_groups, make_objectives

_DRAW_STREAM = 2**31 - 5


class Drawn(NamedTuple):
    """What one iteration sampled.

    Attributes:
        rollout: P groups to learn from.
        objectives: Their rewards, as estimators take them.
        first: The groups of the iteration's own prompts: what the policy is like, before anything was left out.
        first_objectives: Their rewards.
        draws: Batches that were sampled and judged.
        seconds: Seconds of work by stage, of all draws.
    """

    rollout: Rollout
    objectives: Objectives
    first: Rollout
    first_objectives: Objectives
    draws: int
    seconds: dict[str, float]


def draw(parts: Parts, variables: Any, iteration: int) -> Drawn:
    """Samples and judges an iteration's batch.

    With dead_groups "resample" further prompts are drawn, P at a time, until P groups teach something or there were
    enough draws (DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476, with a bound). Groups that teach take
    their places in the order they were drawn; if there are too few, groups of the first draw that do not fill up.
    """
    algorithm, size = parts.config.algorithm, parts.config.training.prompts_per_batch
    rollouts = [_collect(parts, variables, iteration, 0)]
    objectives = [_objectives(parts, rollouts[0])]
    batch, maximised = rollouts[0], objectives[0]
    if algorithm.dead_groups == "resample":
        teaching = [_teaching(parts, objectives[0])]
        while sum(map(np.sum, teaching)) < size and len(rollouts) <= algorithm.resample_rounds:
            rollouts.append(_collect(parts, variables, iteration, len(rollouts)))
            objectives.append(_objectives(parts, rollouts[-1]))
            teaching.append(_teaching(parts, objectives[-1]))
        # Those that teach first, in the order they were drawn.
        places = np.argsort(~np.concatenate(teaching), kind="stable")[:size]
        batch = _chosen(rollouts, places)
        maximised = objectives[0]._replace(rewards=jnp.concatenate([part.rewards for part in objectives])[places])
    seconds = {name: sum(rollout.seconds[name] for rollout in rollouts) for name in rollouts[0].seconds}
    return Drawn(batch, maximised, rollouts[0], objectives[0], len(rollouts), seconds)


def objectives_of(parts: Parts, judged: np.ndarray, lengths: np.ndarray) -> Objectives:
    """What is maximised of judged rewards f32 [P, G, N] and completion lengths i32 [P, G], on the policy's device."""
    device = min(jax.tree.leaves(parts.variables)[0].sharding.addressable_devices, key=lambda device: device.id)
    return make_objectives(
        *jax.device_put((judged, lengths), device),
        weights=parts.weights,
        conditions=parts.conditions,
        overlong_buffer=parts.config.algorithm.overlong_buffer,
        max_new_tokens=parts.config.sampling.max_new_tokens,
    )


def _collect(parts: Parts, variables: Any, iteration: int, number: int) -> Rollout:
    config, rows = parts.config, parts.prompts.train
    places = further_batch_at(config.seed, iteration, number, batch_size=config.training.prompts_per_batch, n=len(rows))
    # A prompt that comes twice in an iteration, when prompts run out, gets other completions.
    key = jax.random.fold_in(jax.random.fold_in(parts.key, _DRAW_STREAM), number) if number else parts.key
    return collect(
        parts.environment,
        parts.sampler,
        variables,
        [rows[place] for place in places],
        key=key,
        iteration=iteration,
        chunk_prompts=config.training.chunk_prompts,
        timeout=parts.timeout,
    )


def _objectives(parts: Parts, rollout: Rollout) -> Objectives:
    return objectives_of(parts, rollout.judgement.rewards, rollout.samples.mask.sum(-1, dtype=np.int32))


def _teaching(parts: Parts, objectives: Objectives) -> np.ndarray:
    return np.asarray(learning_groups(objectives.rewards, objectives.weights, parts.config.algorithm))


def _chosen(rollouts: list[Rollout], places: np.ndarray) -> Rollout:
    """The groups at these places of all rollouts one after another; pictures stay behind."""

    def pick(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)[places]

    def pick_lists(lists: list[Any]) -> list[Any]:
        joined = [item for part in lists for item in part]
        return [joined[place] for place in places]

    return Rollout(
        pick_lists([rollout.rows for rollout in rollouts]),
        pick([rollout.prompt_tokens for rollout in rollouts]),
        pick([rollout.prompt_mask for rollout in rollouts]),
        jax.tree.map(lambda *arrays: pick(list(arrays)), *[rollout.samples for rollout in rollouts]),
        pick_lists([rollout.completions for rollout in rollouts]),
        pick_lists([rollout.texts for rollout in rollouts]),
        pick([rollout.usable for rollout in rollouts]),
        Judgement(
            pick([rollout.judgement.rewards for rollout in rollouts]),
            pick([rollout.judgement.watched for rollout in rollouts]),
            [],
        ),
        rollouts[0].seconds,
    )
