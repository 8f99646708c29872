"""What learns: optimizer, schedule and update step, as a config names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config
from grpo_jax.core.trie import Trie
from grpo_jax.models.policy import make_loss_scale
from grpo_jax.models.sharding import shard, shard_batch, shard_optimizer
from grpo_jax.runs.policy import Policy
from grpo_jax.runs.several.company import Company
from grpo_jax.training.batch import Batch
from grpo_jax.training.optimizer import make_optimizer, make_schedule
from grpo_jax.training.state import TrainState, init_state, left_behind, needs_reference, refresh_reference, settled
from grpo_jax.training.update import make_update


class LearningBrief(NamedTuple):
    """What of the data decides how is learned: process 0 tells it the others.

    Attributes:
        iterations: Iterations in all.
        accumulation: Micro-batches of an update.
        allowed: bool [V], the tokens that may be written; None for all.
        trie: The texts of which each completion is one, or None.
    """

    iterations: int
    accumulation: int
    allowed: np.ndarray | None
    trie: Trie | None


class Learner(NamedTuple):
    """The compiled parts of training.

    Attributes:
        update: update(state, batch, key) → (state, report).
        schedule: Learning rate by update.
        iterations: Iterations in all.
        updates_per_iteration: Optimizer updates of one iteration.
        start: start(variables) → the state that training begins with. It takes the trained weights over: where they
            are not the reference, they can be read until the first update only.
        refresh: refresh(state) → the state whose reference is the policy as it is.
    """

    update: Callable[..., tuple[TrainState, dict[str, Any]]]
    schedule: Callable[[Any], Any]
    iterations: int
    updates_per_iteration: int
    start: Callable[[dict[str, Any]], TrainState]
    refresh: Callable[[TrainState], TrainState]


def led_learner(config: Config, policy: Policy, brief: LearningBrief, company: Company) -> Learner:
    """The learner, whose functions are those of all processes.

    Args:
        config: The run's.
        policy: Its policy.
        brief: What follows from the data.
        company: The processes.
    """
    iterations = brief.iterations
    training = dataclasses.replace(config.training, accumulation=brief.accumulation)
    per_iteration = config.training.inner_epochs * config.training.minibatches
    section = dataclasses.replace(config.optimizer, learning_rate=config.learning_rate)
    schedule = make_schedule(section, iterations * per_iteration)
    optimizer = shard_optimizer(make_optimizer(section, schedule, value_rate=config.ppo.value_rate), policy.mesh)
    update = make_update(
        policy,
        optimizer,
        config.algorithm,
        training,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.written_tokens,
        allowed_tokens=None if brief.allowed is None else jnp.asarray(brief.allowed),
        trie=brief.trie,
        ppo=config.ppo,
    )
    steered = config.algorithm.learns_values and config.ppo.kl_coef > 0

    # New adapters change nothing: the base is the policy at the start, and stays the reference if none replaces it.
    untouched = config.policy.lora.path is None and config.warm_start.steps == 0
    base_reference = untouched and config.algorithm.update_ref_every == 0

    def start(variables: dict[str, Any]) -> TrainState:
        state = init_state(
            variables,
            optimizer,
            keep_reference=needs_reference(config.algorithm, config.ppo),
            base_reference=base_reference,
            kl_coef=config.ppo.kl_coef if steered else None,
            loss_scale=make_loss_scale(config.policy.compute_dtype),
            take_over=True,
        )
        state = settled(shard(state, policy.mesh))
        return state._replace(behind=left_behind(state)) if config.training.lag else state

    def learn_from(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, dict[str, Any]]:
        return update(state, shard_batch(batch, policy.mesh), key)

    lead = company.lead
    refresh = lead("refresh", refresh_reference)
    return Learner(lead("update", learn_from), schedule, iterations, per_iteration, lead("start", start), refresh)
