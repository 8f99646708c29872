"""From a sampled batch to a better policy: state, one donated update step, and all that is learned from a batch.

Nothing here knows a concrete model or task: the policy comes as functions (`prefill`, `forward_group`, `head`),
rewards have already become advantages, or scores that PPO's values make advantages of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import AlgorithmSection, PPOSection, TrainingSection
from grpo_jax.core import losses
from grpo_jax.core.masking import masked_mean
from grpo_jax.core.selection import high_entropy_mask, truncated_importance_weights
from grpo_jax.models.value_head import VALUE
from grpo_jax.training.objectives import (
    Batch,
    Forward,
    ForwardPass,
    Objective,
    loss_options,
    make_forward,
    make_policy_objective,
)
from grpo_jax.training.ppo import make_estimates, make_kl_control, make_ppo_objective

Tree = Any

PATIENCE = 3
"""A run ends when it left out as many updates in a row as so many iterations make: one batch alone may be at fault."""


class TrainState(NamedTuple):
    """Everything an update changes.

    Attributes:
        step: i32 scalar, optimizer updates so far.
        variables: {"params": …}, perhaps "lora" (then the params are frozen), perhaps "value" (PPO's value head).
        opt_state: Optimizer state of the trained collections.
        reference: The policy's trained collection that KL is measured against, as it was; or None: no KL, or (with
            LoRA) the base without its adapters.
        skipped: i32 scalar, updates in a row that were left out because loss or gradient were not finite; of float16
            those alone at which the loss scale could fall no further.
        kl_coef: f32 scalar, the weight of the KL in PPO's rewards, or None where there is none.
        loss_scale: Flax's `DynamicScale` under float16, or None.
    """

    step: jax.Array
    variables: dict[str, Tree]
    opt_state: Tree
    reference: Tree | None
    skipped: jax.Array
    kl_coef: jax.Array | None = None
    loss_scale: Any = None


def policy_collection(variables: dict[str, Tree]) -> str:
    """The collection that holds the policy's trained weights: "lora" if there is one, else "params"."""
    return "lora" if "lora" in variables else "params"


def trained_collections(variables: dict[str, Tree]) -> tuple[str, ...]:
    """The collections that gradients are taken for: the policy's, and the value head where there is one."""
    policy = policy_collection(variables)
    return (policy, VALUE) if VALUE in variables else (policy,)


def _trained(variables: dict[str, Tree]) -> dict[str, Tree]:
    return {name: variables[name] for name in trained_collections(variables)}


def needs_reference(algorithm: AlgorithmSection, ppo: PPOSection) -> bool:
    """Whether anything is measured against a reference: a KL term of the loss, or PPO's KL in the rewards."""
    return algorithm.kl_coef > 0 or (algorithm.advantage == "gae" and ppo.kl_coef > 0)


def init_state(
    variables: dict[str, Tree],
    optimizer: optax.GradientTransformation,
    *,
    keep_reference: bool,
    base_reference: bool = True,
    kl_coef: float | None = None,
    loss_scale: Any = None,
    take_over: bool = False,
) -> TrainState:
    """A fresh state; owns copies of the trained weights, so that they can be donated. Its reference is the start.

    Args:
        variables: The start.
        optimizer: Gives the optimizer state.
        keep_reference: A KL will be computed.
        base_reference: With LoRA, the base without adapters is the reference and nothing is kept. False keeps the
            adapters of the start: where they already say something, or the reference will be refreshed.
        kl_coef: Weight of the KL in PPO's rewards, or None.
        loss_scale: Flax's `DynamicScale` under float16, or None.
        take_over: The start itself is trained where no reference needs it: no copy, and `variables` can be read until
            the first update only.
    """
    name, trained = policy_collection(variables), _trained(variables)
    # The start itself: no update touches it, so nothing has to be copied.
    reference = variables[name] if keep_reference and not (name == "lora" and base_reference) else None
    if reference is not None or not take_over:
        trained = jax.tree.map(jnp.array, trained)
    coefficient = None if kl_coef is None else jnp.asarray(kl_coef, jnp.float32)
    step, skipped = (jnp.zeros((), jnp.int32) for _ in range(2))
    loss_scale = jax.tree.map(jnp.array, loss_scale)
    variables = {**variables, **trained}
    return TrainState(step, variables, optimizer.init(trained), reference, skipped, coefficient, loss_scale)


def saved_parts(state: TrainState) -> dict[str, Tree]:
    """What a checkpoint holds of a state: everything that training changes, frozen weights left out."""
    return {**state._asdict(), "variables": _trained(state.variables)}


def release(tree: Tree) -> None:
    """Frees a tree's arrays, whoever else refers to them. It still has shapes, dtypes and places: a template."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


def restored_state(parts: dict[str, Tree], variables: dict[str, Tree]) -> TrainState:
    """The state of a checkpoint's parts, with the frozen weights of `variables`."""
    return TrainState(**{**parts, "variables": {**variables, **parts["variables"]}})


def reference_variables(state: TrainState) -> dict[str, Tree]:
    """The variables of the reference policy; it has no value head."""
    policy = {name: tree for name, tree in state.variables.items() if name != VALUE}
    name = policy_collection(policy)
    if state.reference is not None:
        return {**policy, name: state.reference}
    if name == "lora":
        return {"params": policy["params"]}
    raise ValueError(
        "state.reference: expected the reference weights, got None; pass keep_reference=True to init_state"
    )


def refresh_reference(state: TrainState) -> TrainState:
    """The current policy becomes the reference."""
    name = policy_collection(state.variables)
    return state._replace(reference=jax.tree.map(jnp.array, state.variables[name]))


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    normaliser: Callable[[Batch], Any],
    accumulation: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """One optimizer update as one compiled function; what it changes is donated.

    An update whose loss or gradient is not finite is left out: weights, moments and counts stay as they were, and the
    state counts it (`skipped`). optax.apply_if_finite would let it through after a few, and knows no loss scale.

    Args:
        objective: objective(variables, micro-batch, normaliser) → (loss, metrics as (total, weight) pairs).
        optimizer: For the trained collections.
        normaliser: Denominators of the whole update from its whole batch, so that splitting changes nothing.
        accumulation: Micro-batches along P, run one after the other; P must be a multiple.

    Returns:
        train_step(state, batch) → (state, {"loss", "grad_norm", "skipped" (0 or 1), "metrics"}).
    """

    def compute(moving: TrainState, frozen: dict[str, Tree], batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        trained, whole, scale = moving.variables, normaliser(batch), moving.loss_scale

        def scaled(trained: dict[str, Tree], micro: Batch) -> tuple[jax.Array, Any]:
            loss, metrics = objective({**frozen, **trained}, micro, whole)
            return loss if scale is None else loss * scale.scale, (loss, metrics)

        gradient = jax.value_and_grad(scaled, has_aux=True)
        (_, (loss, metrics)), grads = _accumulate(lambda micro: gradient(trained, micro), batch, accumulation)
        if scale is not None:
            grads = jax.tree.map(lambda leaf: leaf / scale.scale, grads)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        def learn(before: TrainState) -> TrainState:
            updates, opt_state = optimizer.update(grads, before.opt_state, before.variables)
            variables = optax.apply_updates(before.variables, updates)
            return before._replace(step=before.step + 1, variables=variables, opt_state=opt_state)

        # A branch changes weights and moments in place; choosing between old and new ones would take a copy of them.
        after = jax.lax.cond(finite, learn, lambda before: before, _counted(moving, finite))
        return after, {"loss": loss, "grad_norm": norm, "skipped": 1 - finite.astype(jnp.int32), "metrics": metrics}

    compiled = jax.jit(compute, donate_argnums=0)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        # Frozen weights and reference stay outside what is donated: they may be shared, and are never copied.
        trained = _trained(state.variables)
        frozen = {name: tree for name, tree in state.variables.items() if name not in trained}
        moving, report = compiled(state._replace(variables=trained, reference=None), frozen, batch)
        return moving._replace(variables={**frozen, **moving.variables}, reference=state.reference), report

    return train_step


def _counted(state: TrainState, finite: jax.Array) -> TrainState:
    """The state with the count of updates left out, and the loss scale, after one more that is finite or not."""
    scale = state.loss_scale
    if scale is None:
        return state._replace(skipped=jnp.where(finite, 0, state.skipped + 1))
    # The scale judges a function's gradient itself: it is shown one that is finite exactly if the batch's was, all
    # micro-batches together.
    told = scale.value_and_grad(lambda x: x * jnp.where(finite, 1.0, jnp.inf))(jnp.ones(()))
    hopeless = (scale.scale <= scale.minimum_scale).astype(jnp.int32)
    return state._replace(skipped=jnp.where(finite, 0, state.skipped + hopeless), loss_scale=told.dynamic_scale)


def _accumulate(function: Callable[[Batch], Tree], batch: Batch, parts: int) -> Tree:
    """Sums function(part) over `parts` equal parts of the batch along P, one at a time."""
    if parts == 1:
        return function(batch)
    split = _split(batch, parts)
    # From zeros rather than from the first part: the program is there once.
    shapes = jax.eval_shape(function, jax.tree.map(lambda array: array[0], split))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, function(part)), None), zeros, split)[0]


def _split(batch: Batch, parts: int) -> Batch:
    """The batch as `parts` equal micro-batches along P: a leading axis more."""
    prompts = batch.tokens.shape[0]
    if prompts % parts:
        raise ValueError(f"batch: expected a number of prompts that {parts} micro-batches divide, got {prompts}")
    return jax.tree.map(lambda array: array.reshape(parts, prompts // parts, *array.shape[1:]), batch)


def make_forward_step(forward: ForwardPass, *, accumulation: int = 1) -> Callable[[dict[str, Tree], Batch], Forward]:
    """A compiled function (variables, batch) → `Forward`, without gradients, some prompts at a time.

    The reference's, and the old policy's when a batch is used for more than one update.
    """

    def step(variables: dict[str, Tree], batch: Batch) -> Forward:
        if accumulation == 1:
            return forward(variables, batch)
        parts = jax.lax.map(lambda micro: forward(variables, micro), _split(batch, accumulation))
        return jax.tree.map(lambda array: array.reshape(batch.tokens.shape), parts)

    compiled = jax.jit(step)
    # Only what the policy reads goes in: whatever else a batch holds by then must not compile it anew.
    return lambda variables, batch: compiled(variables, Batch(*batch[:4], packing=batch.packing))


def minibatches(batch: Batch, count: int, key: jax.Array) -> list[Batch]:
    """Cuts a batch into `count` equal parts along P, in an order drawn from `key`; groups stay whole."""
    if count == 1:
        return [batch]
    prompts = batch.tokens.shape[0]
    order = jax.random.permutation(key, prompts).reshape(count, prompts // count)
    return [jax.tree.map(lambda array, rows=rows: array[rows], batch) for rows in order]


def make_token_weights(section: AlgorithmSection) -> Callable[[Batch, jax.Array], tuple[jax.Array, jax.Array]]:
    """The compiled function (batch, entropy [P, G, T]) → weights f32 [P, G, T] and their mean over tokens.

    The product of what the config asks for: 1 for the tokens of high entropy and 0 for the others, and the truncated
    importance weight. Both are those of the policy that sampled, over the whole batch: however an update splits it,
    the same tokens take part.
    """

    def weigh(batch: Batch, entropy: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = jnp.ones_like(entropy)
        if section.importance_cap > 0:
            weights *= truncated_importance_weights(
                batch.old_logprobs, batch.sampler_logprobs, batch.mask, cap=section.importance_cap
            )
        mean = masked_mean(weights, batch.mask)
        if section.entropy_share < 1:
            weights *= high_entropy_mask(entropy, batch.mask, share=section.entropy_share)
        return weights, mean

    return jax.jit(weigh)


def make_preparation(
    forward: ForwardPass, algorithm: AlgorithmSection, ppo: PPOSection, training: TrainingSection
) -> Callable[[TrainState, Batch], tuple[Batch, dict[str, Any]]]:
    """All that is computed once from a batch before its first update, and only where it is needed.

    The old policy's log-probabilities (with one update per batch they are the new ones, unless something is made of
    them), the reference's, the tokens' weights, PPO's advantages and returns.

    Returns:
        prepare(state, batch) → (batch, measured): "importance_weight" and PPO's "estimates", where there are any.
    """
    look = make_forward_step(forward, accumulation=training.minibatches * training.accumulation)
    several = training.inner_epochs * training.minibatches > 1
    weighted = algorithm.importance_cap > 0 or algorithm.entropy_share < 1
    weigh, estimate = make_token_weights(algorithm), make_estimates(ppo)

    def prepare(state: TrainState, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        measured: dict[str, Any] = {}
        old = None
        if several or weighted or algorithm.advantage == "gae":
            old = look(state.variables, batch)
            batch = batch._replace(old_logprobs=old.logprobs)
        if needs_reference(algorithm, ppo):
            batch = batch._replace(ref_logprobs=look(reference_variables(state), batch).logprobs)
        if weighted:
            weights, mean = weigh(batch, old.entropy)
            batch = batch._replace(token_weights=weights, sampler_logprobs=None)
            if algorithm.importance_cap > 0:
                measured["importance_weight"] = mean
        if algorithm.advantage == "gae":
            coefficient = jnp.zeros((), jnp.float32) if state.kl_coef is None else state.kl_coef
            batch, measured["estimates"] = estimate(batch, old.values, coefficient)
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
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """The train step of the objective that a config names; `max_new_tokens` is the longest completion there may be."""
    options = loss_options(algorithm, max_new_tokens=max_new_tokens)
    learns_values = algorithm.advantage == "gae"
    return make_train_step(
        make_ppo_objective(forward, options, ppo) if learns_values else make_policy_objective(forward, options),
        optimizer,
        normaliser=lambda batch: losses.loss_normaliser(batch.mask, options["aggregation"]),
        accumulation=training.accumulation,
    )


def make_update(
    policy: Any,
    optimizer: optax.GradientTransformation,
    algorithm: AlgorithmSection,
    training: TrainingSection,
    *,
    temperature: float,
    max_new_tokens: int,
    allowed_tokens: jax.Array | None = None,
    ppo: PPOSection = PPOSection(),
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, dict[str, Any]]]:
    """Everything that is learned from one batch: inner epochs of minibatches, one compiled step each.

    Returns:
        update(state, batch, key) → (state, report): "loss" and "grad_norm" averaged over the steps, "skipped" steps
        counted, "metrics" by part of the loss, and "measured" before the first step (`make_preparation`), with the
        "kl_coef" that was used.
    """
    forward = make_forward(policy, temperature=temperature, allowed_tokens=allowed_tokens)
    step = make_configured_step(forward, optimizer, algorithm, training, ppo, max_new_tokens=max_new_tokens)
    prepare, steer = make_preparation(forward, algorithm, ppo, training), make_kl_control(ppo)

    def update(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, dict[str, Any]]:
        batch, measured = prepare(state, batch)
        if state.kl_coef is not None:
            rows, observed = batch.tokens[..., 0].size, measured["estimates"].completion_kl
            measured["kl_coef"] = float(state.kl_coef)  # now: the state will be donated
            state = state._replace(kl_coef=steer(state.kl_coef, observed, rows))
        reports = []
        for epoch in range(training.inner_epochs):
            for part in minibatches(batch, training.minibatches, jax.random.fold_in(key, epoch)):
                state, report = step(state, part)
                reports.append(report)
        return state, {**_average(jax.device_get(reports)), "measured": jax.device_get(measured)}

    return update


def _average(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the reports of a batch's steps: (total, weight) pairs add up, loss and gradient norm are averaged."""
    joined = jax.tree.map(lambda *values: sum(values), *[report["metrics"] for report in reports])
    count, skipped = len(reports), sum(int(report["skipped"]) for report in reports)
    scalars = {name: sum(float(report[name]) for report in reports) / count for name in ("loss", "grad_norm")}
    return {**scalars, "skipped": skipped, "metrics": joined}
