"""Sharding of a policy on a mesh of devices: a table from paths to partitions, and its uses.

The mesh has two axes. `fsdp` shards the prompts of a batch, and every weight, which is gathered when its layer runs
(Zhao et al. 2023, arXiv:2304.11277). `tensor` shards the layers themselves: heads, units of the MLP, rows of the
vocabulary (Shoeybi et al. 2019, arXiv:1909.08053). This module defines the shardings of parameters, optimizer state
and batch; XLA derives the communication (Xu et al. 2021, arXiv:2105.04663).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_jax.models.architectures import ARCHITECTURES
from grpo_jax.models.layers import COLUMNS, FUSED, ROWS
from grpo_jax.models.variables import VISUAL, PyTree
from grpo_jax.models.vision.tower import TOWERS

FSDP, TENSOR = "fsdp", "tensor"
_BOTH = (TENSOR, FSDP)


def _projections(cut: str) -> str:
    architectures = *ARCHITECTURES.values(), *TOWERS.values()
    kinds = {name: kind for architecture in architectures for name, kind in architecture.projections.items()}
    return f"({'|'.join(name for name, kind in kinds.items() if kind == cut)})"


_COLUMNS, _ROWS, _FUSED = map(_projections, (COLUMNS, ROWS, FUSED))


class Partition(NamedTuple):
    """A row of the table."""

    pattern: str  # pattern of the end of a leaf's path, names joined by "/"
    spec: P  # axes of the mesh for each axis of the leaf; other axes are not sharded
    otherwise: P | None = None  # the spec if the first does not divide the leaf; None refuses the leaf


PARTITIONS = (
    Partition(f"{VISUAL}/layers/[^/]*/[ab]", P()),
    Partition("merger/fc1/kernel", P(FSDP, TENSOR)),
    Partition("merger/fc2/kernel", P(TENSOR, FSDP)),
    Partition("patch_embed/kernel|pos_embed", P(None, _BOTH)),
    # [V, D]; a tensor axis may not divide the vocabulary (GPT-2's 50257).
    Partition("embed_tokens|lm_head", P(TENSOR, FSDP), P(None, _BOTH)),
    Partition("embed_positions", P(None, _BOTH)),
    # Kernels [layers, in, out], also those of a vision tower.
    Partition(f"(layers|deepstack)/{_COLUMNS}/kernel", P(None, FSDP, TENSOR)),
    Partition(f"(layers|deepstack)/{_ROWS}/kernel", P(None, TENSOR, FSDP)),
    # Fused queries, keys and values: sharding the outputs would not shard the heads.
    Partition(f"layers/{_FUSED}/kernel", P(None, _BOTH)),
    # Adapters, a [layers, in, rank] and b [layers, rank, out], like their kernel.
    Partition(f"layers/{_COLUMNS}/a", P(None, FSDP)),
    Partition(f"layers/{_COLUMNS}/b", P(None, None, TENSOR)),
    Partition(f"layers/{_ROWS}/a", P(None, TENSOR)),
    Partition(f"layers/{_ROWS}/b", P(None, None, FSDP)),
    Partition(f"layers/{_FUSED}/a", P(None, _BOTH)),
    Partition(f"layers/{_FUSED}/b", P()),
    Partition("scale|excess|bias|value/kernel|ns_coeffs", P()),  # a few kilobytes each: replicated
)
"""State of an optimizer follows its parameter, for its path ends alike. Scalars are on every device."""


def make_mesh(fsdp: int, tensor: int, devices: Sequence[jax.Device]) -> Mesh:
    """Make a mesh of the first fsdp · tensor devices; neighbours form a tensor axis, which communicates most."""
    if len(devices) < fsdp * tensor:
        raise ValueError(f"a mesh of fsdp {fsdp} x tensor {tensor} takes {fsdp * tensor} devices, got {len(devices)}")
    return Mesh(np.asarray(devices[: fsdp * tensor]).reshape(fsdp, tensor), (FSDP, TENSOR))


def shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """Return a NamedSharding for each leaf (array or shape) of a train state or a part of it (`PARTITIONS`)."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    specs = [_spec(name, np.shape(leaf), mesh) for name, (_, leaf) in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(structure, [NamedSharding(mesh, spec) for spec in specs])


def _spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    if not shape:
        return P()
    partition = next((line for line in PARTITIONS if re.search(f"(^|/)({line.pattern})$", name)), None)
    if partition is None:
        raise ValueError(f"{name}: the table of partitions has no row for it; its shape is {shape}")
    # A tower is small beside its language model: its leaves that the mesh does not divide are replicated.
    otherwise = P() if VISUAL in name.split("/") else partition.otherwise
    for spec in (partition.spec, otherwise):
        if spec is not None and _undivided(spec, shape, mesh) is None:
            return _shortest(spec, mesh)
    axis, parts = _undivided(partition.otherwise or partition.spec, shape, mesh)
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    raise ValueError(f"{name} of shape {list(shape)}: axis {axis} does not divide into {parts} parts (mesh {sizes})")


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


def _undivided(spec: P, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, int] | None:
    """Return the first axis that its mesh axes do not divide, and the number of shards; None if there is none."""
    for axis, names in enumerate(spec):
        parts = math.prod(mesh.shape[name] for name in _names(names))
        if shape[axis] % parts:
            return axis, parts
    return None


def _shortest(spec: P, mesh: Mesh) -> P:
    """Return the spec in XLA's normal form: without axes of one device and without trailing unsharded axes."""
    axes = []
    for names in spec:
        cut = tuple(name for name in _names(names) if mesh.shape[name] > 1)
        axes.append(cut[0] if len(cut) == 1 else cut or None)
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


def shard(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Shard a tree of parameters or state over the mesh, without copying correctly sharded leaves.

    Here and below, without a mesh (None) everything stays unchanged on one device. With several processes, each needs
    the whole of every other leaf, and places its own devices' shards.
    """
    return tree if mesh is None else jax.tree.map(_put, tree, shardings(tree, mesh))


def shard_batch(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Shard arrays [P, ..] by prompts over `fsdp`, replicated along `tensor`; P must be a multiple of `fsdp`."""
    return tree if mesh is None else jax.tree.map(lambda leaf: _put(leaf, NamedSharding(mesh, P(FSDP))), tree)


def gather(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Replicate each array on every device, and so in every process."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, P()))


def on_host(tree: PyTree) -> PyTree:
    """Fetch device arrays as whole NumPy arrays. All processes must make the call together.

    Leaves that are sharded over processes are gathered one at a time, so no device holds two whole ones.
    """

    def whole(leaf: PyTree) -> PyTree:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        gathered = gather(leaf, leaf.sharding.mesh)
        on_host = np.asarray(gathered)
        gathered.delete()
        return on_host

    return jax.device_get(jax.tree.map(whole, tree))


def _put(leaf: PyTree, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


@dataclass(frozen=True)
class OverPrompts:
    """Keeps arrays [P, ..] of a compiled computation sharded by prompts.

    The states between layers then stay on their devices, and weights are gathered. XLA alone might instead bring all
    prompts to every device. It pads the prompts if `fsdp` does not divide their number.
    """

    mesh: Mesh

    def __call__(self, tree: PyTree) -> PyTree:
        """Shard arrays by prompts."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P(FSDP)))

    def embedded(self, states: jax.Array) -> jax.Array:
        """Shard states [P, S, D] of a sharded embedding by prompts: the states move, not the table."""
        columns = NamedSharding(self.mesh, P(None, None, FSDP))
        return self(jax.lax.with_sharding_constraint(states, columns))


def gather_columns(matrix: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Gather the rows of a table [V, D] in a compiled computation; it stays sharded at most along `tensor`."""
    if mesh is None:
        return matrix
    rows = P(TENSOR) if matrix.shape[0] % mesh.shape[TENSOR] == 0 else P()
    return jax.lax.with_sharding_constraint(matrix, NamedSharding(mesh, rows))


def shard_optimizer(optimizer: optax.GradientTransformation, mesh: Mesh | None) -> optax.GradientTransformation:
    """Shard an optimizer's state and updates like the parameters, so that an update can reuse its donated memory.

    Gradients get this sharding first, so each device needs only the sum of its own shard.
    """
    if mesh is None:
        return optimizer

    def constrain(tree: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh))

    def init(params: PyTree) -> PyTree:
        return jax.jit(optimizer.init, out_shardings=shardings(jax.eval_shape(optimizer.init, params), mesh))(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return constrain(optimizer.update(constrain(updates), state, params))

    return optax.GradientTransformation(init, update)
