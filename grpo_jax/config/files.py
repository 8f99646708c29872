"""Read whole files, and the YAML and JSON in them, within bounds of size and depth.

A path may lead to a device without an end, or to a damaged file. Each takes at most the memory of its bound, and the
error is one line with the path. YAML and JSON allow what no config or prompt means and later code cannot hold: a key
twice, texts that are not Unicode, numbers of a thousand digits, nesting without end, and in YAML ten lines that stand
for a billion entries.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_jax.errors import UserError, short_name, short_repr

if TYPE_CHECKING:
    import yaml

Value = TypeVar("Value")
Values = Mapping[str, Any]
"""Plain values by their names, nested: of a config, a row of metrics, a summary."""
Fields = dict[str, Any]
"""The same, to be changed."""
MOST_BYTES = 2**28
"""Limit of a file that is read whole, by default."""
DEEPEST = 32
"""Levels of nesting of what users write; it is walked by functions that call themselves."""
LONGEST = 2**20
"""Characters of a YAML text: a config, not data."""
_DEEPEST_WRITTEN = 100  # levels of JSON that a program wrote
_MOST_ENTRIES = 100_000  # that a YAML text stands for
_PART = 2**20  # bytes read at once
_DIGITS = 400  # of a number: a float's 309 among them
_JSON_TYPES = {dict: "object", list: "list"}


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file of at most `most` bytes, or of a pipe or a device (`/dev/stdin`, `<(command)`).

    Raises:
        OSError: The system refuses it.
        ValueError: It is longer, or no path at all.
    """
    with open(path, "rb") as file:
        parts = iter(functools.partial(file.read, _PART), b"")
        content = b"".join(itertools.islice(parts, most // _PART + 1))
    if len(content) > most:
        raise ValueError(f"it holds more than {most:,} bytes")
    return content


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Return a file as text, without a byte order mark; UserError if that fails (`read_bytes`) or it is not UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{short_name(path, 200)}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{short_name(path, 200)}: not UTF-8 text; save it as UTF-8") from error
    except ValueError as error:
        raise UserError(f"{short_name(path, 200)}: cannot be read ({error})") from error


def load_json(path: str | Path, kind: type[Value] = dict) -> Value:  # type: ignore[assignment]
    """Return the value in a JSON file that a program wrote; UserError if it is damaged or of another kind."""
    text = read_text(path)
    try:
        return parse_json(text, kind)
    except ValueError as error:
        raise UserError(
            f"{short_name(path, 200)}: cannot be read ({error}); copy it again from where it came, or make it anew"
        ) from error


def parse_json(text: str | bytes, kind: type[Value] = dict) -> Value:  # type: ignore[assignment]
    """Return the value of a JSON text that a program wrote, like `json.loads`; errors are one-line ValueErrors."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(_DEEPEST_WRITTEN) from None
    except ValueError as error:
        raise ValueError(f"not JSON ({str(error).partition(';')[0]})") from error
    _require_depth(value, _DEEPEST_WRITTEN)
    if not isinstance(value, kind):
        raise ValueError(f"expected a JSON {_JSON_TYPES.get(kind, kind.__name__)}, got {short_repr(value)}")
    return value


def _require_depth(value: object, most: int, depth: int = 0) -> None:
    if depth > most:
        raise _too_deep(most)
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_depth(entry, most, depth + 1)


def _too_deep(most: int) -> ValueError:
    return ValueError(f"nested deeper than {most} levels")


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text: plain data that can be written again; else a ValueError of one line."""
    import yaml

    if len(text) > LONGEST:
        raise ValueError(f"expected a config, got {len(text):,} characters")
    try:
        value = _yaml_loader()(text).get_single_data()
        entries = _entries(value, {})
    except RecursionError:
        raise _too_deep(DEEPEST) from None
    except Exception as error:  # YAML's own constructors fail in many ways at numbers and dates that are none
        reason = str(error).partition(";")[0] if not isinstance(error, yaml.YAMLError) else str(error)
        raise ValueError(f"not valid YAML: {' '.join(reason.split())[:160]}") from error
    if entries > _MOST_ENTRIES:
        raise ValueError(f"it stands for more than {_MOST_ENTRIES:,} entries")
    return checked(value)


@functools.cache
def _yaml_loader() -> type[yaml.SafeLoader]:
    """Return a safe loader that refuses a key twice in one mapping."""
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    line = key.start_mark.line + 1
                    raise yaml.YAMLError(f"line {line}: {short_repr(key.value)} stands twice in one section")
                seen.add((key.tag, str(key.value)))
            return super().construct_mapping(node, deep)

    return UniqueKeyLoader


def _entries(value: object, sizes: dict[int, int]) -> int:
    """Return how many entries a value stands for, references written out."""
    if isinstance(value, dict | list) and id(value) not in sizes:
        children = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_entries(child, sizes) for child in children)
    return sizes.get(id(value), 1)


def read_json(text: str, *, whole: int | None = 2**63) -> Any:
    """Return the value of a JSON text: plain data that can be written again; else a ValueError of one line."""
    if text.startswith("\ufeff"):
        raise ValueError("not JSON (Unexpected UTF-8 BOM)")
    try:
        return checked(_decoder().decode(text), whole=whole)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError:
        raise _too_deep(DEEPEST) from None


@functools.cache
def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole, parse_float=_finite, parse_constant=_constant)


def _object(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{short_repr(key)} stands twice in one object")
        values[key] = value
    return values


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{short_repr(digits)} is too large a number")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def checked(value: Any, *, whole: int | None = 2**63, depth: int = 0) -> Any:
    """Return plain data if all in it can be written again, at `depth` levels inside other data.

    Raises:
        ValueError: A text is not Unicode or holds NUL, a number is too large (`whole` bounds the size of integers,
            None does not), or it is nested too deeply.
    """
    if depth > DEEPEST:
        raise _too_deep(DEEPEST)
    if isinstance(value, str):
        require_text(value)
    elif isinstance(value, int) and whole is not None and not -whole <= value < whole:
        raise ValueError(f"{short_repr(value)} is a whole number beyond 64 bits")
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            checked(key, whole=whole, depth=depth + 1)
            checked(entry, whole=whole, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            checked(entry, whole=whole, depth=depth + 1)
    elif not isinstance(value, int | float | None):
        raise ValueError(f"{short_repr(value)} is read as a {type(value).__name__}: put it in quotes for text")
    return value


def require_text(text: str) -> None:
    """Raise ValueError for text with NUL or half a character, which no file, path or tokenizer takes."""
    if "\0" in text:
        raise ValueError(f"{short_repr(text)} holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{short_repr(text)} holds half a character (a lone surrogate): it is not Unicode text"
        ) from None
