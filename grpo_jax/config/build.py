"""Build frozen dataclasses from nested values, validated by pydantic, and the values from them.

Every section is a dataclass, a user's own task and judges too. `complete` brings the values of YAML, Python or the
command line into one shape; `build` lets pydantic validate it and reports every mistake with its path.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ValidationInfo
from pydantic_core import core_schema

from grpo_jax.config.fields import MAY_CHANGE, Path, UnknownField, default_of, is_section, join, members_of, typed
from grpo_jax.config.files import Fields, Values, checked, read_yaml
from grpo_jax.config.named import KEY, class_name, find_class, load_object
from grpo_jax.config.other_names import NOT_HERE, TRL, fields_of, hint_of
from grpo_jax.errors import FieldError, UserError, short_name, short_repr

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import GetCoreSchemaHandler

Section = TypeVar("Section", bound="DataclassInstance")

_LIST_WIDTH = 155  # characters of an error line


class RawArgument(str):
    """A value as the command line has it: text, which the type of its field says how to read."""

    def read(self, name: str) -> Any:
        """Return its value as YAML; UserError if it is none."""
        try:
            return read_yaml(self)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Named:
    """Annotation of a field, or of a dict's values, for an object whose class the config names: {"kind": …, field: …}.

    Args:
        places: Modules of the built-in ones, such as "package.scorers.{}" (`find_class`).
        shared: Import path of a class that holds such an object with a section, whose fields then stand beside the
            object's own: made as Holder(object, section, name), with `section` its dataclass and `parts` both
            objects.
    """

    places: tuple[str, ...]
    shared: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Let pydantic take the object that `make` has made, from the context, by its name."""

        def take(name: str, info: ValidationInfo[Values]) -> Any:
            if isinstance(info.context[name], UserError):
                raise info.context[name]
            return info.context[name]

        return core_schema.with_info_plain_validator_function(take)

    @property
    def holder(self) -> Any:
        """The class that holds an object with the shared section, or None."""
        return load_object(self.shared, "config") if self.shared else None

    @property
    def shared_names(self) -> list[str]:
        """Fields of the shared section."""
        return [field.name for field in dataclasses.fields(self.holder.section)] if self.shared else []

    def complete(self, value: Any, name: str) -> Fields:
        """Return the values of all fields of one object in one shape (`complete`)."""
        if dataclasses.is_dataclass(value):
            return nested(_object_leaves(self, value, ()))
        value = {KEY: str(value)} if isinstance(value, str) else value
        if not isinstance(value, Mapping) or KEY not in value:
            raise UserError(f"{name}.{KEY}: expected the name of a class, package.module:Class or file.py:Class")
        kind, own, shared = self._split(value, name)
        more = complete(self.holder.section, shared, name) if shared else {}
        return {KEY: value[KEY], **complete(kind, own, name), **more}

    def _split(self, value: Values, name: str) -> tuple[type, Fields, Fields]:
        """Return the class that a mapping names, its values, and those of the shared section."""
        kind = find_class(value[KEY], self.places, name)
        names = {field.name for field in dataclasses.fields(kind)}
        beside = set(self.shared_names)
        shared = {key: entry for key, entry in value.items() if key in beside - names}
        clash = sorted(beside & names)
        if shared and clash:
            raise UserError(
                f"{name}.{clash[0]}: expected no field of {kind.__name__}'s own of this name beside "
                f"{next(iter(shared))}; give it another"
            )
        return kind, {key: entry for key, entry in value.items() if key not in shared and key != KEY}, shared

    def make(self, value: Values, name: str) -> Any:
        """Return the object of complete values, or the error of them."""
        try:
            kind, own, shared = self._split(value, name)
            names = [field.name for field in dataclasses.fields(kind)] + self.shared_names

            def unknown(section: str, path: Path, _: object) -> str:
                return no_such_field(str(path[-1]), names if section == name else _siblings(kind, path), section)

            made = _validated(kind, own, name, unknown)
            return self.holder(made, _validated(self.holder.section, shared, name, unknown), name) if shared else made
        except UserError as error:  # the class names its own fields; what it is called here it does not know
            return FieldError(*(line if line.startswith(name) else f"{name}.{line}" for line in error.args))


def named_of(hint: object) -> Named | None:
    """Return the annotation of a field whose objects' classes the config names."""
    inner = get_args(hint)[-1] if get_origin(hint) is dict else hint
    return next((mark for mark in getattr(inner, "__metadata__", ()) if isinstance(mark, Named)), None)


def hinted_fields(kind: type) -> Iterator[tuple[dataclasses.Field, Any]]:
    """Yield the fields of a dataclass with their types, annotations included."""
    hints = get_type_hints(kind, include_extras=True)
    yield from ((field, hints[field.name]) for field in dataclasses.fields(kind))


def complete(kind: type, values: Values, name: str = "") -> Fields:
    """Return plain values of all fields of a dataclass in one shape: given ones, unknown ones and defaults."""
    if not isinstance(values, Mapping):
        raise UserError(f"{short_name(name)}: expected a mapping of fields, got {short_repr(values)}")
    result: Fields = {}
    for field, hint in hinted_fields(kind):
        value = values.get(field.name, default_of(field))
        if value is not dataclasses.MISSING:
            result[field.name] = _plain(hint, value, join(name, field.name))
    return result | {str(key): value for key, value in values.items() if key not in result}


def _plain(hint: object, value: Any, name: str) -> Any:
    """Return a value as the plain data that pydantic reads its type from.

    A section may be null, a list of sections be given as texts, and a number as text, as YAML reads 1e-6.
    """
    named = named_of(hint)
    if named and get_origin(hint) is not dict:
        return named.complete(value, name)
    if named:
        objects = value.read(name) if isinstance(value, RawArgument) else value
        if not isinstance(objects, Mapping):
            raise UserError(f"{name}: expected a mapping, got {short_repr(objects)}")
        return {str(key): named.complete(entry, join(name, str(key))) for key, entry in objects.items()}
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
                raise UserError(f"{name}: expected names as keys, got {short_repr(key)}")
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


def _read_argument(hint: object, text: RawArgument, name: str) -> Any:
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
        raise UserError(f"{name}: expected {example}, got {short_repr(str(text))}")
    return [str(text)]


def build(kind: type[Section], values: Values) -> Section:
    """Make a dataclass of nested plain values; those that are such dataclasses already are taken as they are.

    The UserError has a line for each unknown or missing field, each value of another type, and each one out of range.
    """
    values = complete(kind, values)

    def unknown(section: str, path: Path, value: object) -> str:
        return _unknown(kind, values, join(section, str(path[-1])), value, _siblings(kind, path))

    return _validated(kind, values, "", unknown)


def _validated(kind: type[Section], values: Values, name: str, unknown: UnknownField) -> Section:
    names, objects = _make_objects(kind, values, name)
    return typed(kind, {**values, **names}, name, unknown=unknown, context=objects)


def _siblings(kind: Any, path: Path) -> list[str]:
    """Return the fields of the section in which a path ends."""
    for part in path[:-1]:
        kind = get_args(kind)[0] if isinstance(part, int) else get_type_hints(kind)[part]
    return [field.name for field in dataclasses.fields(kind)]


def _make_objects(kind: type, values: Values, name: str) -> tuple[Fields, Fields]:
    """Return the names of the objects in a dataclass's fields, and the objects by their names."""
    names: Fields = {}
    objects: Fields = {}
    for field, hint in hinted_fields(kind):
        named = named_of(hint)
        if named is None or field.name not in values:
            continue
        where = join(name, field.name)
        value = values[field.name]
        names[field.name] = where if KEY in value else {key: join(where, key) for key in value}
        entries = {where: value} if KEY in value else {join(where, key): entry for key, entry in value.items()}
        objects |= {place: named.make(entry, place) for place, entry in entries.items()}
    return names, objects


def _unknown(kind: type, values: Values, name: str, value: object, siblings: list[str]) -> str:
    """Return the line about a field that does not exist in a whole config.

    It says where TRL's field of that name has its place, or which section has a field of that name.
    """
    classes = {field.name: values[field.name] for field, hint in hinted_fields(kind) if named_of(hint)}
    names = [place.removesuffix(f".{KEY}") for place in flat(complete(kind, classes))]
    section, _, key = name.rpartition(".")
    path = [key]
    while isinstance(value, Mapping) and value:  # to the first field that is meant
        inner, value = next(iter(value.items()))
        path.append(str(inner))
    same = [place for place in names if place.rpartition(".")[2] == path[-1]]
    dotted = join(section, *path)
    for part in reversed(path):
        fields = fields_of(TRL.get(part, NOT_HERE))
        stands = all(any(f"{name}.".startswith(f"{field}.") for name in names) for field in fields)
        if part in TRL and (stands if fields else not same):
            return f"{short_name(dotted)}: no such field; {hint_of(TRL[part])}"
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
    return f"{short_name(join(section, key))}: no such field; {hint}"


def require_known(key: str, names: Iterable[str], section: str = "") -> None:
    """Raise UserError for a field that does not exist; it names the nearest one that does."""
    if key not in names:
        raise UserError(no_such_field(key, names, section))


def listed(names: Iterable[str]) -> str:
    """Return names in their order, as many as fit in a line of an error."""
    text = ", ".join(sorted(names)) or "none"
    return text if len(text) <= _LIST_WIDTH else f"{text[:_LIST_WIDTH].rpartition(', ')[0]}, …"


def to_dict(config: Any) -> Fields:
    """Return nested plain values of a dataclass, the inverse of `build`."""
    return nested(_leaves(config))


def to_yaml(config: Any) -> str:
    """Return a dataclass as YAML that `--config` reads back."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def identity(config: Any) -> Fields:
    """Return the fields that change what is learned, {"section.field": plain value}: those without `may_change`."""
    return {".".join(path): value for path, value in _leaves(config, lasting=True)}


def differences(saved: Values, config: Any) -> list[str]:
    """Return the fields in which a config differs from a saved `identity`, each as "name: saved → now"."""
    now = identity(config)
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return [f"{name}: {saved.get(name)} → {now.get(name)}" for name in names]


_Leaves = Iterator[tuple[tuple[str, ...], Any]]


def _leaves(config: Any, path: tuple[str, ...] = (), *, lasting: bool = False) -> _Leaves:
    """Yield the path and the plain value of each field, of all sections; `lasting` leaves out `may_change` ones."""
    for field, hint in hinted_fields(type(config)):
        value = getattr(config, field.name)
        named = named_of(hint)
        here = (*path, field.name)
        if lasting and field.metadata.get(MAY_CHANGE):
            continue
        if named and isinstance(value, Mapping):
            if not value and not lasting:
                yield here, {}
            for key, entry in value.items():
                yield from _object_leaves(named, entry, (*here, key), lasting=lasting)
        elif named:
            yield from _object_leaves(named, value, here, lasting=lasting)
        elif dataclasses.is_dataclass(value):
            yield from _leaves(value, here, lasting=lasting)
        else:
            value = _dumped(value, lasting=lasting)
            whole = isinstance(value, int) and not isinstance(value, bool)
            yield here, float(value) if whole and float in members_of(hint) else value


def _object_leaves(named: Named, value: Any, path: tuple[str, ...], *, lasting: bool = False) -> _Leaves:
    holder = named.holder
    parts = value.parts if holder and isinstance(value, holder) else (value,)
    yield (*path, KEY), class_name(type(parts[0]), named.places)
    for part in parts:
        yield from _leaves(part, path, lasting=lasting)


def _dumped(value: Any, *, lasting: bool) -> Any:
    if dataclasses.is_dataclass(value):
        return nested(_leaves(value, lasting=lasting))
    if isinstance(value, Mapping):
        return {str(key): _dumped(entry, lasting=lasting) for key, entry in value.items()}
    return [_dumped(entry, lasting=lasting) for entry in value] if isinstance(value, list | tuple) else value


def nested(leaves: Iterable[tuple[Sequence[str], Any]]) -> Fields:
    """Return nested values from (path, value) pairs."""
    result: Fields = {}
    for path, value in leaves:
        inner = result
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return result


def flat(values: Values, prefix: str = "") -> Fields:
    """Return nested values as {"section.field": value}."""
    result: Fields = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        result |= flat(value, f"{dotted}.") if isinstance(value, Mapping) and value else {dotted: value}
    return result


def merged(*layers: Values) -> Fields:
    """Merge nested mappings: later ones win; lists are replaced whole."""
    result: Fields = {}
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            if isinstance(value, Mapping) and isinstance(below, Mapping):
                value = merged(below, value)
            result[key] = value
    return result
