"""Types, ranges and checks of the fields of a section."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from grpo_jax.errors import UserError, said, shown

MAY_CHANGE, CLASSES, SHARED = "may_change", "classes", "shared"
"""Keys of a field's metadata."""

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
        raise UserError(f"{name}: expected {expected}, got {shown(came)}")


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
    return {
        field: hint
        for field, hint in hints.items()
        if any(get_origin(member) is Annotated for member in (hint, *get_args(hint)))
    }


def typed(hint: Any, value: Any, name: str) -> Any:
    """Return plain data as a value of a type, strictly: no text is a number, no number is text.

    The UserError has a line for each mistake: where, what was expected, what came.
    """
    try:
        return _adapter(hint).validate_json(json.dumps(value, default=shown))
    except ValidationError as error:
        lines: dict[str, str] = {}
        for mistake in error.errors(include_url=False):
            where = name
            inner = value
            for part in mistake["loc"]:
                if isinstance(part, int):
                    where = f"{where}[{part}]"
                    inner = inner[part]
                elif isinstance(inner, Mapping) and part in inner:  # else a member of a union
                    where = join(where, part)
                    inner = inner[part]
            # Of the members of a union, what the first one says.
            lines.setdefault(where, f"{where}: expected {_expected(mistake)}, got {shown(mistake['input'])}")
        raise UserError(*lines.values()) from error


@functools.cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=_STRICT)


def _expected(mistake: ErrorDetails) -> str:
    came = mistake["input"]
    limits = mistake.get("ctx", {})
    if mistake["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'|(\d+)", limits["expected"])
        names = [text or number for text, number in choices]
        near = difflib.get_close_matches(str(came), names, n=1)
        return f"one of {', '.join(names)}" + (f" (did you mean {near[0]}?)" if near else "")
    if mistake["type"] == "list_type" and isinstance(came, str | int | float):
        return f"a list, such as [{said(came)}]"
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


def named(*places: str, default_factory: Any = dataclasses.MISSING, shared: str = "") -> Any:
    """Declare a field that holds an object whose class the config names (`named.find_class`), or a mapping of such.

    Args:
        places: Modules of the built-in ones, such as "package.scorers.{}".
        default_factory: Of the field.
        shared: Import path of a class that holds such an object with a section, whose fields then stand beside the
            object's own: made as Holder(object, section, name), with `section` its dataclass and `parts` both
            objects.
    """
    return dataclasses.field(default_factory=default_factory, metadata={CLASSES: places, SHARED: shared})


def join(*parts: str) -> str:
    """Return names as one dotted name; empty ones are left out."""
    return ".".join(part for part in parts if part)


def is_section(hint: Any) -> TypeGuard[type]:
    """Whether the type of a field is a dataclass."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or a type itself, without annotations."""
    if get_origin(hint) is Annotated:
        return members_of(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for inner in get_args(hint) for member in members_of(inner))
    return (hint,)


def default_of(field: dataclasses.Field) -> Any:
    """Return a field's default; `dataclasses.MISSING` where a value must be given."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
