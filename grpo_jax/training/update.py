"""Policy updates: one compiled train step with donated buffers, and everything computed from a batch before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config.run import Config
from grpo_jax.config.sections import AlgorithmSection, PPOSection, TrainingSection
from grpo_jax.core.advantages import distillation_advantages, optimal_token_advantages
from grpo_jax.core.aggregation import loss_normaliser
from grpo_jax.core.losses import EntropyControl, adapt_entropy_coef
from grpo_jax.core.masking import masked_mean
from grpo_jax.core.selection import high_entropy_mask, importance_weights
from grpo_jax.core.trie import Trie
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import on_host, shard, shard_optimizer
from grpo_jax.models.variables import PyTree, Variables, narrow_gradients, narrow_zeros
from grpo_jax.training.batch import Batch, micro_batches, minibatches, required
from grpo_jax.training.objectives import (
    Forward,
    ForwardPass,
    Metrics,
    Objective,
    loss_options,
    make_estimates,
    make_forward,
    make_policy_objective,
)
from grpo_jax.training.state import (
    TrainState,
    commit_to_device,
    free_buffers,
    init_state,
    make_optimizer,
    make_schedule,
    needs_reference,
    reference_variables,
    refresh_reference,
    rollout_copy,
    trained_weights,
)

PATIENCE = 3
"""A run ends after this many iterations of consecutive skipped updates; one bad batch does not end it."""


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    normaliser: Callable[[Batch], PyTree],
    grad_accumulation_steps: int = 1,
    grad_dtype: str = "float32",
    adapt: Callable[[EntropyControl, jax.Array], EntropyControl] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Make one optimizer update as one compiled function; changed arrays are donated.

    An update whose loss or gradient is not finite is skipped and counted (`skipped`): weights, moments and counts
    stay. optax.apply_if_finite would accept it after a few.

    Args:
        objective: objective(variables, micro-batch, normaliser) → (loss, metrics as (total, weight) pairs).
        normaliser: Denominators of the update from its whole batch, so splitting the batch changes nothing.
        grad_accumulation_steps: Number of sequential micro-batches along P; P must be a multiple.
        grad_dtype: ``bfloat16`` rounds the gradient of each kernel; micro-batches accumulate in float32.
        adapt: adapt(state's entropy control, the update's mean entropy) → the next update's, unless all tokens are
            masked; None for a fixed bonus.
    """

    def compute(moving: TrainState, frozen: Variables, batch: Batch) -> tuple[TrainState, Metrics]:
        trained, whole, control = moving.variables, normaliser(batch), moving.entropy_control
        bonus = {} if control is None else {"entropy_coef": control.applied}

        def loss_of(by: Variables, micro: Batch) -> tuple[jax.Array, PyTree]:
            return objective({**frozen, **narrow_gradients(trained, by)}, micro, whole, **bonus)

        by = narrow_zeros(trained) if grad_dtype == "bfloat16" else trained
        gradient = partial(jax.value_and_grad(loss_of, has_aux=True), by)
        (loss, metrics), grads = (
            gradient(batch) if grad_accumulation_steps == 1 else _accumulate(gradient, batch, grad_accumulation_steps)
        )
        grads = jax.tree.map(lambda leaf, weight: leaf.astype(weight.dtype), grads, trained)
        updates, opt_state = optimizer.update(grads, moving.opt_state, trained)
        variables = optax.apply_updates(trained, updates)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
        after = moving._replace(step=moving.step + 1, variables=variables, opt_state=opt_state)
        if control is not None and adapt is not None:
            entropy = metrics["policy"].entropy
            adapted = jax.tree.map(partial(jnp.where, entropy.weight > 0), adapt(control, entropy.value()), control)
            after = after._replace(entropy_control=adapted)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        report = {"loss": loss, "grad_norm": norm, "skipped": 1 - finite.astype(jnp.int32), "metrics": metrics}
        after = jax.tree.map(partial(jnp.where, finite), after, moving)
        after = after._replace(skipped=jnp.where(finite, 0, moving.skipped + 1))
        if after.entropy_control is not None:
            report["entropy_coef"] = after.entropy_control.coef
        return after, report

    compiled = jax.jit(compute, donate_argnums=0)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # Do not donate frozen arrays: they may be shared, and are never copied.
        trained = trained_weights(state.variables)
        frozen = {name: tree for name, tree in state.variables.items() if name not in trained}
        before = state._replace(variables=trained, reference=None, rollout_weights=None)
        after, report = compiled(before, frozen, batch)
        # On CPU, JAX neither reuses nor frees a donated array that NumPy has viewed, as a checkpoint does.
        free_buffers(before)
        unchanged = {"reference": state.reference, "rollout_weights": state.rollout_weights}
        return after._replace(variables={**frozen, **after.variables}, **unchanged), report

    return train_step


def _accumulate(function: Callable[[Batch], PyTree], batch: Batch, parts: int) -> PyTree:
    """Sum function(part) over `parts` equal parts of the batch along P, one at a time."""
    split = micro_batches(batch, parts)
    # Start from zeros rather than from the first part, so the function is compiled once.
    shapes = jax.eval_shape(function, jax.tree.map(lambda array: array[0], split))
    wide = {jnp.dtype(jnp.bfloat16): jnp.float32}
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide.get(leaf.dtype, leaf.dtype)), shapes)
    return jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, function(part)), None), zeros, split)[0]


def make_forward_step(
    forward: ForwardPass, *, grad_accumulation_steps: int = 1
) -> Callable[[Variables, Batch], Forward]:
    """Compile (variables, batch) → `Forward` without gradients, in micro-batches of prompts."""

    def step(variables: Variables, batch: Batch) -> Forward:
        if grad_accumulation_steps == 1:
            return forward(variables, batch)
        parts = jax.lax.map(lambda micro: forward(variables, micro), micro_batches(batch, grad_accumulation_steps))
        return jax.tree.map(lambda array: array.reshape(batch.tokens.shape), parts)

    compiled = jax.jit(step)
    # Pass only the policy's inputs: the batch's other fields must not cause a recompilation.
    return lambda variables, batch: compiled(variables, batch.read_by_policy())


def make_old_policy_step(
    forward: ForwardPass, algorithm: AlgorithmSection, training: TrainingSection
) -> Callable[[Variables, Batch], Forward]:
    """Compile (variables, batch) → the `Forward` that a batch's preparation reads, in an update's micro-batches."""
    if algorithm.advantage == "optimal_token_baseline":
        forward = partial(forward, sum_pi_squared=True)
    return make_forward_step(forward, grad_accumulation_steps=training.minibatches * training.grad_accumulation_steps)


def make_token_weights(
    section: AlgorithmSection,
) -> Callable[[Batch, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """Compile (batch, entropy [P, G, T]) → weights f32 [P, G, T], their mean, and the share at the cap or masked.

    Mean and share are over tokens, and only of the importance weights. The weights are the product of a high-entropy
    mask (1 or 0) and the importance weights. These compare the policy before its first update with the policy that
    sampled. Both factors come from the whole batch, so its split does not change the selected tokens.
    """
    cap = section.importance_cap

    def weigh(batch: Batch, entropy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        weights = jnp.ones_like(entropy)
        if cap:
            weights *= importance_weights(
                required("old_logprobs", batch.old_logprobs),
                required("sampler_logprobs", batch.sampler_logprobs),
                batch.mask,
                cap=cap,
                mode=section.importance_mode,
            )
        mean = masked_mean(weights, batch.mask)
        outside = (weights >= (cap or jnp.inf)) | (weights == 0)
        clipped = masked_mean(outside.astype(jnp.float32), batch.mask)
        if section.entropy_share < 1:
            weights *= high_entropy_mask(entropy, batch.mask, share=section.entropy_share)
        return weights, mean, clipped

    return jax.jit(weigh)


def needs_old_logprobs(algorithm: AlgorithmSection, training: TrainingSection) -> bool:
    """Return whether old log-probabilities must be computed; with one update per batch they equal the new ones."""
    several = training.inner_epochs * training.minibatches > 1
    return several or _has_token_weights(algorithm) or algorithm.advantage in ("gae", "opd", "optimal_token_baseline")


def _has_token_weights(algorithm: AlgorithmSection) -> bool:
    return bool(algorithm.importance_cap) or algorithm.entropy_share < 1


def make_preparation(
    forward: ForwardPass, algorithm: AlgorithmSection, ppo: PPOSection, training: TrainingSection
) -> Callable[[TrainState, Batch], tuple[Batch, Metrics]]:
    """Make prepare(state, batch) → (batch, measured): everything computed once before a batch's first update.

    It adds the log-probabilities of the old policy and the reference, token weights, and PPO's advantages and returns,
    each only if needed. A teacher's log-probabilities are already in the batch, as the reference's
    (`runs.policy.load_teacher`). The old policy is the one before its first update with the batch, even if an older
    policy sampled: importance weights correct for that. Without them (importance_cap 0), the policy that sampled is
    the old policy. `measured` has "importance_weight", PPO's "estimates", and "importance_clipped" if sampled ahead.
    """
    look = make_old_policy_step(forward, algorithm, training)
    weighted, ahead = _has_token_weights(algorithm), training.async_level > 0
    weigh, estimate = make_token_weights(algorithm), make_estimates(ppo)

    def prepare(state: TrainState, batch: Batch) -> tuple[Batch, Metrics]:
        measured: Metrics = {}
        if batch.ref_logprobs is None and needs_reference(algorithm, ppo):
            batch = batch._replace(ref_logprobs=look(reference_variables(state), batch).logprobs)
        sampled = batch.rollout_logprobs if ahead and not algorithm.importance_cap else None
        if not needs_old_logprobs(algorithm, training):
            return batch._replace(old_logprobs=sampled), measured
        old = look(state.variables, batch)
        batch = batch._replace(old_logprobs=old.logprobs if sampled is None else sampled)
        if weighted:
            weights, mean, clipped = weigh(batch, old.entropy)
            if algorithm.importance_cap:
                measured["importance_weight"] = mean
                if ahead:
                    measured["importance_clipped"] = clipped
            batch = batch._replace(token_weights=weights, sampler_logprobs=None)
        if algorithm.advantage == "opd":
            teacher = required("ref_logprobs", batch.ref_logprobs)
            batch = batch._replace(advantages=distillation_advantages(teacher, old.logprobs, batch.mask))
        if old.sum_pi_squared is not None:
            chosen = old.logprobs, old.sum_pi_squared, batch.mask
            sums = required("advantages", batch.advantages)
            batch = batch._replace(advantages=optimal_token_advantages(sums, *chosen, weights=batch.token_weights))
        if algorithm.learns_values:
            batch, measured["estimates"] = estimate(batch, required("values", old.values))
        return batch, measured

    return prepare


def make_configured_step(
    forward: ForwardPass,
    optimizer: optax.GradientTransformation,
    algorithm: AlgorithmSection,
    training: TrainingSection,
    ppo: PPOSection = PPOSection(),
    *,
    max_new_tokens: int,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Make the train step of the configured objective; `max_new_tokens` is the longest possible completion."""
    options = loss_options(algorithm, max_new_tokens=max_new_tokens)
    adapt, target = None, algorithm.entropy_target
    if target is not None:
        adapt = partial(adapt_entropy_coef, target=target, delta=algorithm.entropy_coef_delta)
    objective = make_policy_objective(
        forward,
        options,
        ppo if algorithm.learns_values else None,
        off_policy_threshold=algorithm.off_policy_mask_threshold,
    )
    return make_train_step(
        objective,
        optimizer,
        normaliser=lambda batch: loss_normaliser(batch.mask, options["aggregation"]),
        grad_accumulation_steps=training.grad_accumulation_steps,
        grad_dtype=training.grad_dtype,
        adapt=adapt,
    )


def make_update(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    algorithm: AlgorithmSection,
    training: TrainingSection,
    *,
    max_new_tokens: int,
    ppo: PPOSection = PPOSection(),
    **distribution: Any,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """Make update(state, batch, key) → (state, report): inner epochs of minibatches, one compiled step each.

    `distribution` is temperature, allowed_tokens and trie of `make_forward`. The report has "loss" and "grad_norm"
    averaged over the steps, and the number of "skipped" steps. It also has "metrics" by loss term, "measured"
    (`make_preparation`), and "advantages" [P, G] or [P, G, T].
    """
    forward = make_forward(policy, **distribution)
    step = make_configured_step(forward, optimizer, algorithm, training, ppo, max_new_tokens=max_new_tokens)
    prepare = make_preparation(forward, algorithm, ppo, training)

    def update(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        batch, measured = prepare(state, batch)
        reports = []
        for epoch in range(training.inner_epochs):
            for part in minibatches(batch, training.minibatches, jax.random.fold_in(key, epoch)):
                state, report = step(state, part)
                reports.append(report)
        estimates = measured.get("estimates")
        advantages = on_host(batch.advantages if estimates is None else estimates.advantages)
        return state, {**_average(on_host(reports)), "measured": on_host(measured), "advantages": advantages}

    return update


def _average(reports: list[Metrics]) -> Metrics:
    joined = jax.tree.map(lambda *values: sum(values), *[report["metrics"] for report in reports])
    count, skipped = len(reports), sum(int(report["skipped"]) for report in reports)
    scalars = {name: sum(float(report[name]) for report in reports) / count for name in ("loss", "grad_norm")}
    last = {name: reports[-1][name] for name in ("entropy_coef",) if name in reports[-1]}
    return {**scalars, **last, "skipped": skipped, "metrics": joined}


@dataclass(frozen=True)
class Learner:
    """The compiled parts of training; update(state, batch, key) → (state, report) comes from `make_update`."""

    config: Config
    policy: Policy
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    update: Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]

    def start(self, variables: Variables) -> TrainState:
        """Return the initial state, which takes over the trained weights.

        Unless they are the reference, `variables` can be read only until the first update.
        """
        state = commit_to_device(shard(self.fresh(variables), self.policy.mesh))
        return state._replace(rollout_weights=rollout_copy(state)) if self.config.training.async_level else state

    def fresh(self, variables: Variables) -> TrainState:
        """Return the initial state, uncommitted."""
        config, every = self.config, self.config.algorithm.update_ref_every
        state = init_state(
            variables,
            self.optimizer,
            keep_reference=needs_reference(config.algorithm, config.ppo),
            # Fresh adapters change nothing: the base is the initial policy, and the reference unless refreshed.
            base_reference=config.policy.lora.path is None and config.sft.steps == 0 and every == 0,
            take_over=True,
        )
        if config.algorithm.entropy_target is not None:
            start = EntropyControl(jnp.float32(config.algorithm.entropy_coef), jnp.float32(0))
            state = state._replace(entropy_control=start)
        return state

    def learning_rate(self, state: TrainState) -> float:
        """Return the learning rate of the next update; skipped updates do not count."""
        return float(np.asarray(self.schedule(int(state.step))))

    def refresh(self, state: TrainState, iteration: int) -> TrainState:
        """Make the current policy the reference every `update_ref_every` iterations."""
        every = self.config.algorithm.update_ref_every
        if not needs_reference(self.config.algorithm, self.config.ppo) or every == 0 or (iteration + 1) % every:
            return state
        before, state = state.reference, refresh_reference(state)
        free_buffers(before)
        return state


def make_learner(
    config: Config,
    policy: Policy,
    iterations: int,
    *,
    allowed_tokens: np.ndarray | None = None,
    trie: Trie | None = None,
) -> Learner:
    """Make optimizer, schedule and update from a run's config."""
    section = config.optimizer.replace(learning_rate=config.learning_rate)
    schedule = make_schedule(section, iterations * config.training.inner_epochs * config.training.minibatches)
    optimizer = shard_optimizer(make_optimizer(section, schedule), policy.mesh)
    update = make_update(
        policy,
        optimizer,
        config.resolved_algorithm,
        config.training,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_policy_tokens,
        allowed_tokens=None if allowed_tokens is None else jnp.asarray(allowed_tokens),
        trie=trie,
        ppo=config.ppo,
    )
    return Learner(config, policy, optimizer, schedule, update)
