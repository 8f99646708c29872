"""Read whole files, and YAML and JSON in them, with limits of size and depth.

A path may be an endless device or a damaged file. YAML and JSON allow inputs that no config or prompt needs: duplicate
keys, strings that are not Unicode, numbers of a thousand digits, endless nesting. Ten lines of YAML may expand to a
billion entries. Each error is one line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from grpo_jax.errors import UserError, short_name, short_repr

Value = TypeVar("Value")
Values = Mapping[str, Any]
"""Plain values by their names, nested: of a config, a row of metrics, a summary."""
Fields = dict[str, Any]
"""The same, to be changed."""
MOST_BYTES = 2**28
"""Limit of a file that is read whole, by default."""
DEEPEST = 32
"""Levels of nesting in users' files."""
LONGEST = 2**20
"""Characters of a YAML text: a config, not data."""
_MOST_ENTRIES = 100_000  # maximum entries of expanded YAML
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_JSON_TYPES = {dict: "object", list: "list"}


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file of at most `most` bytes, or of a pipe or a device (`/dev/stdin`, `<(command)`).

    Raises:
        OSError: The OS refuses to read it.
        ValueError: It is longer, or not a valid path.
    """
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it holds more than {most:,} bytes")
    return content


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Return a file as text, without a byte order mark; UserError if that fails (`read_bytes`) or it is not UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = f"cannot be read ({error.strerror if isinstance(error, OSError) else error})"
        reason = "not UTF-8 text; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else reason
        raise UserError(f"{short_name(path, 200)}: {reason}") from error


def load_json(path: str | Path, kind: type[Value] = dict) -> Value:  # type: ignore[assignment]
    """Load a JSON file that a program wrote; UserError if it is damaged or holds another type."""
    try:
        return parse_json(read_text(path), kind)
    except ValueError as error:
        raise UserError(f"{short_name(path, 200)}: cannot be read ({error}); copy or make it again") from error


def parse_json(text: str | bytes, kind: type[Value] = dict, **hooks: Any) -> Value:  # type: ignore[assignment]
    """Parse JSON that a program wrote, like `json.loads`; errors are one-line ValueErrors."""
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({str(error).partition(';')[0]})") from error
    if not isinstance(value, kind):
        raise ValueError(f"expected a JSON {_JSON_TYPES.get(kind, kind.__name__)}, got {short_repr(value)}")
    return value


def read_json(text: str, *, whole: int | None = 2**63) -> Any:
    """Parse JSON that a user wrote to `checked` data; errors are one-line ValueErrors."""
    hooks = {"object_pairs_hook": _object, "parse_float": _finite, "parse_constant": _finite}
    return checked(parse_json(text, object, **hooks), whole=whole)


def _object(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{short_repr(key)} occurs twice in one object")
        values[key] = value
    return values


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{short_repr(digits)} is no finite number")
    return value


class _UniqueKeyLoader(yaml.SafeLoader):
    """Loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: {short_repr(key.value)} occurs twice in one section")
            seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float | str:
        """Leave 1:30 and 010 as text, which YAML 1.1 reads as 90 and 8."""
        if ":" in node.value or re.fullmatch(r"[-+]?0\d+", node.value):
            return node.value
        return self.construct_yaml_int(node) if node.tag.endswith("int") else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _UniqueKeyLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _UniqueKeyLoader.construct_number)


class QuotingDumper(yaml.SafeDumper):
    """Dumper that quotes texts that `read_yaml` would read as numbers."""


for _class in (_UniqueKeyLoader, QuotingDumper):  # YAML 1.1 takes 1e-5 for text, YAML 1.2 and JSON for a number
    _class.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), [*"-+0123456789"])


def read_yaml(text: str) -> Any:
    """Parse YAML to plain data that can be written again; errors are one-line ValueErrors."""
    try:
        value = _UniqueKeyLoader(text).get_single_data()
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    except Exception as error:  # YAML's constructors raise many types for malformed numbers and dates
        reason = str(error).partition(";")[0] if not isinstance(error, yaml.YAMLError) else str(error)
        raise ValueError(f"not valid YAML: {' '.join(reason.split())[:160]}") from error
    return checked(value, most=_MOST_ENTRIES)


def checked(value: Any, *, whole: int | None = 2**63, most: float = math.inf) -> Any:
    """Return plain data if all of it can be written again.

    Raises:
        ValueError: A string is not Unicode or contains NUL; an integer exceeds `whole` (if given); the nesting is too
            deep; there are more than `most` entries.
    """
    pending, count = [(value, 0)], 0
    while pending:
        (entry, depth), count = pending.pop(), count + 1
        wrong = f"nested deeper than {DEEPEST} levels" if depth > DEEPEST else ""
        if count > most:
            wrong = wrong or f"it stands for more than {most:,} entries"
        elif type(entry) is str:
            require_text(entry)
        elif isinstance(entry, Mapping):
            pending += [(one, depth + 1) for pair in entry.items() for one in pair]
        elif isinstance(entry, list | tuple):
            pending += [(one, depth + 1) for one in entry]
        elif type(entry) not in (bool, int, float, type(None)):
            wrong = f"{short_repr(entry)} is a {type(entry).__name__}: write a number or a list, or a text in quotes"
        elif isinstance(entry, int) and whole is not None and not -whole <= entry < whole:
            wrong = f"{short_repr(entry)} is a whole number beyond 64 bits"
        if wrong:
            raise ValueError(wrong)
    return value


def require_text(text: str) -> None:
    """Raise ValueError for a string with NUL or a lone surrogate, which files, paths and tokenizers refuse."""
    if found := _NO_TEXT.search(text):
        held = "a NUL character" if found[0] == "\0" else "half a character: it is not Unicode text"
        raise ValueError(f"{short_repr(text)} holds {held}")
