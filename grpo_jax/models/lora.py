"""LoRA adapters, and weight-only quantisation of the frozen base to 8 or 4 bits.

Adapters are a separate collection. `layers.Projection` adds them to its product; without the collection, as in
`training.state.reference_variables`, the model is exactly the base.

qwix stores a quantised weight as round(w / s), with s the largest magnitude of its group divided by the largest
integer. Products use s · round(w / s) in the compute dtype, as in QLoRA (Dettmers et al. 2023, arXiv:2305.14314) but
with evenly spaced integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from pydantic.dataclasses import dataclass

from grpo_jax.config.sections import PolicySection
from grpo_jax.errors import extras_named
from grpo_jax.models.hf_config import STRICT, Positive, Width, expect
from grpo_jax.models.variables import VISUAL, PyTree, Variables, copied, is_quantised

if TYPE_CHECKING:
    from qwix import QArray

TILE = 64  # inputs that share a scale in 4 bits; in 8 bits a whole column shares one


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Adapters x A B · alpha / rank beside chosen projections (Hu et al. 2021, arXiv:2106.09685)."""

    rank: Width
    alpha: Positive
    targets: tuple[str, ...]  # target projections of the architecture (``Architecture.projections``)
    vision: tuple[str, ...] = ()  # target projections of the vision tower (``TowerArchitecture.projections``)

    @property
    def scale(self) -> float:
        """Return the product's factor alpha / rank."""
        return self.alpha / self.rank


def needs_tower(section: PolicySection, lora: LoraConfig | None) -> bool:
    """Return whether the vision tower is trained, whatever the prompts."""
    return section.vision == "train" or (lora is not None and bool(lora.vision))


def check_targets(lora: LoraConfig, projections: Iterable[str], model_type: str) -> None:
    """Raise ValueError for targets that are not projections of the architecture."""
    unknown = [name for name in lora.targets if name not in projections]
    expect(not unknown, "targets", f"some of {tuple(projections)} for model_type {model_type!r}", unknown)


def init_adapters(
    params: Variables, key: jax.Array, lora: LoraConfig, visual: Variables | None = None
) -> dict[str, PyTree]:
    """Initialise float32 adapters for a decoder's parameters (or shapes): A uniform, B zero, so nothing changes yet.

    Each target gets ``a`` [layers, in, rank] and ``b`` [layers, rank, out]; the vision tower's are in ``visual``.
    """
    adapters = {"layers": _fresh(params["layers"], key, lora.targets, lora.rank)}
    if lora.vision and visual is not None:
        adapters[VISUAL] = {"layers": _fresh(visual["layers"], jax.random.fold_in(key, 1), lora.vision, lora.rank)}
    return adapters


def _fresh(layers: Variables, key: jax.Array, targets: tuple[str, ...], rank: int) -> dict[str, PyTree]:
    adapters = {}
    for name, subkey in zip(targets, jax.random.split(key, len(targets)), strict=True):
        count, width_in, width_out = layers[name]["kernel"].shape
        bound = width_in**-0.5
        adapters[name] = {
            "a": jax.random.uniform(subkey, (count, width_in, rank), jnp.float32, -bound, bound),
            "b": jnp.zeros((count, rank, width_out), jnp.float32),
        }
    return adapters


class ListedLayers(NamedTuple):
    """A virtual stack of weights: some columns of each layer's own array."""

    layers: tuple[jax.Array | QArray, ...]
    columns: slice

    def at(self, index: tuple[int, ...]) -> PyTree:
        """Return the weights of a layer."""
        return jax.tree.map(lambda leaf: entry(leaf, index[1:])[..., self.columns], self.layers[index[0]])


class MergedKernel(NamedTuple):
    """A stack of kernels with its adapter merged layer by layer: the whole is never in memory."""

    kernel: jax.Array | QArray | ListedLayers  # [layers, in, out]
    adapter: Mapping[str, jax.Array] | None  # `a` [layers, in, rank] and `b` [layers, rank, out]; None for none
    scale: float  # of their product

    def at(self, index: tuple[int, ...]) -> jax.Array:
        """Return the kernel of a layer, float32."""
        kernel = as_array(entry(self.kernel, index), jnp.float32)
        if self.adapter is None:
            return kernel
        adapter = entry(self.adapter, index)
        return kernel + jnp.einsum("...ir,...ro->...io", adapter["a"], adapter["b"], precision="highest") * self.scale


def entry(stack: PyTree, index: tuple[int, ...]) -> PyTree:
    """Return stack[index] of each array, by one program for every index; or `at(index)` of a virtual stack."""
    if isinstance(stack, ListedLayers | MergedKernel):
        return stack.at(index)
    return _entry(stack, index) if index else stack


@jax.jit
def _entry(stack: PyTree, index: tuple[ArrayLike, ...]) -> PyTree:
    axes = len(index)

    def part(leaf: jax.Array) -> jax.Array:
        starts, sizes = (*index, *(0,) * (leaf.ndim - axes)), (*(1,) * axes, *leaf.shape[axes:])
        return jax.lax.dynamic_slice(leaf, starts, sizes).reshape(leaf.shape[axes:])

    return jax.tree.map(part, stack)


def merge(variables: Variables, lora: LoraConfig | None) -> dict[str, PyTree]:
    """Merge adapters into kernels lazily, as `MergedKernel`s; returns the parameters.

    They include ``visual`` if the tower is trained or has adapters, and so differs from its folder's.
    """
    params = dict(variables["params"])
    if "lora" not in variables:
        return params

    def with_adapters(tree: Variables, adapters: Variables) -> dict[str, PyTree]:
        layers = {
            name: {**layer, "kernel": MergedKernel(layer["kernel"], adapters["layers"].get(name), lora.scale)}
            if "kernel" in layer
            else layer
            for name, layer in tree["layers"].items()
        }
        return {**tree, "layers": layers}

    adapters = variables["lora"]
    if VISUAL in adapters:
        params[VISUAL] = with_adapters(variables[VISUAL], adapters[VISUAL])
    return with_adapters(params, adapters)


def quantise(params: Variables, kind: str, device: jax.Device | None = None) -> dict[str, PyTree]:
    """Quantise kernels [layers, in, out]; embeddings, norms and biases stay unchanged.

    Kernels reach the device (None: the first) one stack at a time, so it never holds the whole model unquantised. They
    become ``qwix.QArray``, which the decoder reads like arrays (``as_array``). ``int8`` has one scale per output.
    ``int4`` has one per output and ``TILE`` inputs, or one per output if ``TILE`` does not divide the inputs.
    """
    with extras_named():
        import qwix

    @jax.jit
    def store(kernel: jax.Array) -> qwix.QArray:
        inputs = kernel.ndim - 2
        tiles = {inputs: TILE} if kind == "int4" and kernel.shape[inputs] % TILE == 0 else None
        others = tuple(axis for axis in range(kernel.ndim) if axis != inputs)
        return qwix.quantize(kernel.astype(jnp.float32), kind, channelwise_axes=others, tiled_axes=tiles)

    def place(path: jax.tree_util.KeyPath, leaf: jax.Array) -> PyTree:
        return store(jax.device_put(leaf, device)) if path[-1].key == "kernel" else copied(leaf, device)

    return jax.tree_util.tree_map_with_path(place, params)


def count_weights(params: PyTree) -> int:
    """Count the weights, quantised or not, without scales."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params, is_leaf=is_quantised))


def as_array(kernel: jax.Array | QArray, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return a kernel, quantised or not, as an array of this dtype."""
    if is_quantised(kernel):
        import qwix

        kernel = qwix.dequantize(kernel)
    return kernel.astype(dtype)
