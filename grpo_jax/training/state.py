"""Training state: weights, moments, reference; its optimizer, its start, and its part of a checkpoint."""

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
    """The trained collection that samples ahead (training.async_level), and its update count (i32 scalar)."""

    step: jax.Array
    weights: PyTree


class TrainState(NamedTuple):
    """Everything an update changes.

    Attributes:
        step: i32 scalar, optimizer updates so far.
        variables: {"params": …}, perhaps "lora" (then the params are frozen), perhaps "value" (PPO's value head) and
            "visual" (a frozen vision tower; a trained one is part of the params).
        opt_state: Optimizer state of the trained collections.
        reference: The trained collection of the reference policy; None without KL, or where (with LoRA) the reference
            is the base without its adapters.
        skipped: i32 scalar, consecutive updates left out because loss or gradient were not finite.
        rollout_weights: The policy that samples the next batch, where that is sampled ahead; or None.
        entropy_control: The entropy coefficient, where it adapts; or None.
    """

    step: jax.Array
    variables: Variables
    opt_state: PyTree
    reference: PyTree | None
    skipped: jax.Array
    rollout_weights: RolloutWeights | None = None
    entropy_control: EntropyControl | None = None


def make_schedule(section: OptimizerSection, total_updates: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then constant, linear to 0 or cosine to 0."""
    peak, warmup = section.learning_rate, section.warmup_steps
    assert peak is not None  # the config fills it in
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


def decayed(weights: Variables) -> Variables:
    """Mask of the weights that decay, a bool for each: projections, kernels and adapters.

    Norms, biases, embeddings (learned positions and an untied unembedding too) and the value head do not: decay would
    pull norms to 0 rather than to 1, rare tokens to 0 with every update they take no part in, and values to 0.
    """

    def decays(path: tuple[object, ...], _: object) -> bool:
        names = [getattr(entry, "key", None) for entry in path]
        return names[-1] in _DECAYED and names[0] != VALUE

    return jax.tree_util.tree_map_with_path(decays, weights)


def make_optimizer(section: OptimizerSection, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW or Muon behind a global-norm clip; float32 throughout.

        m = β1 m + (1 - β1) g,  v = β2 v + (1 - β2) g²,  w' = w - rate · (m̂ / (√v̂ + ε) + weight_decay · w)

    with the last term for the weights that decay alone (`decayed`). From https://arxiv.org/abs/1711.05101. Muon moves
    those by their momentum made orthogonal, each layer's matrix by itself, and scaled to AdamW's step
    (https://arxiv.org/abs/2502.16982), so that a learning rate means the same.
    """

    optimizer = optax.adamw(schedule, b2=section.beta2, weight_decay=section.weight_decay, mask=decayed)
    if section.name == "muon":
        optimizer = optax.contrib.muon(
            schedule,
            weight_decay=section.weight_decay,
            adam_b2=section.beta2,
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=0.2,
        )
    if section.max_grad_norm == 0:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(section.max_grad_norm), optimizer)


def _matrices(weights: Variables) -> PyTree:
    """Muon's axes of the weights that decay, [.., in, out]; None for the others."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return jax.tree.map(lambda decays: axes if decays else None, decayed(weights))


def policy_collection(variables: Variables) -> str:
    """Return the collection that holds the policy's trained weights: "lora" if there is one, else "params"."""
    return "lora" if "lora" in variables else "params"


def trained_weights(variables: Variables) -> Variables:
    """Return the collections that gradients are taken for: the policy's, and the value head's if any."""
    return {name: variables[name] for name in (policy_collection(variables), VALUE) if name in variables}


def needs_reference(algorithm: AlgorithmSection, ppo: PPOSection) -> bool:
    """Return whether there is a KL against a reference: in the loss, or in PPO's rewards."""
    if algorithm.teacher:  # it stands for the reference, and is no part of the state
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
    """Make a fresh state whose reference is the start; it owns copies of the trained weights, so they can be donated.

    Args:
        keep_reference: A KL will be computed.
        base_reference: With LoRA, the base without adapters is the reference and nothing is kept. False keeps the
            adapters of the start: where they are not fresh, or the reference will be refreshed.
        take_over: The start itself is trained where no reference needs it: no copy, and `variables` can be read until
            the first update only.
    """
    name, trained = policy_collection(variables), trained_weights(variables)
    # The start itself: no update touches it, so nothing has to be copied.
    reference = variables[name] if keep_reference and not (name == "lora" and base_reference) else None
    if reference is not None or not take_over:
        trained = jax.tree.map(jnp.array, trained)
    step, skipped = (jnp.zeros((), jnp.int32) for _ in range(2))
    variables = {**variables, **trained}
    return TrainState(step, variables, optimizer.init(trained), reference, skipped)


def commit_to_device(state: TrainState) -> TrainState:
    """Commit a fresh state, counts and moments too, to the device of its weights.

    An update's results are committed: were its first arguments not, the second update would be compiled anew.
    """
    (device, *others) = jax.tree.leaves(state.variables)[0].devices()
    if others:
        return state
    return jax.tree.map(lambda leaf: leaf if leaf.committed else jax.device_put(leaf, device), state)


def saved_parts(state: TrainState) -> dict[str, PyTree]:
    """Return the parts of a state in a checkpoint: all that training changes, without frozen weights."""
    return {**state._asdict(), "variables": trained_weights(state.variables)}


def free_buffers(tree: PyTree) -> None:
    """Free a tree's arrays, whoever else refers to them. Shapes, dtypes and places stay; tracers hold no memory."""
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
    """Return the variables of the policy that samples ahead, without a value head."""
    learned = trained_weights(state.variables)
    frozen = {name: tree for name, tree in state.variables.items() if name not in learned}
    return {**frozen, policy_collection(state.variables): copied.weights}
