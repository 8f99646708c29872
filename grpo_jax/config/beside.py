"""Fields of a section that stand beside those of an object whose class a config names (`fields.named`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, get_type_hints

from grpo_jax.config.fields import BESIDE
from grpo_jax.config.named import load_object
from grpo_jax.errors import UserError


class Beside(NamedTuple):
    """What may stand beside an object's own fields.

    Attributes:
        holder: Dataclass of the object, the section, and what a config calls them, in this order.
        section: Dataclass whose fields these are.
    """

    holder: type
    section: type

    @property
    def fields(self) -> dict[str, dataclasses.Field]:
        """By name."""
        return {field.name: field for field in dataclasses.fields(self.section)}

    def split(self, values: Mapping[str, Any], kind: type, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values in those of the object and those of the section; what both have is the object's.

        Raises:
            UserError: The section is used, and the object has a field of a name of its.
        """
        own = {field.name for field in dataclasses.fields(kind)}
        more = {key: value for key, value in values.items() if key in self.fields and key not in own}
        if more and (clash := sorted(own & self.fields.keys())):
            raise UserError(
                f"{name}.{clash[0]}: expected no field of {kind.__name__}'s own of this name beside "
                f"{next(iter(more))}; give it another"
            )
        return {key: value for key, value in values.items() if key not in more}, more


def beside_of(metadata: Mapping[str, Any]) -> Beside | None:
    """What a field says may stand beside its objects; None where nothing may."""
    if not metadata.get(BESIDE):
        return None
    holder = load_object(metadata[BESIDE], "config")
    _, section, _ = dataclasses.fields(holder)
    return Beside(holder, get_type_hints(holder)[section.name])


def object_of(value: Any, metadata: Mapping[str, Any]) -> tuple[Any, Any]:
    """The object that a field holds, and the section beside it or None."""
    shared = beside_of(metadata)
    if shared is None or not isinstance(value, shared.holder):
        return value, None
    first, second, _ = dataclasses.fields(shared.holder)
    return getattr(value, first.name), getattr(value, second.name)
