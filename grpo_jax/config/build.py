"""Make configs of nested plain values, and write the values of configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from grpo_jax.config.fields import KEY, Section, mistakes, walk
from grpo_jax.config.files import Fields, Values
from grpo_jax.errors import UserError

AnySection = TypeVar("AnySection", bound=Section)


def merged(below: Any, above: Any) -> Any:
    """Lay values over values: mappings by key, all else whole; another kind takes the old one's fields with it."""
    if isinstance(above, str) and isinstance(below, Mapping) and KEY in below:
        above = {KEY: above}
    if isinstance(below, str) and isinstance(above, Mapping):
        below = {KEY: below}
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    if KEY in below and str(above.get(KEY, below[KEY])) != below[KEY]:
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


def build(kind: type[AnySection], values: Values) -> AnySection:
    """Return the section of nested values; UserError with a line for each mistake."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(*mistakes(kind, values, error)) from None


def to_dict(config: Section) -> Fields:
    """Return a config as nested plain values, which `build` takes."""
    return config.model_dump()


def to_yaml(config: Section) -> str:
    """Return a config as YAML that `--config` reads back."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def flat(values: Values, prefix: str = "") -> Fields:
    """Return nested values as {"section.field": value}."""
    result: Fields = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        result |= flat(value, f"{dotted}.") if isinstance(value, Mapping) and value else {dotted: value}
    return result


def identity(config: Section) -> Fields:
    """Return the fields that change what is learned, {"section.field": plain value}: those not `resume_mutable`."""
    mutable = tuple(f"{field.path}." for field in walk(type(config), config) if field.mutable)
    return {name: value for name, value in flat(to_dict(config)).items() if not f"{name}.".startswith(mutable)}


def differences(saved: Values, config: Section) -> list[str]:
    """Return the fields in which a config differs from a saved `identity`, each as "name: saved → now"."""
    now = identity(config)
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return [f"{name}: {saved.get(name)} → {now.get(name)}" for name in names]
