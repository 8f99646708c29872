"""Gemma 2 and the language models of Gemma 3.

Llama's layers with norms that multiply by 1 + weight, also behind attention and MLP, windows in most of the layers, and
in Gemma 2 caps on attention's scores and on the logits (Gemma team 2024, arXiv:2408.00118; 2025, arXiv:2503.19786).
"""

import dataclasses
from typing import Any

from grpo_jax.models import hf_config
from grpo_jax.models.architectures import llama
from grpo_jax.models.architectures.llama import DecoderConfig, read_shared, typed_windows
from grpo_jax.models.rope import RopeConfig, read_rope

GEMMA2, GEMMA3 = "gemma2", "gemma3_text"
_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}
_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # Gemma 2's; null is none
_EXTRA_KINDS = {
    **dict.fromkeys((*_SOFTCAPS, "query_pre_attn_scalar", "rope_local_base_freq"), hf_config.POSITIVE),
    "sliding_window_pattern": hf_config.LAYERS,
    "hidden_activation": hf_config.NAME,
}


def read_gemma2(config: hf_config.Fields) -> DecoderConfig:
    """Read a Gemma 2's ``config.json``; ValueErrors name the field."""
    fields = {**_SOFTCAPS, **config}
    return _read(
        fields,
        GEMMA2,
        pattern=2,
        rope=read_rope(fields),
        attention_softcap=_cap(fields, "attn_logit_softcapping"),
        logit_softcap=_cap(fields, "final_logit_softcapping"),
    )


def read_gemma3(config: hf_config.Fields) -> DecoderConfig:
    """Read a Gemma 3 text model's ``config.json``: layers with a window rotate faster than those without."""
    far, near = _ropes(config)
    read = _read(
        config,
        GEMMA3,
        pattern=config.get("sliding_window_pattern") or 6,
        rope=far,
        qk_norm=True,
        logit_softcap=_cap(config, "final_logit_softcapping"),
    )
    return dataclasses.replace(read, layer_ropes=tuple(far if window is None else near for window in read.windows))


def _read(fields: hf_config.Fields, model_type: str, *, pattern: int, **choices: Any) -> DecoderConfig:
    """Read the fields of both; every ``pattern``-th layer has no window where layer_types does not say."""
    fields = {**_DEFAULTS, **hf_config.not_null(fields)}
    honoured = ("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping")
    honoured = honoured if model_type == GEMMA2 else honoured[:2]
    shared = read_shared(fields, model_type, extra_kinds=_EXTRA_KINDS, honoured=honoured)
    names = ("full_attention", "sliding_attention")
    types = fields.get("layer_types", [names[(index + 1) % pattern != 0] for index in range(shared["num_layers"])])
    bias = bool(fields.get("attention_bias", False))
    return DecoderConfig(
        **(shared | {"activation": fields["hidden_activation"]}),
        **choices,
        windows=typed_windows(fields, types, fields["sliding_window"]),
        qkv_bias=bias,
        output_bias=bias,
        unit_offset=True,
        post_norms=True,
        attention_scale=float(fields["query_pre_attn_scalar"]) ** -0.5,
        embedding_scale=shared["hidden_size"] ** 0.5,
    )


def _cap(fields: hf_config.Fields, name: str) -> float | None:
    hf_config.check_kinds(fields, {name: hf_config.POSITIVE})
    return None if fields.get(name) is None else float(fields[name])


def _ropes(fields: hf_config.Fields) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers without and with a window: a table for each or, in older folders, two bases."""
    hf_config.check_kinds(fields, dict.fromkeys(("rope_parameters", "rope_scaling"), hf_config.TABLE))
    tables = dict(fields.get("rope_parameters") or {})
    hf_config.check_kinds(tables, dict.fromkeys(tables, hf_config.TABLE), "rope_parameters.")
    known = set(tables) <= {"full_attention", "sliding_attention"}
    hf_config.expect(known, "rope_parameters", "full_attention and sliding_attention alone", sorted(tables))
    hf_config.check_kinds(fields, dict.fromkeys(("rope_theta", "rope_local_base_freq"), hf_config.POSITIVE))
    far = {"rope_parameters": (tables.get("full_attention") or {}) | (fields.get("rope_scaling") or {})}
    far |= {name: fields.get(name) for name in ("rope_theta", "max_position_embeddings")}
    near = {"rope_parameters": tables.get("sliding_attention"), "rope_theta": fields.get("rope_local_base_freq")}
    return read_rope(far, theta=1e6), read_rope(near, theta=1e4)


ARCHITECTURE = llama.ARCHITECTURE._replace(model_types=(GEMMA2,), read=read_gemma2)
GEMMA3_ARCHITECTURE = llama.ARCHITECTURE._replace(model_types=(GEMMA3,), read=read_gemma3)
