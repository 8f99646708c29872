"""Phi-3, Phi-3.5 and Phi-4-mini: Llama's layers with fused projections (Abdin et al. 2024, arXiv:2404.14219).

Adapters go on ``qkv_proj`` and ``gate_up_proj`` as they are, one pair of factors for what is fused.
"""

import math

from grpo_jax.models import hf_config
from grpo_jax.models.architectures import llama
from grpo_jax.models.architectures.architecture import FUSED, ROWS
from grpo_jax.models.architectures.llama import DecoderConfig, read_shared, same_window
from grpo_jax.models.rope import RopeConfig

MODEL_TYPE = "phi3"
_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "max_position_embeddings": 4096}
_NEUTRAL = dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias", "resid_pdrop", "embd_pdrop"), (0,))
_FACTORS = hf_config.list_of(hf_config.POSITIVE, "a list of numbers > 0")
_EXTRA_KINDS = {"partial_rotary_factor": hf_config.POSITIVE}
_ROPE_KINDS = {
    **dict.fromkeys(("short_factor", "long_factor"), _FACTORS),
    **dict.fromkeys(("rope_theta", "factor", "attention_factor", "partial_rotary_factor"), hf_config.POSITIVE),
    **dict.fromkeys(("rope_type", "type"), hf_config.NAME),
}
_LONG = ("longrope", "su", "yarn")  # transformers takes the latter two, of older folders, for the first


def read_config(config: hf_config.Fields) -> DecoderConfig:
    """Read a ``config.json`` of a Phi-3; ValueErrors name the field."""
    fields = {**_DEFAULTS, **hf_config.not_null(config)}
    shared = read_shared(fields, MODEL_TYPE, extra_kinds=_EXTRA_KINDS, honoured=("partial_rotary_factor",))
    hf_config.refuse_changed(fields, _NEUTRAL, MODEL_TYPE)
    return DecoderConfig(
        **shared,
        rope=_rope(fields, shared["head_dim"]),
        windows=same_window(fields, fields.get("sliding_window")),
        fused=True,
    )


def _rope(fields: hf_config.Fields, head_dim: int) -> RopeConfig:
    """Rotation of a share of each head, with LongRoPE's table for short texts where the folder has one."""
    scaling = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    hf_config.check_kinds(scaling, _ROPE_KINDS, "rope_parameters.")
    share = float(scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0)
    turned = int(head_dim * share)
    even = share <= 1 and turned >= 2 and turned % 2 == 0
    hf_config.expect(even, "partial_rotary_factor", f"an even part of {head_dim} dimensions", share)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    hf_config.expect(kind in ("default", *_LONG), "rope_type", f"longrope for model_type {MODEL_TYPE!r}", kind)
    theta = float(scaling.get("rope_theta") or fields.get("rope_theta") or 1e4)
    if kind == "default":
        return RopeConfig(theta=theta, share=share)
    short = scaling.get("short_factor")
    fits = short is not None and len(short) == turned // 2
    hf_config.expect(fits, "rope_parameters.short_factor", f"{turned // 2} numbers", short)
    original = fields["original_max_position_embeddings"]
    hf_config.expect(original >= 2, "original_max_position_embeddings", "at least 2 with longrope", original)
    factor = scaling.get("factor") or fields["max_position_embeddings"] / original
    temperature = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        theta=theta,
        scaling="longrope",
        original_length=original,
        short_factors=tuple(map(float, short)),
        attention_factor=float(scaling.get("attention_factor") or temperature),
        share=share,
    )


def _longest(config: DecoderConfig) -> int | None:
    """Length of short texts, beyond which LongRoPE turns by another table from the first token on.

    A completion would change its prompt's keys as it grows past that length, so it may not.
    """
    return config.rope.original_length or None


ARCHITECTURE = llama.ARCHITECTURE._replace(
    model_types=(MODEL_TYPE,),
    read=read_config,
    projections={"qkv_proj": FUSED, "o_proj": ROWS, "gate_up_proj": FUSED, "down_proj": ROWS},
    naming=llama.NAMING._replace(
        modules=llama.NAMING.modules | {"qkv_proj": "self_attn.qkv_proj", "gate_up_proj": "mlp.gate_up_proj"}
    ),
    longest=_longest,
)
