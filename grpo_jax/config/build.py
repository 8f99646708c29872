"""Make configs of nested plain values, with every mistake in a line of its own, and the values of configs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from grpo_jax.config.fields import KEY, Section, walk
from grpo_jax.config.files import Fields, Values
from grpo_jax.config.other_names import hint_for
from grpo_jax.config.removed import REMOVED
from grpo_jax.errors import FieldError, UserError, short_name, short_repr

AnySection = TypeVar("AnySection", bound=Section)
_LIST_WIDTH = 155  # characters of an error line


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


def mistakes(kind: type[Section], values: Values, error: ValidationError) -> list[str]:
    """Return a line for each mistake: the field, the expected value, the value."""
    names = [field.path for field in walk(kind, values)]
    lines: dict[str, str] = {}
    for mistake in error.errors(include_url=False):
        path = _place(mistake["loc"], values)
        lines.setdefault(path, _line(path, mistake, names))  # of a union's members the first
    meant = {line.rpartition("did you mean ")[2].removesuffix("?") for line in lines.values()}
    return [line for path, line in lines.items() if not (path in meant and line.endswith(_NO_VALUE))]


_WORDS = {
    **{"greater than or equal to": "a number >=", "less than or equal to": "a number <="},
    **{"greater than": "a number >", "less than": "a number <", "valid dictionary": "mapping"},
    **{"valid integer": "whole number", "valid ": "", "a boolean": "true or false"},
}
"""Pydantic's words, and ours."""
_NO_VALUE = ": expected a value, it has no default"


def _place(location: Sequence[str | int], values: Any) -> str:
    """Return a location as one name, without the members of unions that pydantic puts into it."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name, values = f"{name}[{part}]", values[part]
        elif isinstance(values, Mapping) and (part in values or part == location[-1]):
            name, values = f"{name}.{part}".lstrip("."), values.get(part)
    return name


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
    near = difflib.get_close_matches(str(mistake["input"]), re.findall("'([^']*)'", expected), n=1)
    meant = f" (did you mean {near[0]}?)" if near and mistake["type"] == "literal_error" else ""
    return f"{path}: expected {expected}{meant}, got {short_repr(mistake['input'])}"


def hint(path: str, names: Iterable[str]) -> str:
    """Return the text after "no such field; ": its successor, its name here, or the nearest field."""
    names = [name.replace("[]", next(iter(re.findall(r"\[\d+]", path)), "[]")) for name in names]
    section, _, last = path.rpartition(".")
    removed = REMOVED.get(path) or REMOVED.get(re.sub(r"^judges\.\w+", "judges.NAME", path))
    if removed:
        return f"it {removed}"
    siblings = [name for name in names if name.rpartition(".")[0] == section]
    same = [name for name in names if name.rpartition(".")[2] == last]
    if other := hint_for(last, names, same):
        return other
    near = difflib.get_close_matches(path, siblings, n=1, cutoff=0.85) or same
    near = near or difflib.get_close_matches(path, names, n=1, cutoff=0.55)
    return f"did you mean {near[0]}?" if near else f"there are: {listed(siblings or names)}"


def require_known(name: str, known: Iterable[str], where: str) -> None:
    """Raise FieldError for a name that does not exist, with the nearest one that does."""
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
        meant = f"did you mean {where}.{near[0]}?" if near else f"there are: {listed(known)}"
        raise FieldError(f"{where}.{name}: no such field; {meant}")


def listed(names: Iterable[str]) -> str:
    """Return names with commas, as many as a line has room for."""
    names = list(names)
    shown = [name for place, name in enumerate(names) if len(", ".join(names[: place + 1])) <= _LIST_WIDTH]
    return ", ".join(shown) + (f", … ({len(names)} in all)" if len(shown) < len(names) else "")


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
