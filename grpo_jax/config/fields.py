"""What a field of a section can say of itself beside its type and its help line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax.errors import UserError, shown

MAY_CHANGE, CLASSES, BESIDE = "may_change", "classes", "beside"

COUNT, LENGTH, WIDTH = 2**31 - 1, 2**24, 2**20
"""The most that is counted, steps and the like; that stands side by side, tokens and rows; that a matrix is wide."""

COEFFICIENT = 10**12
"""The most that anything is weighed with: sums of its squares still fit into float32."""


def require(condition: bool, name: str, expected: str, came: object) -> None:
    """Raises UserError naming the field, what was expected and what came, unless `condition` holds."""
    if not condition:
        raise UserError(f"{name}: expected {expected}, got {shown(came)}")


def require_sizes(section: object, where: str, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raises UserError unless each number of a section lies in its range, both ends included.

    The upper ends are beyond anything that runs: what is above is a slip of the hand, and is said before it fills the
    memory of a machine or overflows a counter.
    """
    for name, (least, most) in ranges.items():
        value = getattr(section, name)
        expected = f"a number >= {least}" if value < least else f"a number <= {most}"
        require(least <= value <= most, f"{where}{name}", expected, value)


def may_change(default: Any = dataclasses.MISSING, *, default_factory: Callable[[], Any] | None = None) -> Any:
    """A field that a resumed run may have another value of: nothing that is learned depends on it, but for rounding.

    What memory allows, where things lie, how often is saved, how long is trained. Every other field of a checkpoint's
    config must be the resumed run's (`identity`).
    """
    return _field(default, default_factory, {MAY_CHANGE: True})


def named(
    *places: str, default_factory: Callable[[], Any] | None = None, may_change: bool = False, beside: str = ""
) -> Any:
    """A field that holds objects of a class named in the config (`named.find_class`), or a mapping of such.

    Args:
        places: Modules of the built-in ones, such as "package.scorers.{}".
        default_factory: Of the field.
        may_change: As `may_change` says.
        beside: Import path of a dataclass of an object, a section and a name: the section's fields may stand beside
            those of an object of any class, which is then held in one of it.
    """
    return _field(dataclasses.MISSING, default_factory, {CLASSES: places, MAY_CHANGE: may_change, BESIDE: beside})


def _field(default: Any, default_factory: Callable[[], Any] | None, metadata: dict[str, Any]) -> Any:
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
