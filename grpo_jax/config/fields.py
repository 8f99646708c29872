"""Types, ranges and checks of the fields of a section."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from grpo_jax.errors import UserError, shown

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

_SIGNS: dict[type, tuple[str, str]] = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}


def require(condition: bool, name: str, expected: str, came: object) -> None:
    """Raise UserError naming the field, what was expected and what came, unless `condition` holds."""
    if not condition:
        raise UserError(f"{name}: expected {expected}, got {shown(came)}")


def check_ranges(section: object, name: str) -> None:
    """Raise UserError for a field outside the range that its type declares, such as `Count` or `Share`.

    For `__post_init__`, so that sections made in Python are checked like those of a file.
    """
    for field, bounds in _ranges(type(section)).items():
        value = getattr(section, field)
        for bound in bounds:
            attribute, sign = _SIGNS[type(bound)]
            limit = getattr(bound, attribute)
            in_range = value is None or getattr(operator, attribute)(value, limit)
            require(in_range, join(name, field), f"a number {sign} {limit}", value)


@functools.cache
def _ranges(kind: type) -> dict[str, list[Ge | Gt | Le | Lt]]:
    """Return the bounds of each field whose type, or a member of whose union, has some."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: [
            bound
            for member in (hints[field.name], *get_args(hints[field.name]))
            for bound in getattr(member, "__metadata__", ())
            if type(bound) in _SIGNS
        ]
        for field in dataclasses.fields(kind)
    }


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
