"""Collections of a policy's variables (parameters, vision tower, value head), their dtypes, and stacks of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from grpo_jax.config.sections import PolicySection
from grpo_jax.models.attention import platform_of

PyTree = Any  # of arrays
Variables = Mapping[str, PyTree]
"""The collections of a policy: "params", and where there are any "lora", "visual" and "value"."""

VISUAL = "visual"
"""Key of a tower's weights: a collection while frozen, a part of "params" where trained; and a part of "lora"."""
VALUE = "value"
"""Collection of a value head; the policy's own functions do not know it."""
_NUMBERS = "numbers"  # collection of the layers' numbers, which `numbered` adds for `unstack`


def weight_dtype(section: PolicySection) -> str:
    """Return the dtype of the weights; trained weights are float32."""
    return section.frozen_dtype if section.lora.used else "float32"


def tower_dtype(section: PolicySection) -> str:
    """Return the dtype of the vision tower's weights, which may be frozen while the rest is trained."""
    return "float32" if section.vision == "train" else section.frozen_dtype


def precision_of(compute_dtype: str, precision: str | None) -> str | None:
    """Return the configured precision of matrix products.

    The default is ``highest`` for float32, which GPUs and TPUs would otherwise round, and None, JAX's own, for others.
    """
    return "highest" if precision is None and compute_dtype == "float32" else precision


def keeps_layers_apart(section: PolicySection, platform: str | None = None) -> bool:
    """Return whether a frozen policy has unstacked layers with fused projections.

    On a CUDA device, decoding then reads the only copy of the weights, and an update copies none out of a stack. A
    stack compiles faster, since one program serves all layers. Trained weights are therefore stacked: decoding casts
    them anyway. So are weights on a mesh or a TPU, whose compiler would take many times as long.
    """
    as_computed = section.quantised != "none" or section.frozen_dtype == section.compute_dtype
    on_cuda = (platform or platform_of(jax.devices()[0])) == "cuda" and section.mesh.size == 1
    return section.lora.used and as_computed and on_cuda


def init_value_head(width: int) -> dict[str, jax.Array]:
    """Make a value head of zeros, {"kernel": f32 [D], "bias": f32 []}; every value starts at 0."""
    return {"kernel": jnp.zeros((width,), jnp.float32), "bias": jnp.zeros((), jnp.float32)}


def token_values(head: dict[str, jax.Array], hidden: jax.Array) -> jax.Array:
    """Return values hidden · kernel + bias, f32 [.., T], of the states [.., T, D] that predict each token.

    A token's value is thus the expected return before the token is sampled.
    """
    return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), head["kernel"], precision="highest") + head["bias"]


def tower_params(variables: Variables) -> PyTree:
    """Return the tower's parameters, frozen or trained."""
    return variables[VISUAL] if VISUAL in variables else variables["params"][VISUAL]


def with_tower(variables: Variables, visual: PyTree, *, trained: bool) -> dict[str, PyTree]:
    """Add a tower's parameters: beside ``params`` if frozen, else inside."""
    if trained:
        return {**variables, "params": {**variables["params"], VISUAL: visual}}
    return {**variables, VISUAL: visual}


def numbered(variables: Variables) -> Variables:
    """Add the layers' indices as arguments of the program that unstacks them (`unstack`).

    One slice then serves all layers of a shape. Constant indices would give each layer its own code: for 30 layers,
    nearly half of all code that is compiled for sampling.
    """
    count = _layer_count(variables.get("params", {}))
    return {**variables, _NUMBERS: {"layers": tuple(np.arange(count, dtype=np.uint32))}}


def unstack(variables: Variables, dtype: jax.typing.DTypeLike | None = None) -> Variables:
    """Split stacked ``layers`` of every collection (`split_layers`); a tower stays unchanged.

    With `dtype`, matrices are cast to it, except quantised ones. Without, layers are taken by the indices of
    `numbered`, if the variables have them.
    """
    numbers = variables.get(_NUMBERS, {}).get("layers", ()) if dtype is None else ()

    def cast(leaf: PyTree) -> PyTree:
        narrows = dtype is not None and not is_quantised(leaf) and leaf.ndim > 2
        return leaf.astype(dtype) if narrows else leaf

    def split(tree: Variables) -> dict[str, PyTree]:
        if "layers" in tree:
            tree = {**tree, "layers": jax.tree.map(cast, tree["layers"], is_leaf=is_quantised)}
        return split_layers(tree, numbers)

    parts = {name: tree for name, tree in variables.items() if name != _NUMBERS}
    return {name: tree if name == VISUAL else split(tree) for name, tree in parts.items()}


def split_layers(tree: Variables, numbers: Sequence[ArrayLike] = ()) -> dict[str, PyTree]:
    """Split stacked ``layers`` into ``layers_0``, ``layers_1``, ...; other leaves stay unchanged.

    `numbers` are the layers' indices, if traced.
    """

    def layer(i: int) -> PyTree:
        if not numbers:
            return jax.tree.map(lambda x: x[i], stacked)
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, numbers[i], keepdims=False), stacked)

    stacked = tree.get("layers", {})
    apart = {f"layers_{i}": layer(i) for i in range(_layer_count(tree))}
    return {name: part for name, part in tree.items() if name != "layers"} | apart


def _layer_count(tree: Variables) -> int:
    return len(next(iter(jax.tree.leaves(tree.get("layers", {}))), ()))


def copied(tree: PyTree, device: jax.Device | None = None) -> PyTree:
    """Copy arrays to a device (None: the first). JAX may alias host memory, and aliased memory cannot be donated."""
    # On CPU, `device_put` aliases it even with may_alias=False.
    return jax.tree.map(lambda leaf: jnp.array(jax.device_put(leaf, device), copy=True), tree)


class NarrowGradient(NamedTuple):
    """A trained kernel with bfloat16 zeros of its shape, whose gradient is the kernel's, rounded.

    JAX gives a gradient the dtype of its variable: gradients for the zeros avoid a stack of float32 gradients.
    """

    kernel: jax.Array
    zeros: jax.Array

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the kernel in this dtype."""
        return _cast(*self, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cast(kernel: jax.Array, zeros: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return kernel.astype(dtype)


_cast.defvjp(lambda *given: (_cast(*given), None), lambda dtype, _, gradient: (None, gradient.astype(jnp.bfloat16)))


def narrow_zeros(trained: Variables) -> Variables:
    """Replace the layers' kernels by zeros, for `narrow_gradients`; other leaves stay."""

    def zeros(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        return jnp.zeros(leaf.shape, jnp.bfloat16) if path[-1].key == "kernel" and leaf.ndim > 1 else leaf

    return jax.tree_util.tree_map_with_path(zeros, trained)


def narrow_gradients(trained: Variables, zeros: Variables) -> Variables:
    """Pair each kernel with its zeros."""
    return jax.tree.map(lambda x, by: by if by.dtype == x.dtype else NarrowGradient(x, by), trained, zeros)


def is_quantised(leaf: PyTree) -> bool:
    """Return whether weights are quantised by qwix."""
    return hasattr(leaf, "qvalue")
