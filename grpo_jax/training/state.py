"""State of training: weights, moments, reference; how it begins, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax

from grpo_jax.config.algorithm import AlgorithmSection, PPOSection
from grpo_jax.models.variables import VALUE, PyTree, Variables


class StaleWeights(NamedTuple):
    """The policy that samples ahead (training.lag), of before the last updates.

    Attributes:
        step: i32 scalar, optimizer updates that it has seen.
        weights: The policy's trained collection.
    """

    step: jax.Array
    weights: PyTree


class TrainState(NamedTuple):
    """Everything an update changes.

    Attributes:
        step: i32 scalar, optimizer updates so far.
        variables: {"params": …}, perhaps "lora" (then the params are frozen), perhaps "value" (PPO's value head) and
            "visual" (a frozen vision tower; a trained one is part of the params).
        opt_state: Optimizer state of the trained collections.
        reference: The policy's trained collection that KL is measured against, as it was; or None: no KL, or (with
            LoRA) the base without its adapters.
        skipped: i32 scalar, updates in a row that were left out because loss or gradient were not finite; of float16
            those alone at which the loss scale could fall no further.
        kl_coef: f32 scalar, the weight of the KL in PPO's rewards, or None where there is none.
        loss_scale: Flax's `DynamicScale` under float16, or None.
        behind: The policy that samples the batch after the last one learned from, where that is sampled ahead; or None.
    """

    step: jax.Array
    variables: Variables
    opt_state: PyTree
    reference: PyTree | None
    skipped: jax.Array
    kl_coef: jax.Array | None = None
    loss_scale: PyTree | None = None
    behind: StaleWeights | None = None


def policy_collection(variables: Variables) -> str:
    """The collection that holds the policy's trained weights: "lora" if there is one, else "params"."""
    return "lora" if "lora" in variables else "params"


def trained_collections(variables: Variables) -> tuple[str, ...]:
    """The collections that gradients are taken for: the policy's, and the value head where there is one."""
    policy = policy_collection(variables)
    return (policy, VALUE) if VALUE in variables else (policy,)


def trained_weights(variables: Variables) -> Variables:
    """The trained collections themselves."""
    return {name: variables[name] for name in trained_collections(variables)}


def needs_reference(algorithm: AlgorithmSection, ppo: PPOSection) -> bool:
    """Whether anything is measured against a reference: a KL term of the loss, or PPO's KL in the rewards."""
    return algorithm.kl_coef > 0 or (algorithm.learns_values and ppo.kl_coef > 0)


def init_state(
    variables: Variables,
    optimizer: optax.GradientTransformation,
    *,
    keep_reference: bool,
    base_reference: bool = True,
    kl_coef: float | None = None,
    loss_scale: PyTree | None = None,
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
    name, trained = policy_collection(variables), trained_weights(variables)
    # The start itself: no update touches it, so nothing has to be copied.
    reference = variables[name] if keep_reference and not (name == "lora" and base_reference) else None
    if reference is not None or not take_over:
        trained = jax.tree.map(jnp.array, trained)
    coefficient = None if kl_coef is None else jnp.asarray(kl_coef, jnp.float32)
    step, skipped = (jnp.zeros((), jnp.int32) for _ in range(2))
    loss_scale = jax.tree.map(jnp.array, loss_scale)
    variables = {**variables, **trained}
    return TrainState(step, variables, optimizer.init(trained), reference, skipped, coefficient, loss_scale)


def commit_to_device(state: TrainState) -> TrainState:
    """A fresh state bound to the device of its weights, counts and moments too.

    JAX tells arrays that were put on a device from those that happen to lie there. What an update gives is bound: were
    its first arguments not, the second update would be compiled anew.
    """
    (device, *others) = jax.tree.leaves(state.variables)[0].devices()
    if others:
        return state
    return jax.tree.map(lambda leaf: leaf if leaf.committed else jax.device_put(leaf, device), state)


def saved_parts(state: TrainState) -> dict[str, PyTree]:
    """Parts of a state in a checkpoint: everything that training changes, frozen weights left out."""
    return {**state._asdict(), "variables": trained_weights(state.variables)}


def free_buffers(tree: PyTree) -> None:
    """Frees a tree's arrays, whoever else refers to them. It still has shapes, dtypes and places: a template.

    What is only traced holds no memory and is left as it is.
    """
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.core.Tracer):
            leaf.delete()


def restored_state(parts: Mapping[str, PyTree], variables: Variables) -> TrainState:
    """The state of a checkpoint's parts, with the frozen weights of `variables`."""
    return TrainState(**{**parts, "variables": {**variables, **parts["variables"]}})


def reference_variables(state: TrainState) -> Variables:
    """The variables of the reference policy; it has no value head."""
    policy = {name: tree for name, tree in state.variables.items() if name != VALUE}
    name = policy_collection(policy)
    if state.reference is not None:
        return {**policy, name: state.reference}
    if name == "lora":
        return {name: tree for name, tree in policy.items() if name != "lora"}
    raise ValueError(
        "state.reference: expected the reference weights, got None; pass keep_reference=True to init_state"
    )


def refresh_reference(state: TrainState) -> TrainState:
    """The current policy becomes the reference."""
    name = policy_collection(state.variables)
    return state._replace(reference=jax.tree.map(jnp.array, state.variables[name]))


def stale_copy(state: TrainState) -> StaleWeights:
    """The policy as it stands, in arrays of its own that no update touches."""
    weights = state.variables[policy_collection(state.variables)]
    return StaleWeights(jnp.array(state.step), jax.tree.map(jnp.array, weights))


def stale_variables(state: TrainState, behind: StaleWeights) -> Variables:
    """The variables of the policy that samples ahead; a value head is of no use to it."""
    learned = trained_collections(state.variables)
    frozen = {name: tree for name, tree in state.variables.items() if name not in learned}
    return {**frozen, policy_collection(state.variables): behind.weights}
