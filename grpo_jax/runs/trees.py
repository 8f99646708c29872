"""Pytrees as a checkpoint stores them: nested dictionaries of arrays, whatever types the tree had."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from grpo_jax.errors import UserError
from grpo_jax.models.variables import PyTree

EVALUATED = "variables"  # the part of a state that evaluation needs; stored apart so that it is read alone
ITEMS = (EVALUATED, "training")


def items(state: Mapping[str, PyTree]) -> dict[str, dict[str, PyTree]]:
    """Split a state into Orbax's items: the variables, and all other parts as one."""
    if not isinstance(state, Mapping) or EVALUATED not in state:
        raise TypeError(f"state: expected a mapping with the part {EVALUATED!r}, got {type(state).__name__}")
    training = {name: part for name, part in state.items() if name != EVALUATED}
    return {EVALUATED: {EVALUATED: state[EVALUATED]}, "training": training}


def leaves(tree: PyTree) -> dict[str, PyTree]:
    """Return `{"optimizer.0.mu.kernel": leaf}` in the tree's own order."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    if len(named) != len(flat):
        raise ValueError("state: two leaves have the same path; keys of one dictionary must differ as text")
    return named


def _nested(leaves: Mapping[str, PyTree]) -> dict[str, PyTree]:
    tree: dict[str, PyTree] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _is_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def storable(part: PyTree) -> dict[str, PyTree]:
    """Return nested dictionaries of arrays; all but `jax.Array`s are copied, since they are written later."""

    def convert(name: str, leaf: PyTree) -> jax.Array | np.ndarray:
        if _is_key(leaf):
            return jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array):
            return leaf
        array = np.array(leaf)
        if array.dtype.kind in "OUSMm":
            raise TypeError(
                f"state: {name} is a {type(leaf).__name__}; expected arrays and numbers (text goes to meta)"
            )
        return array

    return _nested({name: convert(name, leaf) for name, leaf in leaves(part).items()})


def target(part: PyTree) -> dict[str, PyTree]:
    """Describe the shapes, dtypes and shardings of a template, which Orbax restores to."""

    def describe(leaf: PyTree) -> jax.ShapeDtypeStruct | np.ndarray:
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return np.asarray(leaf)

    return _nested({name: describe(leaf) for name, leaf in leaves(part).items()})


def as_template(leaf: PyTree, restored: PyTree) -> PyTree:
    """Give a restored array the form of its template: key, Python number, uncommitted array."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(restored, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        # an array that was free to follow others to their devices stays free
        return restored if getattr(leaf, "committed", True) else jnp.asarray(np.asarray(restored))
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(np.asarray(restored).item())
    return restored


def check_fits(saved: Mapping[str, PyTree], wanted: Mapping[str, PyTree], where: Path) -> None:
    """Raise UserError naming the first leaf whose shape or dtype differs, or that one side lacks."""

    def describe(leaf: PyTree) -> str:
        if leaf is None:
            return "absent"
        leaf = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        leaf = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"

    for name in [*wanted, *(name for name in saved if name not in wanted)]:
        expected, came = describe(wanted.get(name)), describe(saved.get(name))
        if expected != came:
            raise UserError(
                f"{where} does not fit this configuration: {name} is {came} in the checkpoint,"
                f" {expected} is expected; use the config.yaml that lies beside it"
            )


def handler() -> ocp.CompositeCheckpointHandler:
    """Make the Orbax handler of a checkpoint's trees."""
    trees: dict[str, PyTree] = {name: ocp.StandardCheckpointHandler() for name in ITEMS}
    return ocp.CompositeCheckpointHandler(**trees)


def write_trees(checkpointer: ocp.AsyncCheckpointer, path: str, trees: Mapping[str, PyTree]) -> None:
    """Copy this process's arrays of a checkpoint, and begin to write them."""
    args = {name: ocp.args.StandardSave(tree) for name, tree in trees.items() if tree}
    checkpointer.save(Path(path), args=ocp.args.Composite(**args))


def read_tree(path: str, item: str, template: PyTree) -> PyTree:
    """Read a tree of a checkpoint in shapes and places of `template`, the parts of it that this process holds."""
    with closing(ocp.Checkpointer(handler())) as reader:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(target(template))})
        return reader.restore(Path(path), args=args)[item]


def describe_tree(path: Path, item: str) -> PyTree:
    """Return shapes and dtypes of a tree of a checkpoint, without its arrays; {} where it holds none."""
    with closing(ocp.Checkpointer(handler())) as reader:
        metadata = (reader.metadata(path).item_metadata or {}).get(item)
    tree = getattr(metadata, "tree", metadata)
    return {} if tree is None else tree
