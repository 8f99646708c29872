"""Vision towers of Qwen-VL: shape and choices, read from a folder's ``config.json``."""

from typing import Any, Literal

from pydantic.dataclasses import dataclass

from grpo_jax.config.fields import Count
from grpo_jax.models import hf_config
from grpo_jax.models.hf_config import STRICT, Heads, NotNegative, Positions, Positive, Rows, Side, Width
from grpo_jax.models.layers import ACTIVATIONS


@dataclass(frozen=True, config=STRICT)
class VisionConfig:
    """Shape and choices of a vision tower; hashable, hence static under jit."""

    model_type: str  # Hugging Face's name of the architecture, tower and language model together
    depth: Positions  # number of layers
    width: Width  # hidden size of the layers
    inner: Width  # width of their MLP
    heads: Heads  # attention heads; a head's size is a multiple of 4
    out: Width  # D, width of the language model
    patch: Side  # pixels along a patch's side
    image_token: Count  # placeholder token that a merged token's state replaces
    video_token: Count  # the same for videos, which are not supported: it must not occur in a text
    vision_start_token: Count  # ordinary token before a picture
    vision_end_token: Count  # ordinary token after a picture
    activation: str = "quick_gelu"  # of the layers' MLP, one of `ACTIVATIONS`
    frames: Side = 2  # frames in a patch, all equal for a still picture
    channels: Side = 3  # channels of a pixel
    merge: Side = 2  # patches along the side of a merged token
    window: Side | None = None  # merged tokens along the side of an attention window; None without windows
    full_attention_layers: tuple[Count, ...] = ()  # layers that see the whole picture, if there are windows
    deepstack_layers: tuple[Count, ...] = ()  # whose states are also added after the language model's first layers
    positions: Rows | Literal[0] = 0  # rows of the table of learned positions, whose largest square is used; 0 for none
    theta: Positive = 10_000.0  # base of the rotary wavelengths
    epsilon: Positive = 1e-6  # of every norm
    initializer_range: NotNegative = 0.02  # standard deviation of freshly drawn weights

    def __post_init__(self):
        """Refuse impossible shapes, with the field names of ``config.json``."""
        whole = self.width % self.heads == 0 and self.head_dim % 4 == 0
        words = f"a divisor of the width {self.width} that leaves a multiple of 4"
        hf_config.expect(whole, "vision_config.num_heads", words, self.heads)
        known = self.activation in ACTIVATIONS
        hf_config.expect(known, "vision_config.hidden_act", f"one of {tuple(ACTIVATIONS)}", self.activation)
        rising = list(self.deepstack_layers) == sorted(set(self.deepstack_layers) & set(range(self.depth)))
        words = f"ascending numbers of {self.depth} layers"
        hf_config.expect(rising, "vision_config.deepstack_visual_indexes", words, self.deepstack_layers)

    @property
    def head_dim(self) -> int:
        """Return E, the head size."""
        return self.width // self.heads

    @property
    def pixels(self) -> int:
        """Return C, the numbers in a patch."""
        return self.channels * self.frames * self.patch**2

    @property
    def picture_tokens(self) -> tuple[int, int, int, int]:
        """Return the tokens before, of and after a picture, and a video's."""
        return self.vision_start_token, self.image_token, self.vision_end_token, self.video_token

    @property
    def merged(self) -> int:
        """Return the patches in a merged token."""
        return self.merge**2


# Other names of the same fields, in transformers or in hub folders.
_ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
_REPEATED = {"in_chans": "in_channels", "spatial_patch_size": "patch_size"}
# The fields of each architecture, with transformers' defaults.
_COMMON = {
    "depth": 32,
    "num_heads": 16,
    "hidden_size": 3584,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.02,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _COMMON | {"embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
    "qwen2_5_vl": _COMMON
    | {"out_hidden_size": 3584, "intermediate_size": 3420, "hidden_act": "silu"}
    | {"window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31)},
    "qwen3_vl": _COMMON
    | {"depth": 27, "hidden_size": 1152, "out_hidden_size": 3584, "intermediate_size": 4304, "patch_size": 16}
    | {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24)},
}
# Fields with other values in transformers' towers, or in other architectures, that would change the computation.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **hf_config.NEUTRAL,
    **dict.fromkeys(("attention_bias", "qkv_bias", "mlp_bias"), (True,)),
    **dict.fromkeys(("layer_norm_eps", "rms_norm_eps"), (1e-6,)),
    "drop_path_rate": (0,),
    "rope_scaling": (),
}
_ROPE = ("axial", "default")
_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def read_vision(config: hf_config.ConfigJson, vocab_size: int, hidden_size: int) -> VisionConfig | None:
    """Read a Qwen-VL folder's tower, supporting or refusing every field; None if ``config.json`` has none."""
    raw, model_type = config.get("vision_config"), config["model_type"]
    if raw is None:
        return None
    try:
        shape = _read_shape(raw, model_type)
    except ValueError as error:
        raise ValueError(f"vision_config: {error}") from error
    name = "hidden_size" if model_type == "qwen2_vl" else "out_hidden_size"
    fits = shape["out"] == hidden_size
    hf_config.expect(fits, f"vision_config.{name}", f"the language model's hidden_size={hidden_size}", shape["out"])
    tokens = _TOKENS | {name: config[name] for name in _TOKENS if config.get(name) is not None}
    for name, token in tokens.items():
        hf_config.expect(token < vocab_size, name, f"a token of the vocabulary of {vocab_size}", token)
    return VisionConfig(model_type, **shape, **{name.removesuffix("_id"): token for name, token in tokens.items()})


def _read_shape(raw: hf_config.ConfigJson, model_type: str) -> dict[str, Any]:
    fields = _read_fields(raw, model_type)
    hf_config.check_layers(fields["depth"], "depth")
    window = fields.get("window_size")
    if window is not None:
        window = window // fields["spatial_merge_size"] // fields["patch_size"]
        hf_config.expect(window >= 1, "window_size", "a merged token or more", fields["window_size"])
    return {
        "depth": fields["depth"],
        "width": fields.get("embed_dim", fields["hidden_size"]),
        "inner": fields.get("intermediate_size") or int(fields["embed_dim"] * fields["mlp_ratio"]),
        "heads": fields["num_heads"],
        "out": fields.get("out_hidden_size", fields["hidden_size"]),
        "patch": fields["patch_size"],
        "activation": fields["hidden_act"],
        "frames": fields["temporal_patch_size"],
        "channels": fields["in_channels"],
        "merge": fields["spatial_merge_size"],
        "window": window,
        # Keep only existing layers: transformers' default list is for 32 layers.
        "full_attention_layers": tuple(
            layer for layer in range(fields["depth"]) if layer in fields.get("fullatt_block_indexes", ())
        ),
        "deepstack_layers": tuple(fields.get("deepstack_visual_indexes", ())),
        "positions": fields.get("num_position_embeddings", 0),
        "theta": _theta(fields),
        "initializer_range": float(fields["initializer_range"]),
    }


def _read_fields(raw: hf_config.ConfigJson, model_type: str) -> dict[str, Any]:
    present = {_ALIASES.get(name, name): value for name, value in hf_config.not_null(raw).items()}
    present = hf_config.check_fields(present, _NEUTRAL, model_type)
    defaults = _FIELDS[model_type]
    fields = defaults | {name: value for name, value in present.items() if name in defaults}
    foreign = {name for other in _FIELDS.values() for name in other} - defaults.keys()
    head_dim = fields.get("embed_dim", fields["hidden_size"]) // fields["num_heads"]
    neutral = dict.fromkeys(sorted(foreign), ()) | {name: (fields[same],) for name, same in _REPEATED.items()}
    neutral |= {"model_type": (model_type, f"{model_type}_vision"), "head_dim": (head_dim,)}
    hf_config.refuse_changed(present, neutral, model_type)
    return fields | {name: present[name] for name in ("rope_parameters", "rope_theta") if name in present}


def _theta(fields: hf_config.ConfigJson) -> float:
    rope = fields.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "axial"
    hf_config.expect(kind in _ROPE, "rope_type", f"one of {', '.join(_ROPE)}", kind)
    hf_config.refuse_changed(rope, {"partial_rotary_factor": (1,), "factor": (1,)}, "rope_parameters")
    return float(rope.get("rope_theta") or fields.get("rope_theta") or 10_000.0)
