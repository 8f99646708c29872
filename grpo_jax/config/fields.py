"""Types, ranges and checks of the fields of a section."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from annotated_types import BaseMetadata, Ge, Gt, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from grpo_jax.errors import FieldError, UserError, short_name, short_repr

MAY_CHANGE = "may_change"
"""Key of a field's metadata."""

COUNT, LENGTH, WIDTH = 2**31 - 1, 2**24, 2**20
"""Upper bounds of what is counted (steps), of what lies side by side (tokens, rows), and of a matrix's width."""

COEFFICIENT = 10**12
"""Upper bound of a weight: sums of its squares still fit into float32."""

# The upper bounds are beyond anything that runs: a slip of the hand is refused before it fills the memory of a machine.
Count = Annotated[int, Ge(0), Le(COUNT)]
PositiveCount = Annotated[int, Ge(1), Le(COUNT)]
Length = Annotated[int, Ge(1), Le(LENGTH)]
Coefficient = Annotated[float, Ge(0), Le(COEFFICIENT)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]

Path = Sequence[str | int]
"""Of a value within another one."""
UnknownField = Callable[[str, Path, Any], str]
"""(name of the section, path with the key, value) → the line about a key that the section has not."""

_NO_VALUE = ": expected a value, it has no default"
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping of fields",
    "greater_than_equal": "a number >= {ge}",
    "greater_than": "a number > {gt}",
    "less_than_equal": "a number <= {le}",
    "less_than": "a number < {lt}",
}
"""Expected values by pydantic's type of error; of others pydantic's own words."""


def require(condition: bool, name: str, expected: str, came: object) -> None:
    """Raise UserError naming the field, what was expected and what came, unless `condition` holds."""
    if not condition:
        raise FieldError(f"{name}: expected {expected}, got {short_repr(came)}")


def check_ranges(section: object, name: str) -> None:
    """Raise UserError for a field outside the range that its type declares, such as `Count` or `Share`.

    For `__post_init__`, so that sections made in Python are checked like those of a file.
    """
    for field, hint in _bounded(type(section)).items():
        typed(hint, getattr(section, field), join(name, field))


@functools.cache
def _bounded(kind: type) -> dict[str, Any]:
    """Return the types of the fields whose type, or a member of whose union, has bounds."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {
        name: [mark for member in (hint, *get_args(hint)) for mark in getattr(member, "__metadata__", ())]
        for name, hint in hints.items()
    }
    return {name: hints[name] for name, found in marks.items() if any(isinstance(mark, BaseMetadata) for mark in found)}


def typed(hint: object, value: Any, name: str, *, unknown: UnknownField | None = None, context: Any = None) -> Any:
    """Return plain data as a value of a type, strictly: no text is a number, no number is text.

    Raises:
        FieldError: With a line for each mistake: where, what was expected, what came; `unknown` makes that of a field
            that a section has not.
    """
    try:  # in a list, for pydantic takes no settings for a dataclass itself
        return _adapter(list[hint]).validate_json(json.dumps([value], default=short_repr), context=context)[0]
    except ValidationError as error:
        lines: dict[str, Sequence[str]] = {}
        for mistake in error.errors(include_url=False):
            path = mistake["loc"][1:]
            where = _place_of(path, value, name)
            came = mistake["input"]
            raised = mistake.get("ctx", {}).get("error")
            if mistake["type"] == "missing":
                where = join(where, str(path[-1]))
                found = [f"{where}{_NO_VALUE}"]
            elif mistake["type"] == "unexpected_keyword_argument" and unknown:
                found = [unknown(_place_of(path[:-1], value, name), path, came)]
            elif raised is not None:
                found = raised.args if isinstance(raised, UserError) else [f"{where}: {raised}".removeprefix(": ")]
            else:
                found = [f"{where}: expected {_expected(mistake)}, got {short_repr(came)}"]
            lines.setdefault(where, found)  # of the members of a union, what the first one says
        every = [line for found in lines.values() for line in found]
        misspelt = {f"{line.rpartition('did you mean ')[2].removesuffix('?')}{_NO_VALUE}" for line in every}
        raise FieldError(*(line for line in every if line not in misspelt)) from error


@functools.cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=_STRICT)


def _place_of(path: Path, value: Any, name: str) -> str:
    """Return the place of a mistake in a value as one name, such as rewards[0].weight."""
    for part in path:
        if isinstance(part, int):
            name = f"{name}[{part}]"
            value = value[part]
        elif isinstance(value, Mapping) and part in value:  # else a member of a union
            name = join(name, part)
            value = value[part]
    return name


def _expected(mistake: ErrorDetails) -> str:
    came = mistake["input"]
    limits = mistake.get("ctx", {})
    if mistake["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'|(\d+)", limits["expected"])
        names = [text or number for text, number in choices]
        near = difflib.get_close_matches(str(came), names, n=1)
        return f"one of {', '.join(names)}" + (f" (did you mean {near[0]}?)" if near else "")
    if mistake["type"] == "list_type" and isinstance(came, str | int | float):
        return f"a list, such as [{short_name(came)}]"
    expected = _EXPECTED.get(mistake["type"])
    if expected is None:
        return mistake["msg"].removeprefix("Input should be ")
    return expected.format(
        **{name: f"{limit:.12g}" if isinstance(limit, float) else limit for name, limit in limits.items()}
    )


def may_change(default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING) -> Any:
    """Declare a field that a resumed run may change, because results do not depend on it but for rounding.

    Such are memory, paths, how often is saved and how long is trained. Every other field of a checkpoint's config
    must be the resumed run's (`identity`).
    """
    return dataclasses.field(default=default, default_factory=default_factory, metadata={MAY_CHANGE: True})


def join(*parts: str) -> str:
    """Return names as one dotted name; empty ones are left out."""
    return ".".join(part for part in parts if part)


def is_section(hint: object) -> TypeGuard[type]:
    """Whether the type of a field is a dataclass."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def members_of(hint: object) -> tuple[Any, ...]:
    """Return the members of a union, or a type itself, without annotations."""
    if get_origin(hint) is Annotated:
        return members_of(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for inner in get_args(hint) for member in members_of(inner))
    return (hint,)


def default_of(field: dataclasses.Field) -> Any:
    """Return a field's default; `dataclasses.MISSING` where a value must be given."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
