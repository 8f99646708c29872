"""The collections of a policy's variables: parameters, a tower's, a value head's; their types, and how layers lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from grpo_jax.config.sections import PolicySection
from grpo_jax.models.attention import platform_of

if TYPE_CHECKING:
    from grpo_jax.models.lora import LoraConfig

PyTree = Any  # of arrays
Variables = Mapping[str, PyTree]
"""The collections of a policy: "params", and where there are any "lora", "visual" and "value"."""

VISUAL = "visual"
"""Key of a tower's weights: a collection while frozen, a part of "params" where trained; and a part of "lora"."""

_NUMBERS = "numbers"
"""Collection of the layers' numbers, which `numbered` adds for `unstack`."""

VALUE = "value"
"""Collection of a value head; the policy's own functions do not know it."""


def weight_dtype(section: PolicySection) -> str:
    """The type of the weights: trained ones are float32."""
    return section.frozen_dtype if section.lora.used else "float32"


def tower_dtype(section: PolicySection) -> str:
    """The type of the vision tower's weights, which may be frozen where the rest is trained."""
    return "float32" if section.vision == "train" else section.frozen_dtype


def precision_of(compute_dtype: str, precision: str | None) -> str | None:
    """The configured precision of products of matrices, or the one that the activations' type needs.

    That is ``highest`` for float32, whose products GPUs (TF32) and TPUs (bfloat16) round otherwise; None, JAX's own,
    for other types.
    """
    return "highest" if precision is None and compute_dtype == "float32" else precision


def needs_tower(section: PolicySection, lora: LoraConfig | None) -> bool:
    """Whether the vision tower takes part in training, whatever the prompts are."""
    return section.vision == "train" or (lora is not None and bool(lora.vision))


def keeps_layers_apart(section: PolicySection, platform: str | None = None) -> bool:
    """Whether each layer of a frozen policy has arrays of its own, with projections joined, in place of stacks.

    On a CUDA device decoding then reads the only copy of the weights, and an update copies none out of a stack. Of a
    stack one layer's program serves all and is compiled in less time: trained weights, which decoding casts in any
    case, are stacked, and so is what lies over a mesh or on a TPU, whose compiler takes many times as long.
    """
    as_computed = section.quantised != "none" or section.frozen_dtype == section.compute_dtype
    on_cuda = (platform or platform_of(jax.devices()[0])) == "cuda" and section.mesh.size == 1
    return section.lora.used and as_computed and on_cuda


def init_value_head(width: int) -> dict[str, jax.Array]:
    """A head of zeros, {"kernel": f32 [D], "bias": f32 []}: every value starts at 0 and the policy is untouched."""
    return {"kernel": jnp.zeros((width,), jnp.float32), "bias": jnp.zeros((), jnp.float32)}


def token_values(head: dict[str, jax.Array], hidden: jax.Array) -> jax.Array:
    """Values hidden · kernel + bias, f32 [.., T], of the states [.., T, D] that predict each token.

    The value of a token's state is thus the one expected before the token is drawn.
    """
    return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), head["kernel"], precision="highest") + head["bias"]


def tower_params(variables: Variables) -> PyTree:
    """The tower's parameters, frozen or trained."""
    return variables[VISUAL] if VISUAL in variables else variables["params"][VISUAL]


def with_tower(variables: Variables, visual: PyTree, *, trained: bool) -> dict[str, PyTree]:
    """Put a tower's parameters where they belong: beside ``params`` while frozen, else among them."""
    if trained:
        return {**variables, "params": {**variables["params"], VISUAL: visual}}
    return {**variables, VISUAL: visual}


def numbered(variables: Variables) -> Variables:
    """Add the numbers of stacked layers, as arguments of a program that takes these apart (`unstack`).

    One piece of code then takes out all layers of a shape; with numbers known when it is compiled, each layer's is
    another, and for 30 layers these are nearly half of what is compiled to sample.
    """
    count = _layer_count(variables.get("params", {}))
    return {**variables, _NUMBERS: {"layers": tuple(np.arange(count, dtype=np.uint32))}}


def unstack(variables: Variables, dtype: jax.typing.DTypeLike | None = None) -> Variables:
    """Split stacked ``layers`` of every collection (`split_layers`); a tower stays as it is.

    With `dtype` their matrices are cast to it; quantised ones stay. Without, layers are taken by their numbers where
    the variables have these (`numbered`).
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
    """Split stacked ``layers`` into ``layers_0``, ``layers_1``, ...; what is not stacked stays as it is.

    `numbers` are those of the layers where they are known only as the program runs.
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
    """Copy arrays to a device (None: the first). JAX may alias host memory, and what is aliased cannot be donated."""
    # On a CPU `device_put` aliases it even with may_alias=False.
    return jax.tree.map(lambda leaf: jnp.array(jax.device_put(leaf, device), copy=True), tree)


class NarrowGradient(NamedTuple):
    """A trained kernel beside bfloat16 zeros of its shape, whose gradient is that of the kernel, rounded.

    JAX gives a gradient the type of what it belongs to: differentiated by zeros, no stack of float32 ones is made.
    """

    kernel: jax.Array
    zeros: jax.Array

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the kernel in this type."""
        return _cast(*self, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cast(kernel: jax.Array, zeros: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return kernel.astype(dtype)


_cast.defvjp(lambda *given: (_cast(*given), None), lambda dtype, _, gradient: (None, gradient.astype(jnp.bfloat16)))


def narrow_zeros(trained: Variables) -> Variables:
    """Return zeros in place of the kernels of layers, for `narrow_gradients`; the rest stays."""

    def zeros(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        return jnp.zeros(leaf.shape, jnp.bfloat16) if path[-1].key == "kernel" and leaf.ndim > 1 else leaf

    return jax.tree_util.tree_map_with_path(zeros, trained)


def narrow_gradients(trained: Variables, zeros: Variables) -> Variables:
    """Pair each kernel with its zeros."""
    return jax.tree.map(lambda x, by: by if by.dtype == x.dtype else NarrowGradient(x, by), trained, zeros)


def is_quantised(leaf: PyTree) -> bool:
    """Whether weights are qwix's, numbers with their scales."""
    return hasattr(leaf, "qvalue")
