"""Rotary position embeddings (RoPE): read from a ``config.json``, with the frequency scalings in use."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from pydantic.dataclasses import dataclass

from grpo_jax.config.fields import Count
from grpo_jax.models import hf_config
from grpo_jax.models.hf_config import STRICT, NotNegative, Positive

Rotation = tuple[jax.Array, jax.Array]  # cosine and sine of angles
SCALINGS = ("default", "linear", "llama3", "yarn")  # allowed in a folder


@dataclass(frozen=True, config=STRICT)
class RopeConfig:
    """Rotary embedding of one model."""

    theta: Positive = 10_000.0  # base of the wavelengths
    scaling: str = "default"  # one of `SCALINGS`; or `longrope`, or `none` without rotation
    factor: Positive = 1.0  # factor of the context length (all scalings but `default`)
    original_length: Count = 0  # context length before stretching (`llama3`, `yarn`, `longrope`)
    low_freq_factor: Positive = 1.0  # llama3: wavelengths above original_length / low_freq_factor are fully stretched
    high_freq_factor: Positive = 4.0  # llama3: wavelengths below original_length / high_freq_factor stay unchanged
    beta_fast: Positive = 32.0  # yarn: dimensions with more rotations than this within original_length stay unchanged
    beta_slow: Positive = 1.0  # yarn: dimensions with fewer rotations than this are fully stretched
    # longrope: each pair's wavelength factor up to original_length tokens; longer sequences are not supported
    short_factors: tuple[Positive, ...] = ()
    attention_factor: NotNegative = 1.0  # multiplies sine and cosine (yarn's temperature)
    share: Positive = 1.0  # share of each head's dimensions that rotate, the first ones (partial_rotary_factor)
    sections: tuple[Count, ...] = ()  # numbers of frequencies for time, row and column, if positions have these axes
    interleaved: bool = False  # whether the three axes alternate among the frequencies (Qwen3-VL)


UNTURNED = RopeConfig(scaling="none")
"""Rotation of a layer without positions among others with them (NoPE, Kazemnejad et al. 2023, arXiv:2305.19466)."""


def frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the angle per position of each rotated pair of dimensions, float32 [head_dim · share / 2].

    ``linear`` divides by the factor (position interpolation, Chen et al. 2023, arXiv:2306.15595). ``yarn`` divides only
    slow dimensions (Peng et al. 2023, arXiv:2309.00071); ``llama3`` is Llama 3.1's variant (arXiv:2407.21783).
    ``longrope`` divides by searched factors (Ding et al. 2024, arXiv:2402.13753).
    """
    head_dim = int(head_dim * rope.share)
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.scaling == "default":
        return plain
    if rope.scaling == "none":
        return np.zeros_like(plain)
    if rope.scaling == "longrope":
        return (plain / np.asarray(rope.short_factors, np.float32)).astype(np.float32)
    if rope.scaling == "linear":
        return plain / np.float32(rope.factor)
    if rope.scaling == "llama3":
        turns = rope.original_length * plain / (2 * math.pi)
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * plain / rope.factor + smooth * plain).astype(np.float32)
    return _yarn(rope, plain, head_dim)


def _yarn(rope: RopeConfig, plain: np.ndarray, head_dim: int) -> np.ndarray:
    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp's slope finite
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    return (plain / rope.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def axes(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return each frequency's position axis (0 time, 1 row, 2 column), i32 [head_dim / 2]."""
    if not rope.interleaved:
        return np.repeat(np.arange(3, dtype=np.int32), rope.sections)
    interleaved = np.zeros(head_dim // 2, np.int32)
    for axis in (1, 2):
        interleaved[axis : 3 * rope.sections[axis] : 3] = axis
    return interleaved


def rotation(rope: RopeConfig, head_dim: int, positions: jax.Array, *, pictures: bool = False) -> Rotation:
    """Return cosine and sine, f32 [..., head_dim / 2], of integer positions [...], or [..., 3] (time, row, column)."""
    positions = jnp.take(positions, axes(rope, head_dim), axis=-1) if pictures else positions[..., None]
    table = frequencies(rope, head_dim)
    table = table.reshape((1,) * (positions.ndim - 1) + table.shape)
    angles = positions.astype(jnp.float32) * table
    if rope.scaling == "longrope":  # beyond its end the result is NaN, never another model's rotation
        angles = jnp.where(positions < rope.original_length, angles, jnp.nan)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + n) of the last axis [..., E] by angles [..., n]; the rest after 2 n is unchanged."""
    turning = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :turning].astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    turned = jnp.concatenate(turned, axis=-1).astype(x.dtype)
    return turned if turning == x.shape[-1] else jnp.concatenate([turned, x[..., turning:]], axis=-1)


_ROPE_NEUTRAL = {"partial_rotary_factor": (1,), "truncate": (True,), "mscale": (), "mscale_all_dim": ()}
_NEEDED = {
    "llama3": ("low_freq_factor", "high_freq_factor", "max_position_embeddings"),
    "yarn": ("max_position_embeddings",),
}
"""Fields without which a scaling means nothing; the original length stands for the last."""


def read_rope(fields: hf_config.ConfigJson, *, theta: float = 10_000.0, plain: tuple[str, ...] = ()) -> RopeConfig:
    """Read rope_parameters (transformers 5), or rope_theta with rope_scaling (before), of a ``config.json``.

    `theta` is transformers' default if missing; `plain` are further rope types without scaling.
    """
    scaling = hf_config.not_null(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    nested = sorted(key for key, value in scaling.items() if isinstance(value, Mapping))
    hf_config.expect(not nested, "rope_parameters", "one table for all layers", nested)
    hf_config.refuse_changed(scaling, _ROPE_NEUTRAL, "rope_parameters")
    theta = scaling.get("rope_theta") or fields.get("rope_theta") or theta
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "default" if kind in plain else kind
    hf_config.expect(kind in SCALINGS, "rope_type", f"one of {', '.join(SCALINGS)}", kind)
    if kind == "default":
        return RopeConfig(theta=float(theta))
    own = "original_max_position_embeddings"
    original = fields.get(own) or scaling.get(own) or fields.get("max_position_embeddings", 0)
    factor = scaling.get("factor")
    if factor is None and kind == "yarn" and original:
        factor = (fields.get("max_position_embeddings") or original) / original
    given = {**scaling, "factor": factor, "max_position_embeddings": original or None}
    missing = [name for name in ("factor", *_NEEDED.get(kind, ())) if given.get(name) is None]
    hf_config.expect(not missing, "rope_parameters", f"{', '.join(missing)} with rope_type {kind!r}", scaling)
    hf_config.expect(kind != "yarn" or float(theta) > 1, "rope_theta", "a number above 1 with rope_type 'yarn'", theta)
    names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    rope = RopeConfig(
        theta=float(theta),
        scaling=kind,
        factor=float(factor),
        original_length=int(original) if kind in ("llama3", "yarn") else 0,
        **{name: float(scaling[name]) for name in names if scaling.get(name)},
    )
    low, high = rope.low_freq_factor, rope.high_freq_factor
    rises = kind != "llama3" or low < high
    hf_config.expect(rises, "rope_parameters.low_freq_factor", f"a number below high_freq_factor={high}", low)
    temperature = scaling.get("attention_factor", 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0)
    return dataclasses.replace(rope, attention_factor=float(temperature)) if kind == "yarn" else rope
