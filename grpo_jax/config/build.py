"""Build frozen dataclasses from nested values, validated by pydantic, and the values from them.

Every section is a dataclass, a user's own task and judges too. `complete` brings the values of YAML, Python or the
command line into one shape; `build` validates it and reports every mistake with its path. A field declared with
`fields.named` holds an object whose class the config names: {"kind": …, field: …}.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from grpo_jax.config.fields import CLASSES, MAY_CHANGE, default_of, is_section, join, members_of, typed
from grpo_jax.config.files import Values, checked, read_yaml
from grpo_jax.config.named import KEY, class_name, find_class, shared_holder
from grpo_jax.config.other_names import TRL
from grpo_jax.errors import UserError, said, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Section = TypeVar("Section", bound="DataclassInstance")
_UnknownField = Callable[[str, str, object, list[str]], str]
"""(section, key, value, names of the section's fields) → the line about a key that the section has not."""

_LIST_WIDTH = 155  # characters of an error line


class RawArgument(str):
    """A value as the command line has it: text, which the type of its field says how to read."""

    def read(self, name: str) -> Any:
        """Return its value as YAML; UserError if it is none."""
        try:
            return read_yaml(self)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error


def complete(kind: type, values: Values, name: str = "") -> dict[str, Any]:
    """Return plain values of all fields of a dataclass in one shape: given ones, unknown ones and defaults."""
    if not isinstance(values, Mapping):
        raise UserError(f"{said(name)}: expected a mapping of fields, got {shown(values)}")
    hints = get_type_hints(kind)
    result: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        where = join(name, field.name)
        value = values.get(field.name, default_of(field))
        if value is dataclasses.MISSING:
            continue
        if CLASSES not in field.metadata:
            result[field.name] = _plain(hints[field.name], value, where)
        elif get_origin(hints[field.name]) is not dict:
            result[field.name] = _plain_object(field, value, where)
        else:
            objects = value.read(where) if isinstance(value, RawArgument) else value
            if not isinstance(objects, Mapping):
                raise UserError(f"{where}: expected a mapping, got {shown(objects)}")
            result[field.name] = {
                str(key): _plain_object(field, entry, join(where, str(key))) for key, entry in objects.items()
            }
    return result | {str(key): value for key, value in values.items() if key not in result}


def _plain(hint: Any, value: Any, name: str) -> Any:
    """Return a value as the plain data that pydantic reads its type from.

    A section may be null, a list of sections be given as texts, and a number as text, as YAML reads 1e-6.
    """
    if isinstance(value, RawArgument):
        value = _read_argument(hint, value, name)
    if is_section(hint):
        value = to_dict(value) if isinstance(value, hint) else {} if value is None else value
        return complete(hint, value, name) if isinstance(value, Mapping) else value
    members = members_of(hint)
    inner = next((get_args(member)[-1] for member in members if get_origin(member) in (list, dict)), Any)
    value = _spelled_out(inner, value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"{name}: expected names as keys, got {shown(key)}")
        return {key: _plain(inner, entry, join(name, key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, entry, f"{name}[{place}]") for place, entry in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    try:
        checked(value)
        return float(value) if float in members and isinstance(value, str) else value
    except ValueError as error:
        if isinstance(value, str) and float in members:
            return value
        raise UserError(f"{name}: {error}") from error


def _spelled_out(section: Any, value: Any) -> Any:
    """Return a list of sections of which some are texts, or a text alone, as a list of mappings (`shorthand`)."""
    shorthand = getattr(section, "shorthand", None)
    if shorthand is None or not isinstance(value, str | list | tuple):
        return value
    entries = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    return [{shorthand: entry} if isinstance(entry, str) else entry for entry in entries]


def _read_argument(hint: Any, text: RawArgument, name: str) -> Any:
    """Return a text of the command line as a value of the expected type."""
    members = members_of(hint)
    if text == "null" and types.NoneType in members:
        return None
    if str in members or any(get_origin(member) is Literal for member in members):
        try:
            value = read_yaml(text)
        except ValueError:
            value = None
        others = tuple(get_origin(member) or member for member in members if get_origin(member) is not Literal)
        return value if value is not None and isinstance(value, others) else str(text)
    value = text.read(name)
    entry = get_args(hint)[0] if get_origin(hint) is list else None
    if entry is None or is_section(entry) or not isinstance(value, str | int | float):
        return value
    if str not in members_of(entry):  # several with commas, one without brackets
        return [RawArgument(part.strip()) for part in text.split(",")]
    if "," in text:
        example = "a list, such as '[one, two]' or '[\"one, with a comma\"]'"
        raise UserError(f"{name}: expected {example}, got {shown(str(text))}")
    return [str(text)]


def _plain_object(field: dataclasses.Field, value: Any, name: str) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return _nested(_object_leaves(field, value, ()))
    value = {KEY: str(value)} if isinstance(value, str) else value
    if not isinstance(value, Mapping) or KEY not in value:
        raise UserError(f"{name}.{KEY}: expected the name of a class, package.module:Class or file.py:Class")
    kind, values, shared = _split(field, value, name)
    more = complete(shared_holder(field).section, shared, name) if shared else {}
    return {KEY: value[KEY], **complete(kind, values, name), **more}


def _split(field: dataclasses.Field, value: Values, name: str) -> tuple[type, dict[str, Any], dict[str, Any]]:
    """Return the class that a mapping names, its values, and those of the section beside it, if there is one."""
    kind = find_class(value[KEY], field.metadata[CLASSES], name)
    holder = shared_holder(field)
    names = {one.name for one in dataclasses.fields(kind)}
    beside = {one.name for one in dataclasses.fields(holder.section)} if holder else set()
    shared = {key: entry for key, entry in value.items() if key in beside - names}
    clash = sorted(beside & names)
    if shared and clash:
        raise UserError(
            f"{name}.{clash[0]}: expected no field of {kind.__name__}'s own of this name beside {next(iter(shared))}; "
            "give it another"
        )
    return kind, {key: entry for key, entry in value.items() if key not in shared and key != KEY}, shared


def build(kind: type[Section], values: Values, name: str = "") -> Section:
    """Make a dataclass of nested plain values; those that are such dataclasses already are taken as they are.

    `name` is used in errors, "" for a whole config. The UserError has a line for each unknown or missing field, each
    value of another type, and each one out of range.
    """
    values = complete(kind, values, name)

    def unknown(section: str, key: str, value: object, names: list[str]) -> str:
        return no_such_field(key, names, section) if name else _unknown(kind, values, join(section, key), value, names)

    return _make(kind, values, name, unknown)


def _make(kind: type[Section], values: Values, name: str, unknown: _UnknownField) -> Section:
    if not isinstance(values, Mapping):
        raise UserError(f"{name}: expected a mapping of fields, got {shown(values)}")
    hints = get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    mistakes = [unknown(name, key, value, [*fields]) for key, value in values.items() if key not in fields]
    misspelt = {line.rpartition("did you mean ")[2] for line in mistakes}
    arguments = {}
    for key, field in fields.items():
        where = join(name, key)
        if key not in values:
            if f"{where}?" not in misspelt:
                mistakes.append(f"{where}: expected a value, it has no default")
            continue
        try:
            arguments[key] = _value(field, hints[key], values[key], where, unknown)
        except UserError as error:
            mistakes += error.args
    if mistakes:
        raise UserError(*mistakes)
    try:
        return kind(**arguments)
    except ValueError as error:  # of a user's own section
        raise UserError(f"{name}: {error}" if name else str(error)) from error


def _value(field: dataclasses.Field, hint: Any, value: Any, name: str, unknown: _UnknownField) -> Any:
    if CLASSES in field.metadata and get_origin(hint) is dict:
        return {key: _object(field, entry, join(name, key)) for key, entry in value.items()}
    if CLASSES in field.metadata:
        return _object(field, value, name)
    if is_section(hint):
        return _make(hint, value, name, unknown)
    if get_origin(hint) is list and is_section(get_args(hint)[0]) and isinstance(value, list):
        entries = []
        mistakes: list[str] = []
        for place, entry in enumerate(value):
            try:
                entries.append(_make(get_args(hint)[0], entry, f"{name}[{place}]", unknown))
            except UserError as error:
                mistakes += error.args
        if mistakes:
            raise UserError(*mistakes)
        return entries
    return typed(hint, value, name)


def _object(field: dataclasses.Field, value: Values, name: str) -> Any:
    kind, values, shared = _split(field, value, name)
    holder = shared_holder(field)
    beside = [one.name for one in dataclasses.fields(holder.section)] if holder else []

    def unknown(section: str, key: str, _: object, names: list[str]) -> str:
        return no_such_field(key, names + beside if section == name else names, section)

    try:
        made = _make(kind, values, name, unknown)
        return holder(made, build(holder.section, shared, name), name) if shared else made
    except UserError as error:  # the class names its own fields; what it is called here it does not know
        raise UserError(*(line if line.startswith(name) else f"{name}.{line}" for line in error.args)) from error


def _unknown(kind: type, values: Values, name: str, value: object, siblings: list[str]) -> str:
    """Return the line about a field that does not exist in a whole config.

    It says where TRL's field of that name has its place, or which section has a field of that name.
    """
    classes = {field.name: values[field.name] for field in dataclasses.fields(kind) if CLASSES in field.metadata}
    names = [place.removesuffix(f".{KEY}") for place in flat(complete(kind, classes))]
    section, _, key = name.rpartition(".")
    path = [key]
    while isinstance(value, Mapping) and value:  # to the first field that is meant
        inner, value = next(iter(value.items()))
        path.append(str(inner))
    same = [place for place in names if place.rpartition(".")[2] == path[-1]]
    dotted = join(section, *path)
    for part in reversed(path):
        place = TRL.get(part)
        if place and (place.stands_in(names) if place.fields else not same):
            return f"{said(dotted)}: no such field; {place.hint}"
    if not section:
        return no_such_field(dotted, same or [*siblings, *names])
    if same and not difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.8):
        return no_such_field(dotted, same)
    return no_such_field(key, siblings, section)


def no_such_field(key: str, names: Iterable[str], section: str = "") -> str:
    """Return the line about a field that does not exist, with the nearest one that does."""
    names = [str(name) for name in names]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.55)
    hint = f"did you mean {join(section, near[0])}?" if near else f"there are: {listed(names)}"
    return f"{said(join(section, key))}: no such field; {hint}"


def require_known(key: str, names: Iterable[str], section: str = "") -> None:
    """Raise UserError for a field that does not exist; it names the nearest one that does."""
    if key not in names:
        raise UserError(no_such_field(key, names, section))


def listed(names: Iterable[str]) -> str:
    """Return names in their order, as many as fit in a line of an error."""
    text = ", ".join(sorted(names)) or "none"
    return text if len(text) <= _LIST_WIDTH else f"{text[:_LIST_WIDTH].rpartition(', ')[0]}, …"


def to_dict(config: Any) -> dict[str, Any]:
    """Return nested plain values of a dataclass, the inverse of `build`."""
    return _nested(_leaves(config))


def to_yaml(config: Any) -> str:
    """Return a dataclass as YAML that `--config` reads back."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def identity(config: Any) -> dict[str, Any]:
    """Return the fields that change what is learned, {"section.field": plain value}: those without `may_change`."""
    return {".".join(path): value for path, value in _leaves(config, lasting=True)}


def differences(saved: Mapping[str, Any], config: Any) -> list[str]:
    """Return the fields in which a config differs from a saved `identity`, each as "name: saved → now"."""
    now = identity(config)
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return [f"{name}: {saved.get(name)} → {now.get(name)}" for name in names]


_Leaves = Iterator[tuple[tuple[str, ...], Any]]


def _leaves(config: Any, path: tuple[str, ...] = (), *, lasting: bool = False) -> _Leaves:
    """Yield the path and the plain value of each field, of all sections; `lasting` leaves out `may_change` ones."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        here = (*path, field.name)
        if lasting and field.metadata.get(MAY_CHANGE):
            continue
        if CLASSES in field.metadata and isinstance(value, Mapping):
            if not value and not lasting:
                yield here, {}
            for key, entry in value.items():
                yield from _object_leaves(field, entry, (*here, key), lasting=lasting)
        elif CLASSES in field.metadata:
            yield from _object_leaves(field, value, here, lasting=lasting)
        elif dataclasses.is_dataclass(value):
            yield from _leaves(value, here, lasting=lasting)
        else:
            value = _dumped(value, lasting=lasting)
            whole = isinstance(value, int) and not isinstance(value, bool)
            yield here, float(value) if whole and float in members_of(hints[field.name]) else value


def _object_leaves(field: dataclasses.Field, value: Any, path: tuple[str, ...], *, lasting: bool = False) -> _Leaves:
    holder = shared_holder(field)
    parts = value.parts if holder and isinstance(value, holder) else (value,)
    yield (*path, KEY), class_name(type(parts[0]), field.metadata[CLASSES])
    for part in parts:
        yield from _leaves(part, path, lasting=lasting)


def _dumped(value: Any, *, lasting: bool) -> Any:
    if dataclasses.is_dataclass(value):
        return _nested(_leaves(value, lasting=lasting))
    if isinstance(value, Mapping):
        return {str(key): _dumped(entry, lasting=lasting) for key, entry in value.items()}
    return [_dumped(entry, lasting=lasting) for entry in value] if isinstance(value, list | tuple) else value


def _nested(leaves: _Leaves) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for path, value in leaves:
        inner = result
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return result


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values as {"section.field": value}."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        result |= flat(value, f"{dotted}.") if isinstance(value, Mapping) and value else {dotted: value}
    return result


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"section.field": value} as nested values."""
    return _nested((tuple(name.split(".")), value) for name, value in values.items())


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings: later ones win; lists are replaced whole."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            if isinstance(value, Mapping) and isinstance(below, Mapping):
                value = merged(below, value)
            result[key] = value
    return result
