"""Types, ranges and checks of the fields of a section."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

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

_BOUNDS: dict[type, tuple[str, Callable[[Any, Any], bool], str]] = {
    Ge: ("ge", operator.ge, ">="),
    Gt: ("gt", operator.gt, ">"),
    Le: ("le", operator.le, "<="),
    Lt: ("lt", operator.lt, "<"),
}


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
            attribute, holds, sign = _BOUNDS[type(bound)]
            limit = getattr(bound, attribute)
            require(
                value is None or holds(value, limit),
                f"{name}.{field}" if name else field,
                f"a number {sign} {limit}",
                value,
            )


@functools.cache
def _ranges(kind: type) -> dict[str, list[Any]]:
    """Return the bounds of each field whose type, or a member of whose union, has some."""
    hints = get_type_hints(kind, include_extras=True)
    ranges = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        members = (hint, *get_args(hint))
        ranges[field.name] = [
            bound for member in members for bound in getattr(member, "__metadata__", ()) if type(bound) in _BOUNDS
        ]
    return {name: bounds for name, bounds in ranges.items() if bounds}


def may_change(default: Any = dataclasses.MISSING, *, default_factory: Callable[[], Any] | None = None) -> Any:
    """Declare a field that a resumed run may change, because nothing that is learned depends on it but for rounding.

    What memory allows, where things lie, how often is saved, how long is trained. Every other field of a checkpoint's
    config must be the resumed run's (`identity`).
    """
    return _field(default, default_factory, {MAY_CHANGE: True})


def named(*places: str, default_factory: Callable[[], Any] | None = None, shared: str = "") -> Any:
    """Declare a field that holds an object whose class the config names (`named.find_class`), or a mapping of such.

    Args:
        places: Modules of the built-in ones, such as "package.scorers.{}".
        default_factory: Of the field.
        shared: Import path of a class that holds such an object with a section, whose fields then stand beside the
            object's own: made as Holder(object, section, name), with `section` its dataclass and `parts` both objects.
    """
    return _field(dataclasses.MISSING, default_factory, {CLASSES: places, SHARED: shared})


def _field(default: Any, default_factory: Callable[[], Any] | None, metadata: dict[str, Any]) -> Any:
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
