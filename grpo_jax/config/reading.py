"""YAML and JSON as users write them, read within bounds: what is read is plain data that can be written again.

Both formats allow what no config or prompt means and later code cannot hold: a key twice, texts that are not Unicode,
numbers of a thousand digits, nesting without end, and in YAML ten lines that stand for a billion entries.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_jax.errors import shown

DEEPEST = 32
"""Levels of nesting; what is read is walked by functions that call themselves."""
LONGEST = 2**20
"""Characters of a YAML text: a config, not data."""
_MOST_ENTRIES = 100_000  # that a YAML text stands for
_DIGITS = 400  # of a number: a float's 309 among them


def read_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: Says in one line why it is none, or none that can be used.
    """
    import yaml

    if len(text) > LONGEST:
        raise ValueError(f"expected a config, got {len(text):,} characters")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, {})
        return checked(_constructed(loader, node))
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())[:160]}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def read_json(text: str, *, whole: int | None = 2**63) -> Any:
    """The value of a JSON text.

    Args:
        text: One value.
        whole: As `checked` has it.

    Raises:
        ValueError: Says in one line why it is none, or none that can be used.
    """
    if text.startswith("\ufeff"):
        raise ValueError("not JSON (Unexpected UTF-8 BOM)")
    try:
        return checked(_decoder().decode(text), whole=whole)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def checked(value: Any, *, whole: int | None = 2**63, depth: int = 0) -> Any:
    """The value, where all in it can be written again.

    Args:
        value: Plain data.
        whole: Whole numbers are below this in size, by default those of 64 bits; None for any.
        depth: Levels above it.

    Raises:
        ValueError: A text is not Unicode or holds NUL, a number is too large, or it is nested too deeply.
    """
    if depth > DEEPEST:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, str):
        require_text(value)
    elif isinstance(value, int) and whole is not None and not -whole <= value < whole:
        raise ValueError(f"{shown(value)} is a whole number beyond 64 bits")
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            checked(key, whole=whole, depth=depth + 1)
            checked(entry, whole=whole, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            checked(entry, whole=whole, depth=depth + 1)
    elif not isinstance(value, int | float | None):
        raise ValueError(f"{shown(value)} is read as a {type(value).__name__}: put it in quotes for text")
    return value


def require_text(text: str) -> None:
    """Raises ValueError for text with NUL or half a character, which no file, path or tokenizer takes."""
    if "\0" in text:
        raise ValueError(f"{shown(text)} holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(text)} holds half a character (a lone surrogate): it is not Unicode text") from None


_TOO_DEEP = f"it is nested deeper than {DEEPEST} levels"


@functools.cache
def _decoder() -> json.JSONDecoder:
    hooks: dict[str, Any] = {"parse_int": _whole, "parse_float": _finite, "parse_constant": _constant}
    return json.JSONDecoder(object_pairs_hook=_object, **hooks)


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{shown(key)} stands twice in one object")
        values[key] = value
    return values


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{shown(digits)} is too large a number")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _check_nodes(node: Any, known: dict[int, float], depth: int = 0) -> float:
    """The entries that a YAML node stands for, references written out; raises ValueError where it is not usable."""
    import yaml

    if id(node) in known:
        if math.isnan(known[id(node)]):
            raise ValueError(f"&reference of line {node.start_mark.line + 1} holds itself")
        return known[id(node)]
    if depth > DEEPEST:
        raise ValueError(_TOO_DEEP)
    known[id(node)] = math.nan  # until its size is known: whoever meets it now is inside it
    size = 1.0
    if isinstance(node, yaml.MappingNode):
        _refuse_twice(node)
        size += sum(_check_nodes(part, known, depth + 1) for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_check_nodes(part, known, depth + 1) for part in node.value)
    if size > _MOST_ENTRIES:
        raise ValueError(f"line {node.start_mark.line + 1} stands for more than {_MOST_ENTRIES:,} entries")
    known[id(node)] = size
    return size


def _constructed(loader: Any, node: Any) -> Any:
    """A node's value; YAML's own constructors fail in many ways at numbers and dates that are none."""
    import yaml

    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError):
        raise
    except Exception as error:
        reason = str(error).partition(";")[0]  # Python's advice on its own limits helps nobody here
        raise ValueError(f"not valid YAML: {' '.join(reason.split())[:160]}") from error


def _refuse_twice(node: Any) -> None:
    seen = set()
    for key, _ in node.value:
        if isinstance(key.value, str) and (key.tag, key.value) in seen:
            line = key.start_mark.line + 1
            raise ValueError(f"line {line}: {shown(key.value)} stands twice in one section")
        seen.add((key.tag, key.value if isinstance(key.value, str) else id(key)))
