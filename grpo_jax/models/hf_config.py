"""Validation of a ``config.json``: types, ranges, and fields that would change results."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from grpo_jax.errors import UserError, one_line, short_repr

ConfigJson = Mapping[str, Any]  # the contents of a ``config.json``, or of a table in it

_LARGEST = 3.4e38  # largest float32


class Kind(NamedTuple):
    """A kind of value: its description and its test."""

    words: str
    holds: Callable[[Any], bool]


def whole(least: int, most: int) -> Kind:
    """Make the kind of integers in a range; upper bounds exceed those of any existing model."""
    return Kind(
        f"a whole number from {least} to {most}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
    )


def list_of(kind: Kind, words: str) -> Kind:
    """Make the kind of lists with entries of one kind."""
    return Kind(words, lambda value: isinstance(value, list | tuple) and all(map(kind.holds, value)))


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST  # NaN is not


WIDTH = whole(1, 2**20)
LAYERS = whole(1, 2**12)
HEADS = whole(1, 2**14)
VOCABULARY = whole(1, 2**24)
POSITIONS = whole(1, 2**31 - 1)
TABLE_POSITIONS = whole(1, 2**24)  # rows of a position table, which is allocated
POSITIVE = Kind("a finite number > 0", lambda value: _finite(value) and value > 0)
NOT_NEGATIVE = Kind("a finite number >= 0", lambda value: _finite(value) and value >= 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NAME = Kind("a name", lambda value: isinstance(value, str))
TABLE = Kind("a table of fields", lambda value: isinstance(value, Mapping))
NAMES = list_of(NAME, "a list of names")
WIDTHS = list_of(whole(0, 2**20), "a list of whole numbers")
LAYER_NUMBERS = list_of(whole(0, 2**24), "a list of layers")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_dropout"), (0,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "partial_rotary_factor"), (1,)),
    **dict.fromkeys(("logit_scale", "logits_scaling"), (1,)),
    **dict.fromkeys(("attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping"), ()),
    **dict.fromkeys(("clip_qkv", "dual_chunk_attention_config", "quantization_config", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("is_encoder_decoder", "parallel_residual", "rope_interleaved"), (False,)),
    **dict.fromkeys(("use_bidirectional_attention", "use_mrope"), (False,)),
    **dict.fromkeys(("num_experts", "num_local_experts"), (0, 1)),
    "is_causal": (True,),
    "no_rope_layers": ((), []),
}
"""Neutral values of fields by which other models change the result; a folder with another value is refused."""


def check_fields(
    fields: ConfigJson,
    kinds: Mapping[str, Kind],
    neutral: Mapping[str, tuple[Any, ...]],
    model_type: str,
    required: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the non-null fields. ValueError names one that is missing, of another kind or not supported.

    `kinds` are those of the supported fields, `neutral` the values of others that change nothing.
    """
    check_kinds(fields, kinds)
    fields = not_null(fields)
    if missing := [name for name in required if name not in fields]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    refuse_changed(fields, neutral, model_type)
    return fields


def check_kinds(fields: ConfigJson, kinds: Mapping[str, Kind], where: str = "") -> None:
    """Raise ValueError naming the first field of another kind and its value; missing fields and None pass."""
    for name, kind in kinds.items():
        value = fields.get(name)
        expect(value is None or kind.holds(value), f"{where}{name}", kind.words, value)


def expect(holds: bool, name: str, words: str, value: Any) -> None:
    """Raise ValueError with a field's name, valid values and value, unless the condition holds."""
    if not holds:
        raise ValueError(f"{name}: expected {words}, got {short_repr(value)}")


def refuse_changed(fields: ConfigJson, neutral: Mapping[str, tuple[Any, ...]], model_type: str) -> None:
    """Raise ValueError naming the first field with a value that is not neutral; missing fields and None pass."""
    for name, values in neutral.items():
        value = fields.get(name)
        if value is not None and value not in values:
            raise ValueError(f"{name}={short_repr(value)} is not supported for model_type {model_type!r}")


def not_null(fields: ConfigJson) -> dict[str, Any]:
    """Return the non-null fields; null counts as missing."""
    return {name: value for name, value in fields.items() if value is not None}


@contextmanager
def as_user_error(start: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of these types to UserError("start: error")."""
    try:
        yield
    except kinds as error:
        raise UserError(f"{start}: {error}") from error


@contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Convert a tokenizer's failure to UserError; a Rust panic is not an ``Exception``."""
    try:
        yield
    except BaseException as error:
        failure = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not failure or isinstance(error, ModuleNotFoundError):
            raise
        reason = f"{type(error).__name__}: {one_line(error, 120) or 'no reason given'}"
        raise UserError(f"{what} ({reason}); copy its files again") from error
