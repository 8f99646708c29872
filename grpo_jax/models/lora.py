"""Low-rank adapters: a collection of their own, so that leaving it out is the base model exactly."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models.quantised import as_array

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GPT2_PROJECTIONS = ("c_attn", "attn_c_proj", "c_fc", "mlp_c_proj")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Adapters x A B · alpha / rank beside chosen projections (Hu et al. 2021, arXiv:2106.09685).

    Attributes:
        rank: inner size of the adapters.
        alpha: their strength before division by the rank.
        targets: projections that get one: of ``PROJECTIONS``, or of ``GPT2_PROJECTIONS`` for a GPT-2 (whose
            ``c_attn`` makes queries, keys and values in one product and has one adapter for all three).
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self):
        """Refuse an empty or unknown choice."""
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank must be a positive integer, got {self.rank!r}")
        unknown = [name for name in self.targets if name not in PROJECTIONS + GPT2_PROJECTIONS]
        if unknown or not self.targets:
            raise ValueError(
                f"targets must be some of {PROJECTIONS}, for GPT-2 of {GPT2_PROJECTIONS}, got {self.targets!r}"
            )
        object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def scale(self) -> float:
        """What the product of the two factors is multiplied by."""
        return self.alpha / self.rank


def check_targets(lora: LoraConfig, projections: tuple[str, ...], model_type: str) -> None:
    """Refuse targets that an architecture with these projections lacks.

    Raises:
        ValueError: naming them and the projections there are.
    """
    unknown = [name for name in lora.targets if name not in projections]
    if unknown:
        raise ValueError(f"targets must be some of {projections} for model_type {model_type!r}, got {unknown}")


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


def merge(variables: Mapping[str, Any], lora: LoraConfig | None) -> dict[str, Any]:
    """The parameters with the adapters folded in; each kernel keeps its dtype, quantised ones become float32.

    Args:
        variables: ``{"params": tree}``, with or without ``"lora"``.
        lora: the adapters' configuration; may be None when there are none.

    Raises:
        ValueError: if there are adapters but no configuration to scale them by.
    """
    params = dict(variables["params"])
    if "lora" not in variables:
        return params
    if lora is None:
        raise ValueError("variables hold a 'lora' collection: merge needs its LoraConfig, got None")
    layers = {
        name: {**own, "kernel": as_array(own["kernel"], own["kernel"].dtype)} if "kernel" in own else own
        for name, own in params["layers"].items()
    }
    for name, adapter in variables["lora"]["layers"].items():
        kernel = layers[name]["kernel"]
        update = jnp.einsum("nir,nro->nio", adapter["a"], adapter["b"], precision="highest") * lora.scale
        layers[name] = {**layers[name], "kernel": (kernel.astype(jnp.float32) + update).astype(kernel.dtype)}
    return {**params, "layers": layers}
