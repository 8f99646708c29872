"""The rotary embedding in a ``config.json``: every field honoured, or refused by name."""

import math
from collections.abc import Mapping
from typing import Any

from grpo_jax.errors import shown
from grpo_jax.models.families import fields as kinds
from grpo_jax.models.rope import SCALINGS, RopeConfig

_ROPE_KINDS = {
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), kinds.POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"), kinds.NOT_NEGATIVE),
    "original_max_position_embeddings": kinds.POSITIONS,
    "rope_type": kinds.NAME,
    "mrope_section": kinds.WIDTHS,
    "type": kinds.NAME,
    "truncate": kinds.FLAG,
}


def read_rope(fields: Mapping[str, Any], *, theta: float = 10_000.0, plain: tuple[str, ...] = ()) -> RopeConfig:
    """From rope_parameters (transformers 5), or rope_theta with rope_scaling (before).

    Args:
        fields: the contents of a ``config.json``.
        theta: what transformers takes where a folder does not say.
        plain: further rope types that scale nothing.

    Raises:
        ValueError: naming the field that is missing or not supported, with its value.
    """
    scaling = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    kinds.check_kinds(scaling, _ROPE_KINDS, "rope_parameters.")
    nested = sorted(key for key, value in scaling.items() if isinstance(value, Mapping))
    if nested:
        raise ValueError(f"rope_parameters per layer type ({', '.join(nested)}) are not supported")
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"partial_rotary_factor={scaling['partial_rotary_factor']} is not supported")
    theta = scaling.get("rope_theta") or fields.get("rope_theta") or theta
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "default" if kind in plain else kind
    if kind not in SCALINGS:
        raise ValueError(f"rope type {shown(kind)} is not supported; supported: {', '.join(SCALINGS)}")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    original = (
        fields.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or fields.get("max_position_embeddings", 0)
    )
    factor = scaling.get("factor")
    if factor is None and kind == "yarn" and original:
        factor = (fields.get("max_position_embeddings") or original) / original
    needed = {"llama3": ("low_freq_factor", "high_freq_factor")}.get(kind, ())
    missing = [name for name in needed if scaling.get(name) is None] + (["factor"] if factor is None else [])
    if missing:
        raise ValueError(f"rope type {kind!r} needs {', '.join(missing)}")
    if kind in ("llama3", "yarn") and not original:
        raise ValueError(f"rope type {kind!r} needs original_max_position_embeddings or max_position_embeddings")
    low, high = float(scaling.get("low_freq_factor") or 1.0), float(scaling.get("high_freq_factor") or 4.0)
    if kind == "llama3" and low >= high:
        raise ValueError(f"rope_parameters.low_freq_factor must be below high_freq_factor, got {low} and {high}")
    if kind == "yarn" and float(theta) <= 1:
        raise ValueError(f"rope_theta must be above 1 with rope type 'yarn', got {theta}")
    return RopeConfig(
        theta=float(theta),
        scaling=kind,
        factor=float(factor),
        original_length=int(original) if kind in ("llama3", "yarn") else 0,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(scaling, float(factor)) if kind == "yarn" else 1.0,
    )


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN's attention temperature, 0.1 ln(factor) + 1 unless the folder says otherwise."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)
