"""From a sampled batch to a better policy: state, objective, one donated update step.

Nothing here knows a concrete model or task: the policy comes as functions (`prefill`, `forward_group`, `head`),
rewards have already become advantages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax import losses
from grpo_jax.advantages import gdpo_advantages, group_advantages, leave_one_out_advantages, sum_rewards
from grpo_jax.config import AlgorithmSection, OptimizerSection, TrainingSection
from grpo_jax.logprobs import token_logprobs

Tree = Any


class Batch(NamedTuple):
    """One sampled batch on the policy's device; P may be a minibatch's share.

    Attributes:
        prompt_tokens: i32 [P, L], left-padded.
        prompt_mask: bool [P, L].
        tokens: i32 [P, G, T].
        mask: bool [P, G, T], EOS included.
        advantages: f32 [P, G].
        old_logprobs: f32 [P, G, T] of the policy that sampled, or None with one update per batch.
        ref_logprobs: f32 [P, G, T] of the reference, or None without a KL term.
    """

    prompt_tokens: jax.Array
    prompt_mask: jax.Array
    tokens: jax.Array
    mask: jax.Array
    advantages: jax.Array
    old_logprobs: jax.Array | None = None
    ref_logprobs: jax.Array | None = None


class TrainState(NamedTuple):
    """Everything an update changes.

    Attributes:
        step: i32 scalar, optimizer updates so far.
        variables: {"params": …} or {"params": …, "lora": …}; with "lora" that alone is trained.
        opt_state: Optimizer state of the trained collection.
        reference: A copy of the trained collection that the KL term is measured against, or None: no KL term, or
            (with LoRA, before the first refresh) the base without its adapters.
    """

    step: jax.Array
    variables: dict[str, Tree]
    opt_state: Tree
    reference: Tree | None


Objective = Callable[[dict[str, Tree], Batch, Any], tuple[jax.Array, Any]]


def trained_collection(variables: dict[str, Tree]) -> str:
    """The collection that gradients are taken for: "lora" if there is one, else "params"."""
    return "lora" if "lora" in variables else "params"


def make_schedule(section: OptimizerSection, total_updates: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then constant, linear to 0 or cosine to 0."""
    peak, warmup = section.learning_rate, section.warmup_steps
    remaining = max(total_updates - warmup, 1)
    after: optax.Schedule
    if section.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif section.schedule == "linear":
        after = optax.linear_schedule(peak, 0.0, remaining)
    else:
        after = optax.cosine_decay_schedule(peak, remaining)
    if warmup == 0:
        return after
    # The first update already moves: it uses peak / warmup rather than 0.
    ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([ramp, after], [warmup])


def make_optimizer(section: OptimizerSection, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip; float32 throughout."""
    adamw = optax.adamw(schedule, b1=section.beta1, b2=section.beta2, weight_decay=section.weight_decay)
    if section.max_grad_norm == 0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(section.max_grad_norm), adamw)


def init_state(
    variables: dict[str, Tree], optimizer: optax.GradientTransformation, *, keep_reference: bool
) -> TrainState:
    """A fresh state; owns copies of the trained weights, so that it can be donated.

    Args:
        variables: The start.
        optimizer: Gives the optimizer state.
        keep_reference: A KL term will be computed. With LoRA the base itself is the reference and nothing is kept.
    """
    name = trained_collection(variables)
    trained = jax.tree.map(jnp.array, variables[name])
    reference = jax.tree.map(jnp.array, trained) if keep_reference and name == "params" else None
    return TrainState(jnp.zeros((), jnp.int32), {**variables, name: trained}, optimizer.init(trained), reference)


def saved_parts(state: TrainState) -> dict[str, Tree]:
    """What a checkpoint holds of a state: everything that training changes, frozen weights left out."""
    name = trained_collection(state.variables)
    return {**state._asdict(), "variables": {name: state.variables[name]}}


def restored_state(parts: dict[str, Tree], variables: dict[str, Tree]) -> TrainState:
    """The state of a checkpoint's parts, with the frozen weights of `variables`."""
    return TrainState(**{**parts, "variables": {**variables, **parts["variables"]}})


def reference_variables(state: TrainState) -> dict[str, Tree]:
    """The variables of the reference policy."""
    name = trained_collection(state.variables)
    if state.reference is not None:
        return {**state.variables, name: state.reference}
    if name == "lora":
        return {"params": state.variables["params"]}
    raise ValueError(
        "state.reference: expected the reference weights, got None; pass keep_reference=True to init_state"
    )


def refresh_reference(state: TrainState) -> TrainState:
    """The current policy becomes the reference."""
    name = trained_collection(state.variables)
    return state._replace(reference=jax.tree.map(jnp.array, state.variables[name]))


def completion_logprobs(
    policy: Any, variables: dict[str, Tree], batch: Batch, *, temperature: float, allowed_tokens: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of each completion token, both f32 [P, G, T], under softmax(logits / temperature)."""
    hidden = policy.forward_group(variables, batch.prompt_tokens, batch.prompt_mask, batch.tokens, batch.mask)
    return token_logprobs(
        hidden, policy.head(variables), batch.tokens, temperature=temperature, allowed_tokens=allowed_tokens
    )


def loss_options(section: AlgorithmSection) -> dict[str, Any]:
    """The keyword arguments of `losses.grpo_loss` that a config names: a preset with its overrides."""
    options = dict(losses.PRESETS[section.preset])
    surrogate = options["surrogate"]
    bounds = {"low": section.clip_low, "high": section.clip_high}
    given = {name: value for name, value in bounds.items() if value is not None}
    if given:
        if not isinstance(surrogate, losses.Clip):
            raise ValueError(
                f"algorithm.clip_low/clip_high: expected null for preset {section.preset!r}, which has no clip bounds, "
                f"got {given}"
            )
        options["surrogate"] = dataclasses.replace(surrogate, **given)
    if section.kl_coef > 0:
        options["kl"] = losses.KLPenalty(
            section.kl_coef, estimator=section.kl_estimator, corrected=section.kl_corrected
        )
    options["entropy_coef"] = section.entropy_coef
    return options


def make_grpo_objective(
    policy: Any, options: dict[str, Any], *, temperature: float, allowed_tokens: jax.Array | None = None
) -> Objective:
    """The policy-gradient objective of a batch.

    Args:
        policy: The policy's functions.
        options: Keyword arguments of `losses.grpo_loss`.
        temperature: Of the trained distribution.
        allowed_tokens: bool [V], or None for all.

    Returns:
        objective(variables, batch, normaliser) → (loss, metrics).
    """

    def objective(variables: dict[str, Tree], batch: Batch, normaliser: Any) -> tuple[jax.Array, Any]:
        logprobs, entropy = completion_logprobs(
            policy, variables, batch, temperature=temperature, allowed_tokens=allowed_tokens
        )
        old = jax.lax.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
        return losses.grpo_loss(
            logprobs,
            old,
            batch.advantages,
            batch.mask,
            normaliser=normaliser,
            ref_logprobs=batch.ref_logprobs,
            entropy=entropy,
            **options,
        )

    return objective


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    normaliser: Callable[[Batch], Any],
    accumulation: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """One optimizer update as one compiled function; what it changes is donated.

    Args:
        objective: objective(variables, micro-batch, normaliser) → (loss, metrics as (total, weight) pairs).
        optimizer: For the trained collection.
        normaliser: Denominators of the whole update from its whole batch, so that splitting changes nothing.
        accumulation: Micro-batches along P, run one after the other; P must be a multiple.

    Returns:
        train_step(state, batch) → (state, {"loss", "grad_norm", "metrics"}).
    """

    gradient = jax.value_and_grad(
        lambda trained, frozen, micro, whole: objective({**frozen, **trained}, micro, whole), has_aux=True
    )

    def compute(moving: TrainState, frozen: dict[str, Tree], batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        trained, whole = moving.variables, normaliser(batch)
        (loss, metrics), grads = _accumulate(lambda micro: gradient(trained, frozen, micro, whole), batch, accumulation)
        (weights,), (slopes,) = trained.values(), grads.values()
        updates, opt_state = optimizer.update(slopes, moving.opt_state, weights)
        variables = {name: optax.apply_updates(weights, updates) for name in trained}
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(slopes)))
        report = {"loss": loss, "grad_norm": norm, "metrics": metrics}
        return TrainState(moving.step + 1, variables, opt_state, moving.reference), report

    compiled = jax.jit(compute, donate_argnums=0)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        # Frozen weights stay outside what is donated: they may be shared, and are never copied.
        name = trained_collection(state.variables)
        frozen = {other: tree for other, tree in state.variables.items() if other != name}
        moving, report = compiled(state._replace(variables={name: state.variables[name]}), frozen, batch)
        return moving._replace(variables={**frozen, **moving.variables}), report

    return train_step


def _accumulate(function: Callable[[Batch], Tree], batch: Batch, parts: int) -> Tree:
    """Sums function(part) over `parts` equal parts of the batch along P, one at a time."""
    if parts == 1:
        return function(batch)
    split = _split(batch, parts)
    first = function(jax.tree.map(lambda array: array[0], split))
    rest = jax.tree.map(lambda array: array[1:], split)
    return jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, function(part)), None), first, rest)[0]


def _split(batch: Batch, parts: int) -> Batch:
    """The batch as `parts` equal micro-batches along P: a leading axis more."""
    prompts = batch.tokens.shape[0]
    if prompts % parts:
        raise ValueError(f"batch: expected a number of prompts that {parts} micro-batches divide, got {prompts}")
    return jax.tree.map(lambda array: array.reshape(parts, prompts // parts, *array.shape[1:]), batch)


def make_logprob_step(
    policy: Any, *, temperature: float, allowed_tokens: jax.Array | None = None, accumulation: int = 1
) -> Callable[[dict[str, Tree], Batch], jax.Array]:
    """A compiled function (variables, batch) → log-probabilities f32 [P, G, T], without gradients.

    The reference's, and the old policy's when a batch is used for more than one update.
    """

    def step(variables: dict[str, Tree], batch: Batch) -> jax.Array:
        def part(micro: Batch) -> jax.Array:
            return completion_logprobs(
                policy, variables, micro, temperature=temperature, allowed_tokens=allowed_tokens
            )[0]

        if accumulation == 1:
            return part(batch)
        return jax.lax.map(part, _split(batch, accumulation)).reshape(batch.tokens.shape)

    return jax.jit(step)


def minibatches(batch: Batch, count: int, key: jax.Array) -> list[Batch]:
    """Cuts a batch into `count` equal parts along P, in an order drawn from `key`; groups stay whole."""
    if count == 1:
        return [batch]
    prompts = batch.tokens.shape[0]
    order = jax.random.permutation(key, prompts).reshape(count, prompts // count)
    return [jax.tree.map(lambda array, rows=rows: array[rows], batch) for rows in order]


def estimate_advantages(
    rewards: jax.Array, mask: jax.Array, section: AlgorithmSection, weights: tuple[float, ...]
) -> jax.Array:
    """Advantages f32 [P, G] of rewards f32 [P, G, N] (NaN: missing) by the estimator that a config names.

    "gdpo" keeps the objectives apart until each is normalised in its group; "grpo" and "rloo" work on their weighted
    sum. The scaling of "grpo" is its preset's (Dr.GRPO: none).
    """
    if section.advantage == "gdpo":
        whiten = None if section.whiten == "none" else section.whiten
        return gdpo_advantages(rewards, weights=weights, whiten=whiten, mask=mask)
    summed = sum_rewards(rewards, weights=weights)
    if section.advantage == "rloo":
        return leave_one_out_advantages(summed)
    return group_advantages(summed, scale=losses.PRESET_SCALES[section.preset])


def make_update(
    policy: Any,
    optimizer: optax.GradientTransformation,
    algorithm: AlgorithmSection,
    training: TrainingSection,
    *,
    temperature: float,
    allowed_tokens: jax.Array | None = None,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, dict[str, Any]]]:
    """Everything that is learned from one batch: inner epochs of minibatches, one compiled step each.

    Log-probabilities of the old policy and of the reference are computed once, before the first step, and only where
    they are needed: with one update per batch the old policy is the new one, and without KL there is no reference.

    Returns:
        update(state, batch, key) → (state, report): "loss", "grad_norm" and "metrics" averaged over the steps.
    """
    options = loss_options(algorithm)
    objective = make_grpo_objective(policy, options, temperature=temperature, allowed_tokens=allowed_tokens)
    step = make_train_step(
        objective,
        optimizer,
        normaliser=lambda batch: losses.loss_normaliser(batch.mask, options["aggregation"]),
        accumulation=training.accumulation,
    )
    logprobs = make_logprob_step(
        policy,
        temperature=temperature,
        allowed_tokens=allowed_tokens,
        accumulation=training.minibatches * training.accumulation,
    )
    several = training.inner_epochs * training.minibatches > 1

    def update(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, dict[str, Any]]:
        if several:
            batch = batch._replace(old_logprobs=logprobs(state.variables, batch))
        if algorithm.kl_coef > 0:
            bare = batch._replace(old_logprobs=None)
            batch = batch._replace(ref_logprobs=logprobs(reference_variables(state), bare))
        reports = []
        for epoch in range(training.inner_epochs):
            for part in minibatches(batch, training.minibatches, jax.random.fold_in(key, epoch)):
                state, report = step(state, part)
                reports.append(report)
        return state, _average(jax.device_get(reports))

    return update


def _average(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the reports of a batch's steps: (total, weight) pairs add up, loss and gradient norm are averaged."""
    joined = jax.tree.map(lambda *values: sum(values), *[report["metrics"] for report in reports])
    count = len(reports)
    scalars = {name: sum(float(report[name]) for report in reports) / count for name in ("loss", "grad_norm")}
    return {**scalars, "metrics": joined}
