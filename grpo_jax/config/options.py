"""The options that a config has, in sections, each with its type, the value in force and its help line.

What `--help` prints and what a shell completes are both read off here.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from grpo_jax.config.beside import beside_of
from grpo_jax.config.build import is_section, join
from grpo_jax.config.fields import CLASSES
from grpo_jax.config.named import KEY, built_in_names, find_class

RUN = "run"
"""What the fields that stand in no section are listed under."""


class Option(NamedTuple):
    """A field.

    Attributes:
        name: With its section, as `--NAME` or a file has it; of an entry in a list "rewards[].weight".
        hint: Its type.
        value: The one in force; `dataclasses.MISSING` where one must be given.
        line: What its class says of it.
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


def sections_of(kind: type, values: Mapping[str, Any]) -> list[Section]:
    """All sections of a config: those of the run, of the task and the judges in use, and what all tasks share.

    Args:
        kind: A config's class.
        values: Plain values of all its fields (`build.complete`).
    """
    return [section for section in _sections(kind, values, "", "The run as a whole.") if section.options]


def _sections(
    kind: type, values: Mapping[str, Any], name: str, about: str, first: Sequence[Option] = ()
) -> list[Section]:
    own, named, below = list(first), [], []
    hints, lines = get_type_hints(kind), help_lines(kind)
    for field in dataclasses.fields(kind):
        hint, line = hints[field.name], lines.get(field.name, "")
        value, dotted = values.get(field.name, _default(field)), join(name, field.name)
        if CLASSES in field.metadata:
            for where, entry in _entries(dotted, value):
                places = field.metadata[CLASSES]
                option = Option(where, str, entry[KEY], line, tuple(built_in_names(places)))
                found = find_class(entry[KEY], places, where)
                whole, *inner = _sections(found, entry, where, found.__doc__ or "", [option])
                named += [whole._replace(options=(*whole.options, *_beside(field, where, entry))), *inner]
        elif is_section(hint):
            below += _sections(hint, value, dotted, line)
        elif get_origin(hint) is list and is_section(get_args(hint)[0]):
            below += _sections(get_args(hint)[0], {}, f"{dotted}[]", line, [Option(dotted, hint, value, line)])
        else:
            own.append(Option(dotted, hint, value, line))
    return [Section(name.removesuffix("[]") or RUN, first_sentence(about), tuple(own)), *named, *below]


def _beside(field: dataclasses.Field, name: str, values: Mapping[str, Any]) -> list[Option]:
    """What may stand beside the fields of an object of any class."""
    shared = beside_of(field.metadata)
    if shared is None:
        return []
    hints, lines = get_type_hints(shared.section), help_lines(shared.section)
    return [
        Option(join(name, key), hints[key], values.get(key, _default(one)), lines.get(key, ""))
        for key, one in shared.fields.items()
    ]


def _entries(name: str, value: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The objects of a field whose class is named, each with its place: one, or those of a mapping."""
    return [(name, value)] if KEY in value else [(join(name, key), entry) for key, entry in value.items()]


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def help_lines(kind: type) -> dict[str, str]:
    """The help line of each field, from the docstring of its class."""
    from docstring_parser import parse as parse_docstring

    return {
        param.arg_name: " ".join((param.description or "").split())
        for param in parse_docstring(kind.__doc__ or "").params
    }


def first_sentence(text: str) -> str:
    """The first sentence of a text's first paragraph."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z\"`])", paragraph, maxsplit=1)[0]


def clause(line: str) -> str:
    """What a field or section is, without what is said beside it."""
    return re.split("[;:] ", first_sentence(line))[0].rstrip(".")


def choices_of(hint: Any) -> tuple[str, ...]:
    """The values that a type can have, where they can be listed."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is bool:
        return ("true", "false")
    if origin is Literal:
        return tuple(map(str, inner))
    if origin in (Union, types.UnionType):
        found = [choices_of(one) for one in inner if one is not type(None)]
        return (*(word for words in found for word in words), "null") if all(found) else ()
    return ()


_WORDS = {int: "INT", float: "NUMBER", str: "TEXT", type(None): "null", Any: "VALUE"}


def type_word(hint: Any) -> str:
    """A type as help spells it: INT, TEXT|null, constant|linear|cosine, [TEXT, …]."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is list:
        return f"[{type_word(inner[0])}, …]"
    if origin is dict:
        return f"{{NAME: {type_word(inner[1])}, …}}"
    if origin in (Union, types.UnionType):
        return "|".join(map(type_word, inner))
    if is_section(hint):
        return "{…}"
    return "|".join(choices_of(hint)) or _WORDS.get(hint, "VALUE")
