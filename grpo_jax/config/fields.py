"""Frozen pydantic models of sections, tasks and judges, from and to nested plain values."""

from __future__ import annotations

import difflib
import functools
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeGuard, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, core_schema

from grpo_jax.config.files import Fields, QuotingDumper, Values, checked, read_yaml
from grpo_jax.config.named import FILE, load_module, without_numbers
from grpo_jax.config.other_names import REMOVED, hint_for
from grpo_jax.errors import FieldError, UserError, one_line, short_name, short_repr

KEY = "kind"
"""The key that names an object's class, beside its fields."""

COUNT, LENGTH, WIDTH = 2**31 - 1, 2**24, 2**20
"""Upper bounds of a number of steps, of tokens or rows, and of a matrix's width: typing errors are refused early."""
COEFFICIENT = 10**12
"""Upper bound of a weight: sums of its squares still fit into float32."""

Count = Annotated[int, Ge(0), Le(COUNT)]
PositiveCount = Annotated[int, Ge(1), Le(COUNT)]
Length = Annotated[int, Ge(1), Le(LENGTH)]
Coefficient = Annotated[float, Ge(0), Le(COEFFICIENT)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
OneOrMore = Annotated[float, Ge(1)]


class Argument(str):
    """A string of the command line, which pydantic parses by its field's type."""


def _yaml_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = {name: _yaml_value(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        value = [*map(_yaml_value, value)]
    if not isinstance(value, Argument):
        return checked(value)
    try:
        return read_yaml(value)
    except ValueError:  # a date, or a text with a colon
        return str(value)


Options = dict[str, Annotated[Any, BeforeValidator(_yaml_value)]]
"""Keyword arguments of undeclared types."""

Each = BeforeValidator(lambda one: [*filter(None, map(str.strip, one.split(",")))] if isinstance(one, str) else one)
"""Mark of a list that may be given as text, with commas between its entries."""
Words = Annotated[list[str], Each]
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""A list of texts, or a single one."""


def _leaf_types(hint: Any) -> set[Any]:
    """Return the types of a field's value, and of the entries of its list or mapping."""
    inner = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return {hint} if get_origin(hint) is Literal or not inner else set().union(*map(_leaf_types, inner))


class Section(BaseModel):
    """A section of a config, a task or a judge; the docstring of a field is its help.

    A subclass checks fields against each other in `__post_init__`, by `require`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )

    def __init__(self, **values: Any) -> None:
        """Make a section in Python; UserError with a line for each mistake."""
        try:
            self.__pydantic_validator__.validate_python(values, self_instance=self)
        except ValidationError as error:
            name = type(self).__name__
            raise UserError(*(f"{name}.{line}" for line in mistakes(type(self), values, error))) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic makes nested sections itself

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a boolean for a number, which pydantic and YAML (`on`, `yes`) take for 1."""
        types = _leaf_types(cls.model_fields[info.field_name or ""].annotation)
        entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
        if types & {int, float} and not types & {bool, Any} and any(isinstance(entry, bool) for entry in entries):
            raise ValueError(f"expected a number, got {short_repr(value)} (YAML reads yes and on as true)")
        return value

    def model_post_init(self, context: Any) -> None:
        """Check the fields against each other."""
        self.__post_init__()

    def __post_init__(self) -> None:
        pass

    def require(self, condition: object, name: str, expected: str) -> None:
        """Raise UserError naming a field, dotted in a nested section, unless `condition` holds."""
        require(condition, name, expected, functools.reduce(getattr, name.split("."), self))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values, with the same checks."""
        return type(self)(**{**dict(self), **changes})


def resume_mutable(default: Any = PydanticUndefined, **more: Any) -> Any:
    """Declare a field that a resumed run may change: memory, paths, intervals of saving, length of training.

    Every other field must equal that of the checkpoint's config (`identity`).
    """
    return Field(default, json_schema_extra={"resume_mutable": True}, **more)


def require(condition: object, name: str, expected: str, came: object) -> None:
    """Raise UserError naming the field, by its name in the checking section, unless `condition` holds."""
    if not condition:
        raise FieldError(f"{name}: expected {expected}, got {short_repr(came)}")


class KeyOf:
    """Annotation of a text that is one of `others` or a key of a module's table, imported when a section is made."""

    def __init__(self, module: str, table: str, *others: str):
        self.module, self.table, self.others = module, table, others

    @property
    def names(self) -> list[str]:
        """Return the possible texts."""
        return [*self.others, *getattr(importlib.import_module(self.module), self.table)]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Tell pydantic the possible texts."""
        return core_schema.literal_schema(self.names)


class OneOf:
    """Annotation of a value whose class the config names: a bare kind, or a mapping of `kind` and the class's fields.

    Args:
        what: Its name in `REMOVED`, "task" or "judges".
        places: Modules of the built-in kinds, with {} for the kind; each has one section with a `load`. Any other kind
            is package.module:Class or file.py:Class.
    """

    def __init__(self, what: str, *places: str):
        self.what, self.places = what, places

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Tell pydantic how to make and serialise the object."""
        write = core_schema.plain_serializer_function_ser_schema(self.plain)
        return core_schema.no_info_plain_validator_function(self.make, serialization=write)

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """Return the modules of the built-in kinds."""
        modules = {}
        for place in self.places:
            package, _, rest = place.partition(".{}")
            ending = f"{rest.replace('.', '/')}.py"
            for folder in map(Path, importlib.import_module(package).__path__):
                names = [str(path.relative_to(folder)).removesuffix(ending) for path in folder.glob(f"*{ending}")]
                modules |= {name: place.format(name) for name in names if name[0] != "_"}
        return dict(sorted(modules.items()))

    def make(self, value: Any) -> Section:
        """Make the object; pydantic adds the mistakes in its fields to the config's, with their paths."""
        if not isinstance(value, Section):
            fields = value if isinstance(value, Mapping) else {}
            value = self.class_of(value).model_validate({name: entry for name, entry in fields.items() if name != KEY})
        checked(value.model_dump())  # config.yaml keeps its fields
        return value

    def plain(self, value: Section) -> dict[str, Any]:
        """Return the inverse of `make`, with a kind that names the class from any working directory."""
        module = sys.modules[type(value).__module__]
        place = str(Path(module.__file__ or "").resolve()) if module.__name__.startswith(FILE) else module.__name__
        kinds = [kind for kind, name in self.kinds.items() if name == place]
        return {KEY: kinds[0] if kinds else f"{place}:{type(value).__qualname__}", **value.model_dump()}

    def class_of(self, value: Any) -> type[Section]:
        """Return the class named by a value; ValueError if there is none."""
        if isinstance(value, Section):
            return type(value)
        kind = value.get(KEY) if isinstance(value, Mapping) else value
        if not isinstance(kind, str):
            raise ValueError(f"expected a kind ({', '.join(self.kinds)}, file.py:Class), got {short_repr(value)}")
        place, _, name = kind.rpartition(":")
        if kind not in self.kinds and ":" not in kind:
            near = difflib.get_close_matches(kind, self.kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(self.kinds)}"
            left = REMOVED.get(f"{self.what}.kind.{kind}")
            hint = f"it {left}" if left else f"{hint} (your own: file.py:Class)"
            raise ValueError(f"no such kind, got {short_repr(str(kind))}; {hint}")
        try:
            module = load_module(place or self.kinds[name])
        except UserError as error:
            raise ValueError(str(error)) from error
        own = [one for one in vars(module).values() if _is_section(one) and one.__module__ == module.__name__]
        own = [one for one in own if hasattr(one, "load")]
        for one in own:
            if name == one.__name__ or not place:
                return one
        have = ", ".join(one.__name__ for one in own) or "none"
        raise ValueError(f"{place} has no task or judge called {name} (it has: {have})")


def _is_section(hint: object) -> TypeGuard[type[Section]]:
    return isinstance(hint, type) and issubclass(hint, Section)


class ConfigField(NamedTuple):
    """A field of a config: section ("" for the run), the section's class, name, pydantic's info, and value."""

    section: str
    about: type[Section]
    name: str
    info: FieldInfo
    value: Any

    @property
    def path(self) -> str:
        """Return the dotted name."""
        return f"{self.section}.{self.name}".lstrip(".")

    @property
    def marked(self) -> OneOf | None:
        """Return the annotation of a value, or of a dict's values, whose class the config names."""
        marks = [*self.info.metadata, *(mark for hint in get_args(self.info.annotation) for mark in get_args(hint)[1:])]
        return next((mark for mark in marks if isinstance(mark, OneOf)), None)

    @property
    def inner(self) -> type[Section] | None:
        """Return the nested section, perhaps in a list or optional."""
        hints = (self.info.annotation, *get_args(self.info.annotation))
        return next((hint for hint in hints if _is_section(hint)), None)

    @property
    def mutable(self) -> bool:
        """Return whether a resumed run may change the field."""
        return bool((self.info.json_schema_extra or {}).get("resume_mutable"))  # type: ignore[union-attr]


def walk(kind: type[Section], values: Any, section: str = "") -> Iterator[ConfigField]:
    """Yield all fields, including nested ones; for help and hints, `values` may be incomplete or wrong."""
    values = dict(values) if isinstance(values, Mapping | Section) else {}
    for name, info in kind.model_fields.items():
        value = values.get(name, None if info.is_required() else info.get_default(call_default_factory=True))
        field = ConfigField(section, kind, name, info, value)
        yield field
        if field.marked:
            entries = value if get_origin(info.annotation) is dict else {"": value}
            for key, entry in entries.items() if isinstance(entries, Mapping) else ():
                with suppress(ValueError, UserError):  # validation reports the mistake
                    yield from walk(field.marked.class_of(entry), entry, f"{field.path}.{key}".rstrip("."))
        elif field.inner:
            listed = get_origin(info.annotation) is list
            yield from walk(field.inner, value, f"{field.path}[]" if listed else field.path)


def mistakes(kind: type[Section], values: Values, error: ValidationError) -> list[str]:
    """Return a line for each mistake: the field, the expected value, the value."""
    names = [field.path for field in walk(kind, values)]
    lines: dict[str, str] = {}
    for mistake in error.errors(include_url=False):
        path = _place(mistake["loc"])
        nested = flat({path: mistake["input"]}) if mistake["type"] == "extra_forbidden" else {}
        theirs = {name: other for name in nested if name != path and (other := hint_for(name, names))}
        lines |= {name: f"{short_name(name)}: no such field; {other}" for name, other in theirs.items()}
        if not theirs:
            lines.setdefault(path, _line(path, mistake, names))  # the first of a union's members
    meant = {line.rpartition("did you mean ")[2].removesuffix("?") for line in lines.values()}
    return [line for path, line in lines.items() if not (path in meant and line.endswith(_NO_VALUE))]


def first_mistake(error: ValidationError) -> str:
    """Return the first mistake in values that no config names, in one line: the class, the field and the value."""
    mistake = error.errors(include_url=False)[0]
    place = _place((error.title, *mistake["loc"]))
    line = _line(place if mistake["loc"] else "", mistake, ())
    return line.removeprefix(": ").removesuffix("; there are: ")


_WORDS = {
    **{"greater than or equal to": "a number >=", "less than or equal to": "a number <="},
    **{"greater than": "a number >", "less than": "a number <", "valid dictionary": "mapping"},
    **{"valid integer": "whole number", "valid ": "", "a boolean": "true or false"},
}
"""Pydantic's words, and their replacements."""
_UNION_MEMBER = re.compile(r"str|int|(list|dict)\[.*|function-.*|json-.*|constrained-.*")
_NO_VALUE = ": expected a value, it has no default"


def _place(location: Sequence[str | int]) -> str:
    """Return a location as one name, without pydantic's union members."""
    parts = [part for part in location if isinstance(part, int) or not _UNION_MEMBER.fullmatch(part)]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def _line(path: str, mistake: Mapping[str, Any], names: Sequence[str]) -> str:
    raised = mistake.get("ctx", {}).get("error")
    if mistake["type"] == "extra_forbidden":
        return f"{short_name(path)}: no such field; {hint(path, names)}"
    if mistake["type"] == "missing":
        return f"{path}{_NO_VALUE}"
    if raised is not None:
        return f"{path}.{raised}".lstrip(".") if isinstance(raised, FieldError) else f"{path}: {raised}"
    expected = re.split(", unable|, got| or instance", mistake["msg"].replace("Input should be ", ""))[0]
    for theirs, ours in _WORDS.items():
        expected = expected.replace(theirs, ours)
    value = str(mistake["input"])
    near = difflib.get_close_matches(value, re.findall("'([^']*)'", expected))
    near.sort(key=lambda name: sorted(name) != sorted(value))  # first the one with two letters swapped
    meant = f" (did you mean {near[0]}?)" if near and mistake["type"] == "literal_error" else ""
    return f"{path}: expected {expected}{meant}, got {short_repr(mistake['input'])}"


def hint(path: str, names: Iterable[str]) -> str:
    """Return the hint after "no such field; ": the successor, the name here, or the nearest field."""
    names = [name.replace("[]", next(iter(re.findall(r"\[\d+]", path)), "[]")) for name in names]
    section, _, last = path.rpartition(".")
    removed = REMOVED.get(path) or REMOVED.get(re.sub(r"^judges\.\w+", "judges.NAME", path))
    if removed:
        return f"it {removed}"
    siblings = [name for name in names if name.rpartition(".")[0] == section]
    same = [name for name in names if name.rpartition(".")[2] == last]
    if other := hint_for(path, names, same):
        return other
    near = difflib.get_close_matches(path, siblings, n=1, cutoff=0.85) or same
    near = near or difflib.get_close_matches(path, names, n=1, cutoff=0.55)
    return f"did you mean {near[0]}?" if near else f"there are: {one_line(', '.join(siblings or names), 155)}"


def merged(below: Any, above: Any) -> Any:
    """Merge values: mappings by key, all else whole; another kind discards the old kind's fields."""
    if isinstance(above, str) and isinstance(below, Mapping) and KEY in below:
        above = {KEY: above}
    if isinstance(below, str) and isinstance(above, Mapping):
        below = {KEY: below}
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    if KEY in below and str(above.get(KEY, below[KEY])) != below[KEY]:
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


def build(kind: type[Section], values: Values) -> Any:
    """Make a section from nested values; UserError with a line for each mistake."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(*mistakes(kind, values, error)) from None


def to_yaml(config: Section) -> str:
    """Return a config as YAML that `--config` reads back."""
    return yaml.dump(config.model_dump(), Dumper=QuotingDumper, sort_keys=False, allow_unicode=True)


def flat(values: Values, prefix: str = "") -> Fields:
    """Return nested values as {"section.field": value}."""
    result: Fields = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        result |= flat(value, f"{dotted}.") if isinstance(value, Mapping) and value else {dotted: value}
    return result


def identity(config: Section) -> Fields:
    """Return the fields that change learning, {"section.field": plain value}: those not `resume_mutable`."""
    mutable = tuple(f"{field.path}." for field in walk(type(config), config) if field.mutable)
    return {name: value for name, value in flat(config.model_dump()).items() if not f"{name}.".startswith(mutable)}


def differences(saved: Values, config: Section) -> list[str]:
    """Return the differences of a config from a saved `identity`, each as "name: saved → now"."""
    now = identity(config)
    changed = [(name, saved.get(name), now.get(name)) for name in {**saved, **now}]
    changed = [one for one in changed if one[1] != one[2] and without_numbers(one[1]) != without_numbers(one[2])]
    return [f"{name}: {before} → {after}" for name, before, after in changed]
