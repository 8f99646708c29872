"""Runs of a worker with the same policy and settings share their compiled functions.

These are pure functions of their arguments; tracing and lowering them is two thirds of a tiny run.
"""

import dataclasses
import functools
from collections.abc import Hashable

import numpy as np
from pydantic import BaseModel

from grpo_jax.config.run import Config
from grpo_jax.models.policy import Policy
from grpo_jax.runs import sft, trainer
from grpo_jax.sampling import sampler, samplers

MADE: dict[Hashable, object] = {}


def key_of(value) -> Hashable:
    """Everything that a compiled function may depend on; of a policy not its weights, which are arguments."""
    if isinstance(value, Policy):
        return tuple(key_of(part) for name, part in vars(value).items() if name not in ("source", "variables"))
    if isinstance(value, Config):
        batches = ("inner_epochs", "minibatches", "grad_accumulation_steps", "grad_dtype", "async_level")
        training = tuple(getattr(value.training, name) for name in batches)
        algorithm = value.resolved_algorithm.replace(update_ref_every=0)  # which the learner itself looks at
        sections = algorithm, value.ppo, value.optimizer, value.policy.replace(path="")
        written = value.sampling.temperature, value.sampling.max_policy_tokens
        return key_of((training, value.sft.steps == 0, value.learning_rate, *written, *sections))
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    if isinstance(value, dict):
        return tuple((name, key_of(part)) for name, part in sorted(value.items()))
    if isinstance(value, tuple):
        return (type(value), *map(key_of, value))
    if hasattr(value, "dtype"):
        array = np.asarray(value)
        return array.shape, str(array.dtype), array.tobytes()
    return value


def sharing(make):
    """`make`, which makes what it was asked for before only once, of a policy without weights."""

    @functools.wraps(make)
    def made(*arguments, **named):
        key = make.__name__, key_of(arguments), key_of(named)
        if key not in MADE:
            bare = [dataclasses.replace(a, variables={}) if isinstance(a, Policy) else a for a in arguments]
            MADE[key] = make(*bare, **named)
        return MADE[key]

    return made


def share(patch) -> None:
    """Let runs in this process share what they compile."""
    make = sharing(trainer.make_learner)

    def make_learner(config, policy, iterations, **named):
        """With the run's own config; only a schedule that ends depends on how long a run is."""
        made = make(config, policy, 0 if config.optimizer.schedule == "constant" else iterations, **named)
        return dataclasses.replace(made, config=config)

    start_sft = sft.make_sft

    def make_sft(ctx):
        """Another state each time, and the same step."""
        state, step = start_sft(ctx)
        read = ctx.config.sft, ctx.config.optimizer, ctx.config.training
        key = "sft", key_of((ctx.policy, *read, ctx.config.sampling.temperature, ctx.allowed_tokens, ctx.trie))
        return state, MADE.setdefault(key, step)

    patch.setattr(trainer, "make_learner", make_learner)
    patch.setattr(sft, "make_sft", make_sft)
    for name in ("make_sampler", "make_episode_sampler", "make_ranker"):
        patch.setattr(samplers, name, sharing(getattr(samplers, name)))
    patch.setattr(sampler, "make_sampler", samplers.make_sampler)  # which commands import when they ask a policy
