"""Checks of the fields of a ``config.json``: kinds, ranges, and values that would change what is computed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpo_jax.errors import shown


class Kind(NamedTuple):
    """What a field holds: in words, and as a test."""

    said: str
    holds: Callable[[Any], bool]


def whole(least: int, most: int) -> Kind:
    """Whole numbers of a range; the upper ends are beyond any model there is."""
    return Kind(
        f"a whole number from {least} to {most}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
    )


def _positive(value: Any) -> bool:
    return _finite(value) and value > 0


def _finite(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= _LARGEST  # NaN is not


_LARGEST = 3.4e38  # of float32, in which models compute


WIDTH = whole(1, 2**20)


LAYERS = whole(1, 2**12)


HEADS = whole(1, 2**14)


VOCABULARY = whole(1, 2**24)


POSITIONS = whole(1, 2**31 - 1)


TABLE_POSITIONS = whole(1, 2**24)  # of a table of positions, which is allocated


POSITIVE = Kind("a finite number > 0", _positive)


NOT_NEGATIVE = Kind("a finite number >= 0", lambda value: _finite(value) and value >= 0)


FLAG = Kind("true or false", lambda value: isinstance(value, bool))


NAME = Kind("a name", lambda value: isinstance(value, str))


NAMES = Kind(
    "a list of names", lambda value: isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
)


WIDTHS = Kind(
    "a list of whole numbers",
    lambda value: isinstance(value, list | tuple) and all(whole(0, 2**20).holds(one) for one in value),
)


TABLE = Kind("a table of fields", lambda value: isinstance(value, Mapping))


def check_kinds(fields: Mapping[str, Any], kinds: Mapping[str, Kind], where: str = "") -> None:
    """Refuse fields of another kind; absent ones and None pass.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """
    for name, kind in kinds.items():
        value = fields.get(name)
        if value is not None and not kind.holds(value):
            raise ValueError(f"{where}{name}: expected {kind.said}, got {shown(value)}")


# Fields other models use to change what is computed, and the values at which they change nothing.
# A folder that sets one of them to something else would be computed wrongly, so it is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "hidden_dropout": (0,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": ((), []),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_residual": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "resid_dropout": (0,),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
}


def refuse_changed(fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], model_type: str) -> None:
    """Refuse fields with a value other than those at which they change nothing; absent ones and None pass.

    Raises:
        ValueError: naming the field and its value.
    """
    for name, values in neutral.items():
        value = fields.get(name)
        if value is not None and value not in values:
            raise ValueError(f"{name}={shown(value)} is not supported for model_type {model_type!r}")
