"""Frozen weights in 8 or 4 bits, through qwix: the kernels of the layers, with a scale for each group of weights.

A weight is stored as round(w / s) with s the group's largest magnitude over the largest integer; products are computed
from s · round(w / s) in the computation's dtype (weight-only quantisation, as in QLoRA, Dettmers et al. 2023,
arXiv:2305.14314, with evenly spaced integers).
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.errors import extras_named

KINDS = ("int8", "int4")
TILE = 64  # inputs that share a scale in 4 bits; in 8 bits a whole column does


def quantise(params: Mapping[str, Any], kind: str, device: jax.Device | None = None) -> dict[str, Any]:
    """The parameters with the kernels of the layers in few bits; embeddings, norms and biases as they are.

    Kernels reach the device one stack at a time, so the whole model is never there in full.

    Args:
        params: a decoder's, on the host or on a device; kernels [layers, in, out] or [layers, experts, in, out].
        kind: ``int8``, a scale for each output; or ``int4``, a scale for each output and ``TILE`` inputs (where that
            does not divide their number, for each output).
        device: where the result goes; None for the first.

    Returns:
        The same tree; the kernels are ``qwix.QArray``, which the decoder reads like arrays (``as_array``).

    Raises:
        ValueError: kind is another one.
        UserError: qwix is not installed.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    with extras_named():
        import qwix

    @jax.jit
    def store(kernel: jax.Array) -> qwix.QArray:
        inputs = kernel.ndim - 2
        tiles = {inputs: TILE} if kind == "int4" and kernel.shape[inputs] % TILE == 0 else None
        others = tuple(axis for axis in range(kernel.ndim) if axis != inputs)
        return qwix.quantize(kernel.astype(jnp.float32), kind, channelwise_axes=others, tiled_axes=tiles)

    def put(leaf: Any) -> jax.Array:
        return jnp.array(jax.device_put(leaf, device), copy=True)  # JAX may alias host memory

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        return store(jax.device_put(leaf, device)) if path[-1].key == "kernel" else put(leaf)

    return jax.tree_util.tree_map_with_path(place, params)


def count_weights(params: Mapping[str, Any]) -> int:
    """How many weights there are, however they are stored; scales are none."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: hasattr(leaf, "qvalue"))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def as_array(kernel: Any, dtype: Any) -> jax.Array:
    """A kernel as an array of this dtype, however it is stored."""
    if hasattr(kernel, "qvalue"):
        import qwix

        kernel = qwix.dequantize(kernel)
    return kernel.astype(dtype)
