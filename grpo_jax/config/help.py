"""Print `--help`: one screen, or a section or field with type, value in force and meaning."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from grpo_jax.config.fields import KEY, Argument, ConfigField, Section, hint, walk
from grpo_jax.config.files import Values
from grpo_jax.config.other_names import ALL_NAMES, fields_of
from grpo_jax.errors import UserError

yaml.SafeDumper.add_representer(Argument, lambda dumper, text: dumper.represent_str(str(text)))
_WIDTH = 100  # characters
_NAMES, _VALUES = 28, 18  # characters of the first screen's columns
_MOST_USED = (
    *("task", "run_dir", "policy.path", "policy.lora.rank", "policy.compute_dtype", "data.prompts", "rewards"),
    *("sampling.group_size", "sampling.max_new_tokens", "sampling.temperature", "algorithm.preset"),
    *("algorithm.kl_coef", "optimizer.learning_rate", "training.prompts_per_batch", "training.max_steps"),
)
_WORDS = {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false", NoneType: "null", list: "LIST", dict: "{…}"}
SCREENS = {
    "train": """\
usage: grpo train [--config FILE] [--task NAME] [--run_dir DIR] [--section.field VALUE …]

Trains a policy; without --config and --task the miniature, which takes minutes on a CPU.

  grpo train --config my.yaml --run_dir runs/mine --seed 1
  grpo train --task text --policy.path FOLDER --data.prompts questions.jsonl \\
      --rewards rewards.py:correct
""",
    "resume": """\
usage: grpo resume DIR [--section.field VALUE …]

Continues a run from its last checkpoint, to the same numbers as one that never stopped. Fields for
memory, devices and the length of the run may change.

  grpo resume runs/mine --training.max_steps 200
""",
    "plan": """\
usage: grpo plan [--device_memory_gib GIB,GIB,… | --target DEVICE] [options of grpo train …]

Says what each device would hold, and whether the run fits; trains nothing.
--target compiles for a device that is not here: h100, h200, b200, a100, a6000, rtx6000pro, v5e,
v6e, v5p; h100:8. Exit code: 0 fits, 1 does not.

  grpo plan --config my.yaml --device_memory_gib 80,80
  grpo plan --config my.yaml --target h100
""",
}
"""The beginning of each command's first screen."""


def show_help(topic: str, kind: type[Section], values: Values, command: str = "train") -> str:
    """Return the text of `--help TOPIC`: "" for the first screen, a section, a field, or "all"; else a UserError."""
    fields = [field for field in walk(kind, values) if field.inner is None or "list" in str(field.info.annotation)]
    sections: dict[str, str] = {}
    for field in fields:
        sections[_home(field)] = _help(field) if _home(field) == field.path else _sentence(field.about)
    if not topic:
        return _first_screen(SCREENS[command], fields, sections)
    for name in (topic, next(iter(fields_of(ALL_NAMES.get(topic, ""))), topic)):
        whole = [home for home in sections if name in ("all", home)]
        inside = [home for home in sections if home.startswith(f"{name}.")]
        if whole in ([], ["judges"]):  # a name alone has no fields of its own
            whole, inside = whole + inside, []
        if whole:
            more = [f"Inside it: {', '.join(f'--help {home}' for home in inside)}"] * bool(inside)
            return "\n\n".join([_section(home, sections[home], fields) for home in whole] + more)
        named = [field for field in fields if f".{field.path.replace('[]', '')}".endswith(f".{name}")]
        if named:
            return "\n".join(map(_option, named))
    raise UserError(f"--help {topic}: no such section; {hint(topic, [*sections, *(field.path for field in fields)])}")


def _home(field: ConfigField) -> str:
    """Return the section that shows a field."""
    return field.section.removesuffix("[]") or (field.name if field.marked or field.inner else "run")


def _first_screen(screen: str, fields: Sequence[ConfigField], sections: dict[str, str]) -> str:
    options = {field.path: field for field in fields}
    used = [options[name] for name in _MOST_USED if name in options]
    return "\n".join(
        [
            screen,
            "Used most, with the values in force (--print_config prints all of them):",
            _row("--config", "FILE", "YAML file or name of a shipped config; several are laid over each other"),
            *(_row(f"--{field.path}", _spelled(field, _VALUES), _clause(_help(field))) for field in used),
            "",
            "Sections (--help SECTION, --help SECTION.FIELD, --help all; --task and --config beside it count):",
            *(_row(name, "", _clause(about)) for name, about in sections.items() if not name.endswith(".pool")),
            "",
            "More: docs/ at https://github.com/grpo-jax/grpo_jax",
        ]
    )


def _section(home: str, about: str, fields: Sequence[ConfigField]) -> str:
    return "\n".join([_filled(f"{home}: {about}"), "", *(_option(field) for field in fields if _home(field) == home)])


def _row(name: str, value: str, text: str) -> str:
    start = f"  {name:<{_NAMES}} " + (f"{value:<{_VALUES}} " if value else "")
    return start + textwrap.shorten(text, _WIDTH - len(start), placeholder=" …")


def _option(field: ConfigField) -> str:
    name = field.path if "[]" in field.path else f"--{field.path}"  # an entry's fields are given within the entry
    value = "must be given" if field.info.is_required() and field.value is None else f"default: {_spelled(field)}"
    kind = f"{', '.join(field.marked.kinds)}, file.py:Class" if field.marked else type_word(field.info.annotation)
    return _filled(f"  {name}  {kind}  ({value})", 8) + "\n" + _filled(f"      {_help(field)}", 6)


def _help(field: ConfigField) -> str:
    return " ".join((field.info.description or "").split())


def _spelled(field: ConfigField, most: int | None = None) -> str:
    value = field.value
    if field.marked:
        entries = [value] if field.name == "task" else (value or {}).values()
        kinds = [entry.get(KEY) if isinstance(entry, dict) else entry for entry in entries]
        value = kinds[0] if field.name == "task" else dict(zip(value or {}, kinds, strict=True))
    if most and isinstance(value, list) and value:
        return f"[{len(value)} entries]"
    return spelled(value, most)


def spelled(value: object, most: int | None = None) -> str:
    """Return a value as a command line or a file spells it."""
    text = str(value) or '""'
    if not isinstance(value, str):
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**20)
    text = " ".join(text.strip().removesuffix("...").split())
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def _filled(text: str, indent: int = 0) -> str:
    lines = textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)


def _sentence(about: type[Section]) -> str:
    paragraph = " ".join((about.__doc__ or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z\"`])", paragraph, maxsplit=1)[0]


def _clause(text: str) -> str:
    return re.split(r"[;:] |\. ", text)[0].rstrip(".")


def type_word(hint: Any) -> str:
    """Return a type as help spells it: INT, TEXT|null, constant|linear|cosine, [TEXT, …]."""
    inner = get_args(hint)
    if hasattr(hint, "__metadata__"):
        return type_word(inner[0])
    if get_origin(hint) is Literal:
        return "|".join(map(str, inner))
    if get_origin(hint) in (list, dict):
        return f"[{type_word(inner[0])}, …]" if len(inner) == 1 else f"{{NAME: {type_word(inner[1])}, …}}"
    return "|".join(map(type_word, inner)) or _WORDS.get(hint, "{…}")
