"""Variants of Llama's layers: SmolLM3, Phi-3, Gemma 2 and 3. Each reads its ``config.json``."""

import dataclasses
import math
from typing import Any

from grpo_jax.models import hf_config
from grpo_jax.models.architectures import llama
from grpo_jax.models.architectures.llama import DecoderConfig, read_shared, same_window, typed_windows
from grpo_jax.models.layers import FUSED, ROWS
from grpo_jax.models.rope import RopeConfig, read_rope

# SmolLM3: Llama's layers, some of them without RoPE (NoPE; Bakouch et al. 2025, https://hf.co/blog/smollm3).

SMOLLM3 = "smollm3"
_SMOLLM3_DEFAULTS = {"tie_word_embeddings": True, "num_key_value_heads": 4}


def read_smollm3(config: hf_config.ConfigJson) -> DecoderConfig:
    """Read a SmolLM3's ``config.json``; ValueErrors name the field."""
    fields = {**_SMOLLM3_DEFAULTS, **config}
    shared = read_shared(fields, SMOLLM3, honoured=("no_rope_layers",))
    turns, rope = _smollm_turns(fields), read_rope(fields, theta=2e6)
    window = fields.get("sliding_window") if fields.get("use_sliding_window", False) else None
    windows = tuple(None if turned else window for turned in turns)  # only layers without RoPE have a window
    if fields.get("layer_types") is not None:
        windows = typed_windows(fields, fields["layer_types"], window)
    return DecoderConfig(
        **shared,
        rope=rope,
        layer_ropes=() if all(turns) else tuple(rope if turned else None for turned in turns),
        windows=windows,
        mlp_bias=fields.get("mlp_bias", False),
    )


def _smollm_turns(fields: hf_config.ConfigJson) -> tuple[bool, ...]:
    """Return whether each layer has RoPE; ``no_rope_layers`` is 1 for those that do."""
    layers, turns = fields["num_hidden_layers"], fields.get("no_rope_layers")
    if turns is None:
        interval = fields.get("no_rope_layer_interval") or 4
        return tuple((index + 1) % interval != 0 for index in range(layers))
    hf_config.expect(len(turns) >= layers, "no_rope_layers", f"{layers} entries, one per layer", list(turns))
    return tuple(map(bool, turns[:layers]))


SMOLLM3_ARCHITECTURE = llama.LLAMA_ARCHITECTURE._replace(model_types=(SMOLLM3,), read=read_smollm3)


# Phi-3, Phi-3.5 and Phi-4-mini: Llama's layers with fused projections (Abdin et al. 2024, arXiv:2404.14219).
#
# Adapters have one pair of factors for each fused projection, ``qkv_proj`` and ``gate_up_proj``.

PHI3 = "phi3"
_PHI3_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "max_position_embeddings": 4096}
_PHI3_NEUTRAL = dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias", "resid_pdrop", "embd_pdrop"), (0,))
_LONG = ("longrope", "su", "yarn")  # older names of longrope in transformers


def read_phi3(config: hf_config.ConfigJson) -> DecoderConfig:
    """Read a ``config.json`` of a Phi-3; ValueErrors name the field."""
    fields = {**_PHI3_DEFAULTS, **hf_config.not_null(config)}
    shared = read_shared(fields, PHI3, honoured=("partial_rotary_factor",))
    hf_config.refuse_changed(fields, _PHI3_NEUTRAL, PHI3)
    return DecoderConfig(
        **shared,
        rope=_phi_rope(fields, shared["head_dim"]),
        windows=same_window(fields, fields.get("sliding_window")),
        fused=True,
    )


def _phi_rope(fields: hf_config.ConfigJson, head_dim: int) -> RopeConfig:
    """Return the partial rotary embedding, with LongRoPE's table for short sequences if the folder has one."""
    scaling = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    share = float(scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0)
    turned = int(head_dim * share)
    even = share <= 1 and turned >= 2 and turned % 2 == 0
    hf_config.expect(even, "partial_rotary_factor", f"an even part of {head_dim} dimensions", share)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    hf_config.expect(kind in ("default", *_LONG), "rope_type", f"longrope for model_type {PHI3!r}", kind)
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


PHI3_ARCHITECTURE = llama.LLAMA_ARCHITECTURE._replace(
    model_types=(PHI3,),
    read=read_phi3,
    projections={"qkv_proj": FUSED, "o_proj": ROWS, "gate_up_proj": FUSED, "down_proj": ROWS},
    # Beyond it LongRoPE uses another table from the first token on: a completion would change its prompt's keys.
    longest=lambda config: config.rope.original_length or None,
)


# Gemma 2 and the language models of Gemma 3.
#
# Llama's layers with norms that multiply by 1 + weight, also after attention and MLP, and windows in most layers. Gemma
# 2 has softcaps on scores and logits (Gemma team 2024, arXiv:2408.00118; 2025, arXiv:2503.19786).

GEMMA2, GEMMA3 = "gemma2", "gemma3_text"
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}
_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # Gemma 2's; null is none


def read_gemma2(config: hf_config.ConfigJson) -> DecoderConfig:
    """Read a Gemma 2's ``config.json``; ValueErrors name the field."""
    return _read_gemma({**_SOFTCAPS, **config}, GEMMA2, pattern=2, rope=read_rope(config))


def read_gemma3(config: hf_config.ConfigJson) -> DecoderConfig:
    """Read a Gemma 3 text model's ``config.json``; layers with and without a window have different RoPE bases."""
    far, near = _gemma_ropes(config)
    pattern = config.get("sliding_window_pattern") or 6
    read = _read_gemma(config, GEMMA3, pattern=pattern, rope=far, qk_norm="head")
    return dataclasses.replace(read, layer_ropes=tuple(far if window is None else near for window in read.windows))


def _read_gemma(fields: hf_config.ConfigJson, model_type: str, *, pattern: int, **choices: Any) -> DecoderConfig:
    """Read the fields of both; without layer_types, every ``pattern``-th layer has no window."""
    fields = {**_GEMMA_DEFAULTS, **hf_config.not_null(fields)}
    honoured = ("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping")
    honoured = honoured if model_type == GEMMA2 else honoured[:2]
    shared = read_shared(fields, model_type, honoured=honoured)
    names = ("full_attention", "sliding_attention")
    types = fields.get("layer_types", [names[(index + 1) % pattern != 0] for index in range(shared["num_layers"])])
    return DecoderConfig(
        **(shared | {"activation": fields["hidden_activation"]}),
        **choices,
        attention_softcap=fields.get("attn_logit_softcapping"),
        logit_softcap=fields.get("final_logit_softcapping"),
        windows=typed_windows(fields, types, fields["sliding_window"]),
        unit_offset=True,
        norms="both",
        attention_scale=float(fields["query_pre_attn_scalar"]) ** -0.5,
        embedding_scale=shared["hidden_size"] ** 0.5,
    )


def _gemma_ropes(fields: hf_config.ConfigJson) -> tuple[RopeConfig, RopeConfig]:
    """Return the RoPE of layers without and with a window: a table for each or, in older folders, two bases."""
    tables = dict(fields.get("rope_parameters") or {})
    known = set(tables) <= {"full_attention", "sliding_attention"}
    hf_config.expect(known, "rope_parameters", "full_attention and sliding_attention alone", sorted(tables))
    far = {"rope_parameters": (tables.get("full_attention") or {}) | (fields.get("rope_scaling") or {})}
    far |= {name: fields.get(name) for name in ("rope_theta", "max_position_embeddings")}
    near = {"rope_parameters": tables.get("sliding_attention"), "rope_theta": fields.get("rope_local_base_freq")}
    return read_rope(far, theta=1e6), read_rope(near, theta=1e4)


GEMMA2_ARCHITECTURE = llama.LLAMA_ARCHITECTURE._replace(model_types=(GEMMA2,), read=read_gemma2)
GEMMA3_ARCHITECTURE = llama.LLAMA_ARCHITECTURE._replace(model_types=(GEMMA3,), read=read_gemma3)
