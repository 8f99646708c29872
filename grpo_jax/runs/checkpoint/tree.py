"""Pytrees as a checkpoint stores them: nested dictionaries of arrays, whatever types the tree had."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import UserError

EVALUATED = "variables"  # the part of a state that evaluation needs; stored apart so that it is read alone
ITEMS = (EVALUATED, "training")


def items(state):
    """The state as Orbax items: the variables, and all other parts as one."""
    if not isinstance(state, Mapping) or EVALUATED not in state:
        raise TypeError(f"state: expected a mapping with the part {EVALUATED!r}, got {type(state).__name__}")
    training = {name: part for name, part in state.items() if name != EVALUATED}
    return {EVALUATED: {EVALUATED: state[EVALUATED]}, "training": training}


def leaves(tree) -> dict[str, Any]:
    """`{"optimizer.0.mu.kernel": leaf}` in the tree's own order."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    if len(named) != len(flat):
        raise ValueError("state: two leaves have the same path; keys of one dictionary must differ as text")
    return named


def _nested(leaves: dict[str, Any]) -> dict:
    tree: dict = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _is_key(leaf) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def storable(part) -> dict:
    """Nested dictionaries of arrays; what is not a `jax.Array` is copied, since it is written later."""

    def convert(name, leaf):
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


def target(part) -> dict:
    """What Orbax is asked for: the shapes, dtypes and places of a template."""

    def describe(leaf):
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            place = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        return np.asarray(leaf)

    return _nested({name: describe(leaf) for name, leaf in leaves(part).items()})


def as_template(leaf, found):
    """A restored array in the form its template has: key, Python number, uncommitted array."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(found, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        # an array that was free to follow others to their devices stays free
        return found if getattr(leaf, "committed", True) else jnp.asarray(np.asarray(found))
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(np.asarray(found).item())
    return found


def check_fits(saved: dict, wanted: dict, where: Path) -> None:
    """Raises UserError naming the first leaf whose shape or dtype differs, or that one side lacks."""

    def describe(leaf):
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


def plain(value):
    """`json.dumps(default=plain)`: arrays become numbers and lists, paths become text."""
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return np.asarray(value).tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"meta: {type(value).__name__} cannot be written as JSON")
