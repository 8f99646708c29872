"""Low-rank adapters: a collection of their own, so that leaving it out is the base model exactly."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.quantised import as_array


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Adapters x A B · alpha / rank beside chosen projections (Hu et al. 2021, arXiv:2106.09685).

    Attributes:
        rank: inner size of the adapters.
        alpha: their strength before division by the rank.
        targets: projections that get one, of those that the model's family has (``Family.projections``).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self):
        """Refuse an empty choice."""
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank must be a positive integer, got {self.rank!r}")
        if not self.targets:
            raise ValueError("targets must be at least one projection, got none")
        object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def scale(self) -> float:
        """What the product of the two factors is multiplied by."""
        return self.alpha / self.rank


def check_targets(lora: LoraConfig, projections: Iterable[str], model_type: str) -> None:
    """Refuse targets that an architecture with these projections lacks.

    Raises:
        ValueError: naming them and the projections there are.
    """
    unknown = [name for name in lora.targets if name not in projections]
    if unknown:
        raise ValueError(f"targets must be some of {tuple(projections)} for model_type {model_type!r}, got {unknown}")


def init_adapters(params: Mapping[str, Any], key: jax.Array, lora: LoraConfig) -> dict[str, Any]:
    """Fresh adapters for a decoder's parameters, float32: A uniform, B zero, so nothing changes yet.

    Args:
        params: the decoder's parameters, or their shapes (``jax.eval_shape``).
        key: PRNG key.
        lora: which projections, which rank.

    Returns:
        The ``lora`` collection: per target ``a`` [layers, in, rank] and ``b`` [layers, rank, out].
    """
    adapters = {}
    for name, subkey in zip(lora.targets, jax.random.split(key, len(lora.targets)), strict=True):
        layers, width_in, width_out = params["layers"][name]["kernel"].shape
        bound = width_in**-0.5
        shape = (layers, width_in, lora.rank)
        adapters[name] = {
            "a": jax.random.uniform(subkey, shape, jnp.float32, -bound, bound),
            "b": jnp.zeros((layers, lora.rank, width_out), jnp.float32),
        }
    return {"layers": adapters}


class MergedKernel(NamedTuple):
    """A stack of kernels with its adapter folded in, made a layer at a time: the whole is never in memory.

    Attributes:
        kernel: [layers, in, out], an array or quantised.
        adapter: ``a`` [layers, in, rank] and ``b`` [layers, rank, out]; None where it has none.
        scale: of their product.
    """

    kernel: Any
    adapter: Mapping[str, jax.Array] | None
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stack."""
        return self.kernel.shape

    def layer(self, index: int) -> jax.Array:
        """One layer's kernel, float32 [in, out]."""
        stacks = (self.kernel, self.adapter)
        kernel, adapter = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacks)
        return as_array(kernel, jnp.float32) if adapter is None else _folded(kernel, adapter, self.scale)


def merging(variables: Mapping[str, Any], lora: LoraConfig | None) -> dict[str, Any]:
    """As `merge`, but in float32 and with kernels that wait as ``MergedKernel``: for ``hf.save_folder``.

    Raises:
        ValueError: as `merge`.
    """
    params, adapters = _parts(variables, lora)
    if not adapters:
        return params
    layers = {
        name: {**own, "kernel": MergedKernel(own["kernel"], adapters.get(name), lora.scale)} if "kernel" in own else own
        for name, own in params["layers"].items()
    }
    return {**params, "layers": layers}


def merge(variables: Mapping[str, Any], lora: LoraConfig | None) -> dict[str, Any]:
    """The parameters with the adapters folded in; each kernel keeps its dtype, quantised ones become float32.

    Args:
        variables: ``{"params": tree}``, with or without ``"lora"``.
        lora: the adapters' configuration; may be None when there are none.

    Raises:
        ValueError: if there are adapters but no configuration to scale them by.
    """
    params, adapters = _parts(variables, lora)
    if not adapters:
        return params
    layers = {
        name: {**own, "kernel": as_array(own["kernel"], own["kernel"].dtype)} if "kernel" in own else own
        for name, own in params["layers"].items()
    }
    for name, adapter in adapters.items():
        kernel = layers[name]["kernel"]
        layers[name] = {**layers[name], "kernel": _folded(kernel, adapter, lora.scale).astype(kernel.dtype)}
    return {**params, "layers": layers}


def _parts(variables: Mapping[str, Any], lora: LoraConfig | None) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Parameters, and the adapters by projection."""
    if "lora" not in variables:
        return dict(variables["params"]), {}
    if lora is None:
        raise ValueError("variables hold a 'lora' collection: merge needs its LoraConfig, got None")
    return dict(variables["params"]), variables["lora"]["layers"]


def _folded(kernel: Any, adapter: Mapping[str, jax.Array], scale: float) -> jax.Array:
    """kernel + a b · scale, float32 [.., in, out]."""
    update = jnp.einsum("...ir,...ro->...io", adapter["a"], adapter["b"], precision="highest") * scale
    return as_array(kernel, jnp.float32) + update
