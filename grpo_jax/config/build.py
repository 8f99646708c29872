"""Dictionaries to frozen dataclasses and back, alike for every section there is or will be.

`complete` checks names and types and fills in defaults; `build` makes the dataclasses of that, which check their ranges
themselves. A field declared with `fields.named` holds an object whose class the config names: {"kind": …, field: …}.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard, Union, get_args, get_origin, get_type_hints

from grpo_jax.config.beside import beside_of, object_of
from grpo_jax.config.fields import CLASSES, MAY_CHANGE, require
from grpo_jax.config.named import KEY, class_name, find_class
from grpo_jax.config.other_names import TRL
from grpo_jax.config.reading import read_yaml, require_text
from grpo_jax.errors import UserError, said, shown

_LISTED = 155  # characters


class Words(str):
    """A value as a command line has it: text, of which its field says what it stands for."""

    def read(self, name: str) -> Any:
        """What it stands for as YAML.

        Raises:
            UserError: It is none.
        """
        try:
            return read_yaml(self)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error


def build(kind: type, values: Mapping[str, Any], name: str = "") -> Any:
    """A dataclass of plain, nested values; those that are such dataclasses already are taken as they are.

    Raises:
        UserError: An unknown or missing field, a value of another type, or one out of range.
    """
    values = complete(kind, values, name)
    hints = get_type_hints(kind)
    fields = {
        field.name: _made(field, hints[field.name], values[field.name], join(name, field.name)) for field in _of(kind)
    }
    return kind(**fields)


def complete(kind: type, values: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Plain values of all fields of a dataclass: the given ones, checked in name and type, and all others' defaults.

    Raises:
        UserError: As `build`, ranges apart.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{said(name)}: expected a mapping of fields, got {shown(values)}")
    if not name:
        _require_fields(kind, values)
    fields, hints = {field.name: field for field in _of(kind)}, get_type_hints(kind)
    for key in values:
        require_known(str(key), fields, name)
    result = {}
    for key, field in fields.items():
        dotted = join(name, key)
        if key in values:
            result[key] = _checked(field, hints[key], values[key], dotted)
        else:
            result[key] = _checked(field, hints[key], _default(field, dotted), dotted)
    return result


def require_known(key: str, known: Mapping[str, Any] | Sequence[str], name: str = "") -> None:
    """Raises UserError for a field that does not exist; it says the nearest one that does."""
    if key in known:
        return
    near = difflib.get_close_matches(key, [str(one) for one in known], n=1, cutoff=0.55)
    hint = f"did you mean {join(name, near[0])}?" if near else f"there are: {listed(known)}"
    raise UserError(f"{said(join(name, key))}: no such field; {hint}")


def _require_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Raises UserError for a name that no section of a whole config has.

    It says where TRL's field of that name has its place, which section has a field of that name, or the nearest name.
    """
    unknown: list[_Unknown] = []
    rest = _known(kind, values, unknown)
    if not unknown:
        return
    known = list(flat(complete(kind, rest)))
    path, section, own = unknown[0]
    name, last = join(*path), path[-1]
    same = [field for field in known if field.rpartition(".")[2] == last]
    for part in reversed(path[len(section) :]):
        place = TRL.get(part)
        if place and (place.stands_in(known) if place.fields else not same):
            raise UserError(f"{said(name)}: no such field; {place.hint}")
    if not section:
        require_known(name, same or [*own, *known])
    elif same and not difflib.get_close_matches(last, own, n=1, cutoff=0.8):
        require_known(name, same)
    require_known(path[len(section)], own, join(*section))


class _Unknown(NamedTuple):
    """A field that does not exist: its path and its section's, and the fields which that section has."""

    path: tuple[str, ...]
    section: tuple[str, ...]
    own: list[str]


def _known(
    kind: type, values: Mapping[str, Any], unknown: list[_Unknown], section: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The values of fields that exist; the others are added to `unknown`."""
    hints, own, result = get_type_hints(kind), [field.name for field in _of(kind)], {}
    for key, value in values.items():
        path = (*section, str(key))
        if key in own:
            inside = is_section(hints[key]) and isinstance(value, Mapping)
            result[key] = _known(hints[key], value, unknown, path) if inside else value
            continue
        while isinstance(value, Mapping) and value:  # to the first field that is meant
            inner, value = next(iter(value.items()))
            path = (*path, str(inner))
        unknown.append(_Unknown(path, section, own))
    return result


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as {"section.field": value}."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        result |= flat(value, f"{dotted}.") if isinstance(value, Mapping) and value else {dotted: value}
    return result


def listed(names: Iterable[str]) -> str:
    """Names in their order, as many as a line of an error has room for."""
    text = ", ".join(sorted(names)) or "none"
    return text if len(text) <= _LISTED else f"{text[:_LISTED].rpartition(', ')[0]}, …"


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values of a dataclass; `build` makes it again of them."""
    hints = get_type_hints(type(config))
    return {
        field.name: _widened(hints[field.name], _plain(getattr(config, field.name), field.metadata))
        for field in _of(type(config))
    }


def to_yaml(config: Any) -> str:
    """A dataclass as YAML that `--config` reads back."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def identity(config: Any) -> dict[str, Any]:
    """The fields that change what is learned, {"section.field": plain value}: those not declared `may_change`."""
    return dict(_identity(config, ""))


def differences(saved: Mapping[str, Any], config: Any) -> list[str]:
    """The fields in which a config differs from a saved `identity`, each as "name: saved → now"."""
    now = identity(config)
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return [f"{name}: {saved.get(name)} → {now.get(name)}" for name in names]


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings laid one over the other: the later ones win; lists are replaced whole."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            if isinstance(value, Mapping) and isinstance(below, Mapping):
                value = merged(below, value)
            result[key] = value
    return result


def _of(kind: type) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(kind)


def is_section(hint: Any) -> TypeGuard[type]:
    """Whether the type of a field is a dataclass."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def join(*parts: str) -> str:
    """Names as one dotted name; empty ones are left out."""
    return ".".join(part for part in parts if part)


def _default(field: dataclasses.Field, name: str) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise UserError(f"{name}: expected a value, it has no default")


# ------------------------------------------------------------------------------------------------- to dataclasses


def _checked(field: dataclasses.Field, hint: Any, value: Any, name: str) -> Any:
    """The value as plain data of the field's type."""
    places = field.metadata.get(CLASSES)
    if places is None:
        return typed(hint, value, name)
    if get_origin(hint) is not dict:
        return _named_values(field, value, name)
    value = typed(dict[str, Any], value, name)
    return {key: _named_values(field, entry, join(name, key)) for key, entry in value.items()}


def _named_values(field: dataclasses.Field, value: Any, name: str) -> dict[str, Any]:
    places = field.metadata[CLASSES]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(value, field.metadata)
    value = {KEY: value} if isinstance(value, str) else value
    if not isinstance(value, Mapping) or KEY not in value:
        raise UserError(f"{name}.{KEY}: expected the name of a class, package.module:Class or file.py:Class")
    kind = find_class(value[KEY], places, name)
    others = {key: entry for key, entry in value.items() if key != KEY}
    shared = beside_of(field.metadata)
    if shared is None:
        return {KEY: value[KEY], **complete(kind, others, name)}
    known = [*(one.name for one in _of(kind)), *shared.fields]
    for key in others:
        require_known(str(key), known, name)
    own, more = shared.split(others, kind, name)
    return {KEY: value[KEY], **complete(kind, own, name), **(complete(shared.section, more, name) if more else {})}


def _made(field: dataclasses.Field, hint: Any, value: Any, name: str) -> Any:
    """The object that the field holds, of complete plain values."""
    places = field.metadata.get(CLASSES)
    if places is None:
        return _object(hint, value, name)
    if get_origin(hint) is not dict:
        return _named_object(field, value, name)
    return {key: _named_object(field, entry, join(name, key)) for key, entry in value.items()}


def _named_object(field: dataclasses.Field, value: Mapping[str, Any], name: str) -> Any:
    others = {key: entry for key, entry in value.items() if key != KEY}
    kind = find_class(value[KEY], field.metadata[CLASSES], name)
    shared = beside_of(field.metadata)
    own, more = (others, {}) if shared is None else shared.split(others, kind, name)
    try:
        made = build(kind, own, name)
        return shared.holder(made, build(shared.section, more, name), name) if shared and more else made
    except UserError as error:  # the class names its own fields; what it is called here it does not know
        raise error if str(error).startswith(name) else UserError(f"{name}.{error}") from error


def _object(hint: Any, value: Any, name: str) -> Any:
    """Plain values with the dataclasses that a type asks for in their places."""
    if is_section(hint):
        return build(hint, value, name)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is list and is_section(inner[0]):
        return [build(inner[0], entry, f"{name}[{index}]") for index, entry in enumerate(value)]
    if origin is dict and is_section(inner[1]):
        return {key: build(inner[1], entry, join(name, key)) for key, entry in value.items()}
    return value


# ----------------------------------------------------------------------------------------------------------- types


def typed(hint: Any, value: Any, name: str) -> Any:
    """A plain value of a type; numbers may be written as text, as YAML gives 1e-6.

    Raises:
        UserError: It is of another type.
    """
    if is_section(hint):
        value = value.read(name) if isinstance(value, Words) else value
        return complete(hint, to_dict(value) if isinstance(value, hint) else ({} if value is None else value), name)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, name)
    if isinstance(value, Words) and origin is list and not is_section(inner[0]):
        value = _entries_of(inner[0], value, name)
    elif isinstance(value, Words):
        value = str(value) if hint is str or origin is Literal else value.read(name)
    if origin is Literal:
        near = difflib.get_close_matches(str(value), [str(choice) for choice in inner], n=1)
        words = ", ".join(map(str, inner)) + (f" (did you mean {near[0]}?)" if near else "")
        require(value in inner and not isinstance(value, bool), name, f"one of {words}", value)
        return value
    if origin is list:
        value = _spelled_out(inner[0], value)
        expected = f"a list, such as [{value}]" if isinstance(value, str | int | float) else "a list"
        require(isinstance(value, list | tuple), name, expected, value)
        return [typed(inner[0], entry, f"{name}[{index}]") for index, entry in enumerate(value)]
    if origin is dict:
        require(isinstance(value, Mapping), name, "a mapping", value)
        for key in value:
            require(isinstance(key, str), name, "names as keys", key)
        return {str(key): typed(inner[1], entry, join(name, str(key))) for key, entry in value.items()}
    return _scalar(hint, value, name)


def _entries_of(kind: Any, words: Words, name: str) -> Any:
    """A list, which words may be without brackets: one entry, or several with commas where entries are no texts."""
    value = words.read(name)
    if not isinstance(value, str | int | float):
        return value
    texts = kind is str or str in get_args(kind)
    require(
        "," not in words or not texts, name, "a list, such as '[one, two]' or '[\"one, with a comma\"]'", str(words)
    )
    return [words] if texts else [Words(part.strip()) for part in words.split(",")]


def _spelled_out(kind: Any, value: Any) -> Any:
    """A list of sections of which some are texts, or a text alone, where the section says what a text stands for."""
    shorthand = getattr(kind, "shorthand", None)
    if shorthand is None:
        return value
    value = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(value, list | tuple):
        return value
    return [{shorthand: entry} if isinstance(entry, str) else entry for entry in value]


def _one_of(choices: Sequence[Any], value: Any, name: str) -> Any:
    none = value is None or (isinstance(value, Words) and value == "null")
    if none and type(None) in choices:
        return None
    errors = []
    for choice in (choice for choice in choices if choice is not type(None)):
        try:
            return typed(choice, value, name)
        except UserError as error:
            errors.append(error)
    raise errors[0]


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _scalar(hint: Any, value: Any, name: str) -> Any:
    if hint is Any:
        return value
    if hint is float:
        return _number(value, name)
    fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    require(fits, name, _WORDS.get(hint, str(hint)), value)
    if isinstance(value, str):
        try:
            require_text(value)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error
    elif not isinstance(value, bool) and isinstance(value, int):
        require(-(2**63) <= value < 2**63, name, "a whole number of 64 bits", value)
    return value


def _number(value: Any, name: str) -> float:
    """A finite float; no field has a meaning for others."""
    number = None
    if isinstance(value, float | int | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):  # no number, or a whole one beyond all floats
            number = math.inf if isinstance(value, int) else None
    require(number is not None, name, _WORDS[float], value)
    assert number is not None
    require(math.isfinite(number), name, "a finite number", value if isinstance(value, int) else number)
    return number


# -------------------------------------------------------------------------------------------------- to plain values


def _plain(value: Any, metadata: Mapping[str, Any]) -> Any:
    places = metadata.get(CLASSES)
    if places is not None and isinstance(value, Mapping):
        return {key: _plain(entry, metadata) for key, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if places is None:
            return to_dict(value)
        held, section = object_of(value, metadata)
        return {KEY: class_name(type(held), places), **to_dict(held), **({} if section is None else to_dict(section))}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, {}) for key, entry in value.items()}
    return [_plain(entry, {}) for entry in value] if isinstance(value, list | tuple) else value


def _lasting(value: Any) -> Any:
    """A plain value; of the sections in a list, the fields that may not change."""
    if isinstance(value, list | tuple):
        return [dict(_identity(entry, "")) if is_section(type(entry)) else _plain(entry, {}) for entry in value]
    return _plain(value, {})


def _widened(hint: Any, value: Any) -> Any:
    """A whole number that Python code gave for a float as that float, as a file of it would be read."""
    floats = hint is float or float in get_args(hint)
    return float(value) if floats and isinstance(value, int) and not isinstance(value, bool) else value


def _identity(config: Any, prefix: str) -> list[tuple[str, Any]]:
    found, hints = [], get_type_hints(type(config))
    for field in _of(type(config)):
        if field.metadata.get(MAY_CHANGE):
            continue
        value, name = getattr(config, field.name), join(prefix, field.name)
        places = field.metadata.get(CLASSES)
        entries = value.items() if places is not None and isinstance(value, Mapping) else [("", value)]
        for key, held in entries:
            inner, (entry, _) = join(name, key), object_of(held, field.metadata)
            if dataclasses.is_dataclass(entry):
                found += [(f"{inner}.{KEY}", class_name(type(entry), places))] if places is not None else []
                found += _identity(entry, inner)
            else:
                found.append((inner, _widened(hints[field.name], _lasting(entry))))
    return found
