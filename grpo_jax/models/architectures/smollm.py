"""SmolLM3: Llama's layers, some of which do not know positions (Bakouch et al. 2025, https://hf.co/blog/smollm3)."""

from grpo_jax.models import hf_config
from grpo_jax.models.architectures import llama
from grpo_jax.models.architectures.llama import DecoderConfig, read_shared, typed_windows
from grpo_jax.models.rope import read_rope

MODEL_TYPE = "smollm3"
_DEFAULTS = {"tie_word_embeddings": True, "num_key_value_heads": 4}
_TURNS = hf_config.Kind(
    "a list of 0 and 1", lambda value: isinstance(value, list | tuple) and all(v in (0, 1) for v in value)
)
_EXTRA_KINDS = {"no_rope_layers": _TURNS, "no_rope_layer_interval": hf_config.LAYERS}


def read_config(config: hf_config.Fields) -> DecoderConfig:
    """Read a SmolLM3's ``config.json``; ValueErrors name the field."""
    fields = {**_DEFAULTS, **config}
    shared = read_shared(fields, MODEL_TYPE, extra_kinds=_EXTRA_KINDS, honoured=("no_rope_layers",))
    turns, bias = _turns(fields), bool(fields.get("attention_bias", False))
    rope = read_rope(fields, theta=2e6)
    return DecoderConfig(
        **shared,
        rope=rope,
        layer_ropes=() if all(turns) else tuple(rope if turned else None for turned in turns),
        windows=_windows(fields, turns),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
    )


def _turns(fields: hf_config.Fields) -> tuple[bool, ...]:
    """Whether each layer rotates queries and keys; ``no_rope_layers`` has a 1 for those that do."""
    layers, turns = fields["num_hidden_layers"], fields.get("no_rope_layers")
    if turns is None:
        interval = fields.get("no_rope_layer_interval") or 4
        return tuple((index + 1) % interval != 0 for index in range(layers))
    hf_config.expect(len(turns) >= layers, "no_rope_layers", f"{layers} entries, one per layer", list(turns))
    return tuple(map(bool, turns[:layers]))


def _windows(fields: hf_config.Fields, turns: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Windows by layer_types; without them for the layers that do not rotate."""
    window = fields.get("sliding_window") if fields.get("use_sliding_window", False) else None
    if fields.get("layer_types") is not None:
        return typed_windows(fields, fields["layer_types"], window)
    return tuple(None if turned else window for turned in turns)


ARCHITECTURE = llama.ARCHITECTURE._replace(model_types=(MODEL_TYPE,), read=read_config)
