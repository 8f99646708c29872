"""How a policy lies on a mesh of devices: a table from paths to partitions, and its uses.

The mesh has two axes. Along `fsdp` the prompts of a batch are shared out, and every weight is stored in parts that
are gathered when its layer runs (Zhao et al. 2023, arXiv:2304.11277). Along `tensor` the layers themselves are cut:
heads, units of the MLP, rows of the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053). XLA finds the communication
(Xu et al. 2021, arXiv:2105.04663); all that is said here is where parameters, optimizer state and batch lie.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_jax.models.architectures import ARCHITECTURES
from grpo_jax.models.layers import COLUMNS, FUSED, ROWS, Architecture
from grpo_jax.models.variables import VISUAL, PyTree
from grpo_jax.models.vision.tower import TOWERS, TowerArchitecture

FSDP, TENSOR = "fsdp", "tensor"
_BOTH = (TENSOR, FSDP)


def _projections(cut: str, architectures: Iterable[Architecture | TowerArchitecture]) -> str:
    kinds = {name: kind for architecture in architectures for name, kind in architecture.projections.items()}
    return f"({'|'.join(name for name, kind in kinds.items() if kind == cut)})"


_COLUMNS = _projections(COLUMNS, ARCHITECTURES.values())
_ROWS = _projections(ROWS, ARCHITECTURES.values())
_FUSED = _projections(FUSED, ARCHITECTURES.values())
_TOWER = {cut: _projections(cut, TOWERS.values()) for cut in (COLUMNS, ROWS, FUSED)}


class Partition(NamedTuple):
    """A row of the table."""

    pattern: str  # of the end of a leaf's path, names joined by "/"
    spec: P  # axes of the mesh for each axis of the leaf; axes left out are whole
    otherwise: P | None = None  # the spec where the first does not divide the leaf, or None: then it is refused


PARTITIONS = (
    # Towers are small beside their language models: what does not divide is whole on every device.
    Partition(f"{VISUAL}/layers/{_TOWER[COLUMNS]}/kernel", P(None, FSDP, TENSOR), P()),
    Partition(f"{VISUAL}/layers/{_TOWER[ROWS]}/kernel", P(None, TENSOR, FSDP), P()),
    Partition(f"{VISUAL}/layers/{_TOWER[FUSED]}/kernel", P(None, _BOTH), P()),
    Partition(f"{VISUAL}/layers/[^/]*/[ab]", P()),
    Partition(f"{VISUAL}/merger/fc1/kernel", P(FSDP, TENSOR), P()),
    Partition(f"{VISUAL}/merger/fc2/kernel", P(TENSOR, FSDP), P()),
    Partition(f"{VISUAL}/deepstack/fc1/kernel", P(None, FSDP, TENSOR), P()),
    Partition(f"{VISUAL}/deepstack/fc2/kernel", P(None, TENSOR, FSDP), P()),
    Partition(f"{VISUAL}/(patch_embed/kernel|pos_embed)", P(None, _BOTH), P()),
    # [V, D]; vocabularies are what a tensor axis divides or not (GPT-2's 50257).
    Partition("embed_tokens|lm_head", P(TENSOR, FSDP), P(None, _BOTH)),
    Partition("embed_positions", P(None, _BOTH)),
    # Kernels [layers, in, out].
    Partition(f"layers/{_COLUMNS}/kernel", P(None, FSDP, TENSOR)),
    Partition(f"layers/{_ROWS}/kernel", P(None, TENSOR, FSDP)),
    # Queries, keys and values in one product: a cut through its outputs would not be one through the heads.
    Partition(f"layers/{_FUSED}/kernel", P(None, _BOTH)),
    # Experts [layers, experts, in, out], each cut as one MLP would be; the router is small.
    Partition("layers/(gate|up)_experts/kernel", P(None, None, FSDP, TENSOR)),
    Partition("layers/down_experts/kernel", P(None, None, TENSOR, FSDP)),
    Partition("layers/router/embedding", P()),
    # Adapters, a [layers, in, rank] and b [layers, rank, out], as the kernel beside them.
    Partition(f"layers/{_COLUMNS}/a", P(None, FSDP)),
    Partition(f"layers/{_COLUMNS}/b", P(None, None, TENSOR)),
    Partition(f"layers/{_ROWS}/a", P(None, TENSOR)),
    Partition(f"layers/{_ROWS}/b", P(None, None, FSDP)),
    Partition(f"layers/{_FUSED}/a", P(None, _BOTH)),
    Partition(f"layers/{_FUSED}/b", P()),
    # A few kilobytes each: whole on every device.
    Partition("scale|excess|bias|value/kernel|ns_coeffs", P()),
)
"""State of an optimizer follows its parameter, for its path ends alike. Scalars are on every device."""


def make_mesh(fsdp: int, tensor: int, devices: Sequence[jax.Device]) -> Mesh:
    """Make a mesh of the first fsdp · tensor devices; neighbours share a tensor axis, which communicates most."""
    if len(devices) < fsdp * tensor:
        raise ValueError(f"a mesh of fsdp {fsdp} x tensor {tensor} takes {fsdp * tensor} devices, got {len(devices)}")
    return Mesh(np.asarray(devices[: fsdp * tensor]).reshape(fsdp, tensor), (FSDP, TENSOR))


def shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """A NamedSharding for each leaf (an array or its shape) of a train state or a part of it (`PARTITIONS`)."""
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
    for spec in (partition.spec, partition.otherwise):
        if spec is not None and _undivided(spec, shape, mesh) is None:
            return _shortest(spec, mesh)
    axis, parts = _undivided(partition.otherwise or partition.spec, shape, mesh)
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    raise ValueError(f"{name} of shape {list(shape)}: axis {axis} does not divide into {parts} parts (mesh {sizes})")


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


def _undivided(spec: P, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, int] | None:
    """The first axis that its part of the mesh does not divide, and the number of parts; None if there is none."""
    for axis, names in enumerate(spec):
        parts = math.prod(mesh.shape[name] for name in _names(names))
        if shape[axis] % parts:
            return axis, parts
    return None


def _shortest(spec: P, mesh: Mesh) -> P:
    """The spec as XLA gives it back: without axes of one device and without whole axes at the end."""
    axes = []
    for names in spec:
        cut = tuple(name for name in _names(names) if mesh.shape[name] > 1)
        axes.append(cut[0] if len(cut) == 1 else cut or None)
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


def shard(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Lay a tree of parameters or state on the mesh; leaves that lie right already are not copied.

    Here and below, without a mesh (None) everything stays as it is, on one device. Each process of several needs the
    whole of a leaf that does not lie right, and puts its own devices' parts there.
    """
    return tree if mesh is None else jax.tree.map(_put, tree, shardings(tree, mesh))


def shard_batch(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Share arrays [P, ..] out by prompts over `fsdp`, alike along `tensor`; P must be a multiple of `fsdp`."""
    return tree if mesh is None else jax.tree.map(lambda leaf: _put(leaf, NamedSharding(mesh, P(FSDP))), tree)


def gather(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Bring the whole of each array to every device, and so into every process."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, P()))


def on_host(tree: PyTree) -> PyTree:
    """Whole NumPy arrays in place of those on devices. Several processes must make the call together.

    What lies in other processes too is brought together one leaf at a time: no device holds two of them whole.
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
    """Keeps arrays [P, ..] of a compiled computation shared out by prompts.

    The states between layers then stay where they are, and weights come to them; left to itself XLA may bring all
    prompts to every device instead. It pads a number of prompts that `fsdp` does not divide.
    """

    mesh: Mesh

    def __call__(self, tree: PyTree) -> PyTree:
        """Lay arrays out by prompts."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P(FSDP)))

    def embedded(self, states: jax.Array) -> jax.Array:
        """Lay out states [P, S, D] from the columns of the embedding's parts: they travel, and not the table."""
        columns = NamedSharding(self.mesh, P(None, None, FSDP))
        return self(jax.lax.with_sharding_constraint(states, columns))


def gather_columns(matrix: jax.Array, mesh: Mesh | None) -> jax.Array:
    """A table [V, D] of a compiled computation with whole rows on each device, shared out along `tensor` at most."""
    if mesh is None:
        return matrix
    rows = P(TENSOR) if matrix.shape[0] % mesh.shape[TENSOR] == 0 else P()
    return jax.lax.with_sharding_constraint(matrix, NamedSharding(mesh, rows))


def shard_optimizer(optimizer: optax.GradientTransformation, mesh: Mesh | None) -> optax.GradientTransformation:
    """The optimizer with state and steps laid as the parameters, so that an update's donated memory fits its result.

    Gradients are brought into that layout first: each device then needs the sum of its own part alone.
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
