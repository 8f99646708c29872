"""Training state (weights, moments, reference), its optimizer, its initialisation, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax
import optax.contrib

from grpo_jax.config.sections import AlgorithmSection, OptimizerSection, PPOSection
from grpo_jax.core.losses import EntropyControl
from grpo_jax.models.variables import VALUE, PyTree, Variables

_DECAYED = ("kernel", "a", "b")  # matrices of projections, and of the adapters beside them


class RolloutWeights(NamedTuple):
    """The trained collection of the policy that samples ahead (training.async_level), and its step (i32 scalar)."""

    step: jax.Array
    weights: PyTree


class TrainState(NamedTuple):
    """Everything an update changes."""

    step: jax.Array  # i32 scalar, optimizer updates so far
    # {"params": …}, optionally "lora" (then the params are frozen), "value" (PPO's value head) and "visual" (a frozen
    # vision tower; a trained one is part of the params)
    variables: Variables
    opt_state: PyTree  # of the trained collections
    # trained collection of the reference policy; None without KL, or if (with LoRA) it is the base without adapters
    reference: PyTree | None
    skipped: jax.Array  # i32 scalar, consecutive updates skipped because loss or gradient was not finite
    rollout_weights: RolloutWeights | None = None  # the policy that samples the next batch ahead
    entropy_control: EntropyControl | None = None  # the adaptive entropy coefficient


def make_schedule(section: OptimizerSection, total_updates: int) -> optax.Schedule:
    """Make the learning-rate schedule: linear warm-up, then constant, linear to 0 or cosine to 0."""
    peak, warmup = section.learning_rate, section.warmup_steps
    assert peak is not None  # the config fills it in
    remaining = max(total_updates - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, remaining),
        "cosine": optax.cosine_decay_schedule(peak, remaining),
    }[section.schedule]
    if warmup == 0:
        return after
    # The first update uses peak / warmup rather than 0.
    ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([ramp, after], [warmup])


def decayed(weights: Variables) -> Variables:
    """Return the weight-decay mask, a bool for each weight: true for projections, kernels and adapters.

    Norms, biases, embeddings (also learned positions and an untied unembedding) and the value head do not decay.
    Decay would pull norms to 0 rather than 1, and values to 0. It would also shrink rare tokens in every update
    without them.
    """

    def decays(path: tuple[object, ...], _: object) -> bool:
        names = [getattr(entry, "key", None) for entry in path]
        return names[-1] in _DECAYED and names[0] != VALUE

    return jax.tree_util.tree_map_with_path(decays, weights)


def make_optimizer(section: OptimizerSection, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Make AdamW or Muon after a global-norm clip; float32 throughout.

        m = β1 m + (1 - β1) g,  v = β2 v + (1 - β2) g²,  w' = w - rate · (m̂ / (√v̂ + ε) + weight_decay · w)

    Only decayed weights have the last term (`decayed`). From https://arxiv.org/abs/1711.05101. Muon updates these by
    their orthogonalised momentum, for each layer's matrix separately. The update is scaled to AdamW's RMS
    (https://arxiv.org/abs/2502.16982), so both can use the same learning rate.
    """

    optimizer = optax.adamw(schedule, b2=section.beta2, weight_decay=section.weight_decay, mask=decayed)
    if section.name == "muon":
        muon = optax.contrib.muon(
            schedule,
            weight_decay=section.weight_decay,
            muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1),
            consistent_rms=0.2,
        )
        # Not by optax.contrib.muon, whose AdamW has Nesterov momentum.
        optimizer = optax.partition(
            {"muon": muon, "adamw": optimizer},
            lambda weights: jax.tree.map(lambda decays: "muon" if decays else "adamw", decayed(weights)),
        )
    if section.max_grad_norm == 0:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(section.max_grad_norm), optimizer)


def policy_collection(variables: Variables) -> str:
    """Return the collection that holds the policy's trained weights: "lora" if there is one, else "params"."""
    return "lora" if "lora" in variables else "params"


def trained_weights(variables: Variables) -> Variables:
    """Return the collections with gradients: the policy's, and the value head's if any."""
    return {name: variables[name] for name in (policy_collection(variables), VALUE) if name in variables}


def needs_reference(algorithm: AlgorithmSection, ppo: PPOSection) -> bool:
    """Return whether there is a KL against a reference: in the loss, or in PPO's rewards."""
    if algorithm.teacher:  # a teacher replaces the reference and is not part of the state
        return False
    return algorithm.kl_coef > 0 or algorithm.advantage == "opd" or (algorithm.learns_values and ppo.kl_coef > 0)


def init_state(
    variables: Variables,
    optimizer: optax.GradientTransformation,
    *,
    keep_reference: bool,
    base_reference: bool = True,
    take_over: bool = False,
) -> TrainState:
    """Make the initial state, with the initial policy as reference and donatable copies of the trained weights.

    Args:
        keep_reference: A KL will be computed.
        base_reference: With LoRA, use the base without adapters as reference and store nothing. False stores the
            initial adapters, for adapters that are not fresh or a reference that will be refreshed.
        take_over: Train `variables` without a copy if no reference needs them. They can then be read only until the
            first update.
    """
    name, trained = policy_collection(variables), trained_weights(variables)
    # The initial weights themselves: no update touches them, so no copy is needed.
    reference = variables[name] if keep_reference and not (name == "lora" and base_reference) else None
    if reference is not None or not take_over:
        trained = jax.tree.map(jnp.array, trained)
    step, skipped = (jnp.zeros((), jnp.int32) for _ in range(2))
    variables = {**variables, **trained}
    return TrainState(step, variables, optimizer.init(trained), reference, skipped)


def commit_to_device(state: TrainState) -> TrainState:
    """Commit a fresh state, counts and moments too, to the device of its weights.

    An update's results are committed; uncommitted first arguments would make the second update recompile.
    """
    (device, *others) = jax.tree.leaves(state.variables)[0].devices()
    if others:
        return state
    return jax.tree.map(lambda leaf: leaf if leaf.committed else jax.device_put(leaf, device), state)


def saved_parts(state: TrainState) -> dict[str, PyTree]:
    """Return the parts of a state for a checkpoint: everything that training changes, without frozen weights."""
    return {**state._asdict(), "variables": trained_weights(state.variables)}


def free_buffers(tree: PyTree) -> None:
    """Free a tree's arrays despite other references. Shapes, dtypes and shardings stay; tracers hold no memory."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            leaf.delete()


def restored_state(parts: Mapping[str, PyTree], variables: Variables) -> TrainState:
    """Join a checkpoint's parts with the frozen weights of `variables`."""
    return TrainState(**{**parts, "variables": {**variables, **parts["variables"]}})


def reference_variables(state: TrainState) -> Variables:
    """Return the variables of the reference policy; it has no value head."""
    policy = {name: tree for name, tree in state.variables.items() if name != VALUE}
    name = policy_collection(policy)
    if state.reference is None and name == "lora":
        return {name: tree for name, tree in policy.items() if name != "lora"}
    return {**policy, name: state.reference}


def refresh_reference(state: TrainState) -> TrainState:
    """Make the current policy the reference."""
    name = policy_collection(state.variables)
    return state._replace(reference=jax.tree.map(jnp.array, state.variables[name]))


def rollout_copy(state: TrainState) -> RolloutWeights:
    """Copy the policy's weights into arrays that no update touches."""
    weights = state.variables[policy_collection(state.variables)]
    return RolloutWeights(jnp.array(state.step), jax.tree.map(jnp.array, weights))


def rollout_variables(state: TrainState, copied: RolloutWeights) -> Variables:
    """Return the variables of the policy that samples ahead, without value head."""
    policy = {name: tree for name, tree in state.variables.items() if name != VALUE}
    return {**policy, policy_collection(policy): copied.weights}
