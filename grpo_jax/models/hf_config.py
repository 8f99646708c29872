"""Validation of a ``config.json``: types, ranges, and fields that would change results."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from annotated_types import Interval
from pydantic import ConfigDict, ValidationError

from grpo_jax.config.fields import first_mistake
from grpo_jax.errors import UserError, one_line, short_repr

ConfigJson = Mapping[str, Any]  # the contents of a ``config.json``, or of a table in it

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
"""Of the pydantic dataclasses that hold a config; their annotations are the kinds of its fields."""
LARGEST_FLOAT = 3.4e38  # of float32
# Upper bounds exceed those of any existing model.
Side = Annotated[int, Interval(ge=1, le=2**12)]
Heads = Annotated[int, Interval(ge=1, le=2**14)]
Width = Annotated[int, Interval(ge=1, le=2**20)]
Rows = Annotated[int, Interval(ge=1, le=2**24)]  # of a table that is allocated
Positions = Annotated[int, Interval(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Interval(gt=0, le=LARGEST_FLOAT)]
NotNegative = Annotated[float, Interval(ge=0, le=LARGEST_FLOAT)]
MOST_LAYERS = 2**12

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
    fields: ConfigJson, neutral: Mapping[str, tuple[Any, ...]], model_type: str, required: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the non-null fields. ValueError names one that is missing or not supported.

    `neutral` are the values of unsupported fields that change nothing.
    """
    fields = not_null(fields)
    if missing := [name for name in required if name not in fields]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    refuse_changed(fields, neutral, model_type)
    return fields


def check_layers(layers: Any, name: str) -> None:
    """Raise ValueError for a number of layers that no memory holds, before each gets an entry."""
    expect(layers <= MOST_LAYERS, name, f"at most {MOST_LAYERS}", layers)


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
    """Convert errors of these types to UserError("start: error"), in one line."""
    try:
        yield
    except ValidationError as error:
        raise UserError(f"{start}: {first_mistake(error)}") from error
    except kinds as error:
        confused = isinstance(error, TypeError | LookupError | ArithmeticError | AttributeError)
        raise UserError(f"{start}: {'a field has a value of another type: ' * confused}{error}") from error


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
