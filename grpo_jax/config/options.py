"""The fields of a config in their sections, each with its type, value and help line.

`--help`, the shell's completion and the suggestions for mistyped names are made of them.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, Union, get_args, get_origin, get_type_hints

from grpo_jax.config.fields import CLASSES
from grpo_jax.config.named import KEY, built_in_names, find_class, shared_holder

RUN = "run"
"""Section of the fields that stand in none."""


class Option(NamedTuple):
    """A field.

    Attributes:
        name: Dotted, as `--NAME` has it; of an entry in a list "rewards[].weight".
        hint: Its type.
        value: In force; `dataclasses.MISSING` where one must be given.
        line: Its help.
        names: Where it names a class, those that ship with the package.
    """

    name: str
    hint: Any
    value: Any
    line: str
    names: tuple[str, ...] = ()

    @property
    def is_argument(self) -> bool:
        """Whether it can be given by itself; an entry's fields are given within the entry."""
        return "[]" not in self.name


class Section(NamedTuple):
    """The fields that stand together.

    Attributes:
        name: "sampling", "policy.lora", "judges.NAME".
        about: What it is, in a sentence.
        options: Its own fields; sections inside are sections of their own.
    """

    name: str
    about: str
    options: tuple[Option, ...]


def sections_of(kind: type, values: Mapping[str, Any], name: str = "") -> list[Section]:
    """Return all sections of a config: those of the run, of the task and judges in use, and what all tasks share.

    Args:
        kind: A config's class.
        values: Plain values of its fields (`build.complete`).
        name: Where it stands in a larger config.
    """
    return [section for section in _sections(kind, values, name, "The run as a whole.") if section.options]


def _sections(
    kind: type, values: Mapping[str, Any], name: str, about: str, first: Sequence[Option] = ()
) -> list[Section]:
    options, named, below = list(first), [], []
    hints, lines = get_type_hints(kind), help_lines(kind)
    for field in dataclasses.fields(kind):
        hint, line = hints[field.name], lines.get(field.name, "")
        dotted = join(name, field.name)
        value = values.get(field.name, default_of(field))
        if CLASSES in field.metadata:
            for where, entry in (
                [(dotted, value)] if KEY in value else [(join(dotted, key), value[key]) for key in value]
            ):
                places = field.metadata[CLASSES]
                option = Option(where, str, entry[KEY], line, tuple(built_in_names(places)))
                named_kind = find_class(entry[KEY], places, where)
                whole, *inner = _sections(named_kind, entry, where, named_kind.__doc__ or "", [option])
                holder = shared_holder(field)
                shared = _sections(holder.section, entry, where, "")[0].options if holder else ()
                named += [whole._replace(options=(*whole.options, *shared)), *inner]
        elif is_section(hint):
            below += _sections(hint, value, dotted, line)
        elif get_origin(hint) is list and is_section(get_args(hint)[0]):
            below += _sections(get_args(hint)[0], {}, f"{dotted}[]", line, [Option(dotted, hint, value, line)])
        else:
            options.append(Option(dotted, hint, value, line))
    return [Section(name.removesuffix("[]") or RUN, first_sentence(about), tuple(options)), *named, *below]


def help_lines(kind: type) -> dict[str, str]:
    """Return the help line of each field, from the docstring of its class."""
    from docstring_parser import parse

    return {param.arg_name: " ".join((param.description or "").split()) for param in parse(kind.__doc__ or "").params}


def first_sentence(text: str) -> str:
    """Return the first sentence of a text's first paragraph."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z\"`])", paragraph, maxsplit=1)[0]


def clause(line: str) -> str:
    """Return what a field or section is, without what is said beside it."""
    return re.split("[;:] ", first_sentence(line))[0].rstrip(".")


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the values that a type can have, where they can be listed."""
    choices: list[str] = []
    for member in sorted(members_of(hint), key=lambda member: member is types.NoneType):
        if member is types.NoneType:
            choices.append("null")
        elif member is bool:
            choices += ["true", "false"]
        elif get_origin(member) is Literal:
            choices += map(str, get_args(member))
        else:
            return ()
    return tuple(choices)


_WORDS = {int: "INT", float: "NUMBER", str: "TEXT", types.NoneType: "null"}


def type_word(hint: Any) -> str:
    """Return a type as help spells it: INT, TEXT|null, constant|linear|cosine, [TEXT, …]."""
    members = members_of(hint)
    if len(members) > 1:
        return "|".join(map(type_word, members))
    if get_origin(members[0]) is list:
        return f"[{type_word(get_args(members[0])[0])}, …]"
    if get_origin(members[0]) is dict:
        return f"{{NAME: {type_word(get_args(members[0])[1])}, …}}"
    if is_section(members[0]):
        return "{…}"
    return "|".join(choices_of(members[0])) or _WORDS.get(members[0], "VALUE")


def join(*parts: str) -> str:
    """Return names as one dotted name; empty ones are left out."""
    return ".".join(part for part in parts if part)


def is_section(hint: Any) -> TypeGuard[type]:
    """Whether the type of a field is a dataclass."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, of another type itself, without what is annotated to them."""
    if get_origin(hint) is Annotated:
        return members_of(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for inner in get_args(hint) for member in members_of(inner))
    return (hint,)


def default_of(field: dataclasses.Field) -> Any:
    """Return a field's default; `dataclasses.MISSING` where a value must be given."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
