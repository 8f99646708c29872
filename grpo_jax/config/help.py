"""Print `--help`: one screen that leads to the rest, one section, one field, or all of them."""

from __future__ import annotations

import dataclasses
import re
import shutil
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

from grpo_jax.config.build import hinted_fields, named_of, no_such_field
from grpo_jax.config.fields import default_of, is_section, join, members_of
from grpo_jax.config.files import Values
from grpo_jax.config.named import KEY, built_in_names, find_class
from grpo_jax.config.other_names import TRL, fields_of, hint_of
from grpo_jax.errors import UserError

RUN = "run"
"""Section of the fields that stand in none."""
ALL = "all"
_WIDTH = 100  # characters, where the terminal has as many
_NAMES, _VALUES = 28, 18  # characters of the first screen's columns


_TEXT = """--task text --policy.path FOLDER --data.prompts questions.jsonl \\
      --rewards rewards.py:correct"""
SCREENS = {
    "train": f"""\
usage: grpo train [--config FILE] [--task NAME] [--run_dir DIR] [--section.field VALUE …]

Trains a policy with group-relative policy optimisation. Without --config and --task it trains the
miniature: a small real policy, Stable-Diffusion-3 pipeline and CLIP that ship with the package.

  grpo train                                                the miniature, minutes on a CPU
  grpo train --config my.yaml --run_dir runs/mine --seed 1  a config of your own, or a shipped one
  grpo train {_TEXT}
""",
    "resume": """\
usage: grpo resume DIR [--section.field VALUE …]

Goes on with a run from its last checkpoint, to the same numbers as one that never stopped. What
memory, devices or length of the run say may change; what would change what is learned is refused
by name.

  grpo resume runs/mine
  grpo resume runs/mine --training.max_steps 200   make it longer
  grpo train --resume --run_dir runs/mine          the same in other words
""",
    "plan": f"""\
usage: grpo plan [--device_memory_gib GIB,GIB,… | --target DEVICE] [options of grpo train …]

Says what each device would hold and whether the run fits, and what would make it fit; it reads no
weights and trains nothing. --device_memory_gib plans for devices that are not here; --target asks
their own compiler (h100, h200, b200, a100, a6000, rtx6000pro, v5e, v6e, v5p; h100:8, h100:2x8).
Exit code: 0 fits, 1 does not.

  grpo plan --config my.yaml                             on the devices of this machine
  grpo plan --config my.yaml --device_memory_gib 80,80   on two cards of 80 GiB
  grpo plan --config my.yaml --target h100               compiled for an H100
  grpo plan {_TEXT}
""",
}
"""The beginning of each command's first screen."""
_MOST_USED = (
    *("policy.path", "policy.lora.rank", "data.prompts", "rewards", "sampling.group_size", "sampling.max_new_tokens"),
    *("algorithm.advantage", "optimizer.learning_rate", "training.prompts_per_batch", "training.max_steps", "seed"),
)


def show_help(topic: str, kind: type, values: Values, command: str = "train") -> str:
    """Return the text of `--help TOPIC`; UserError names the nearest topic.

    The topic is "" for the first screen of `command`, the name of a section or a field, or "all"; `values` are plain
    values of all fields, those in force.
    """
    sections = sections_of(kind, values)
    if not topic:
        return _overview(SCREENS[command], sections, values)
    if topic == ALL:
        return "\n\n".join(map(_section, sections))
    options = [option for section in sections for option in section.options]
    meant = [option for option in options if _is_meant(topic, option.name)]
    place = None if meant else TRL.get(topic)
    topic = next(iter(fields_of(place)), topic) if place else topic
    meant = meant or [option for option in options if _is_meant(topic, option.name)]
    inside = [section for section in sections if section.name.startswith(f"{topic}.")]
    for section in sections:
        if section.name == topic:
            rows = [_row(f"--help {inner.name}", "", clause(inner.about)) for inner in inside]
            return "\n".join([_section(section), *["\nInside it:"] * bool(rows), *rows])
    if inside:
        return "\n\n".join(map(_section, inside))
    if not meant:
        names = [*(section.name for section in sections), *(option.name for option in options)]
        line = f"{topic}: no such section; {hint_of(place)}" if place else no_such_field(topic, names)
        raise UserError(f"--help {line.replace('no such field', 'no such section')}")
    return "\n".join(map(_option, meant))


def _is_meant(topic: str, name: str) -> bool:
    name = name.replace("[]", "")
    return name == topic or name.endswith(f".{topic}")


def _overview(screen: str, sections: Sequence[Section], values: Values) -> str:
    options = {option.name: option for section in sections for option in section.options}
    used = [options[name] for name in _MOST_USED if name in options]
    return "\n".join(
        [
            screen,
            "Used most, with the values in force:",
            _row("--config", "FILE", "YAML file or name of a shipped config; several are laid over each other"),
            _row("--task", _short_default(options["task"].value), f"{', '.join(options['task'].names)}, …"),
            *(_row(f"--{option.name}", _short_default(option.value), clause(option.line)) for option in used),
            _row("--print_config", "", "print the config in force as YAML, and stop"),
            "",
            "Sections (--help SECTION and --help SECTION.FIELD say more, --help all everything; --config and",
            "--task beside it decide which there are):",
            *(_row(section.name, "", clause(section.about)) for section in sections),
            "",
            "More: docs/ at https://github.com/grpo-jax/grpo_jax",
        ]
    )


def _short_default(value: object) -> str:
    return f"[{len(value)} entries]" if isinstance(value, list) and value else spelled(value, _VALUES)


def _row(name: str, value: str, text: str) -> str:
    start = f"  {name:<{_NAMES}} " + (f"{value:<{_VALUES}} " if value else "")
    return start + textwrap.shorten(text, _wide() - len(start), placeholder=" …")


def _section(section: Section) -> str:
    about = f"{section.name}: {section.about}" if section.about else section.name
    return "\n".join([_filled(about), "", *map(_option, section.options)])


def _option(option: Option) -> str:
    name = option.name if "[]" in option.name else f"--{option.name}"  # an entry's fields are given within the entry
    kind = f"{', '.join(option.names)}, …" if option.names else type_word(option.hint)
    missing = option.value is dataclasses.MISSING
    value = "must be given" if missing else f"default: {spelled(option.value)}"
    lines = [_filled(f"  {name}  {kind}  ({value})", indent=8)]
    return "\n".join(lines + [_filled(f"      {option.line}", indent=6)] * bool(option.line))


def spelled(value: object, most: int | None = None) -> str:
    """Return a value as a command line or a file spells it."""
    import yaml

    if isinstance(value, str):
        text = value or '""'
    else:
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**20)
        text = text.strip().removesuffix("...").strip()
    text = " ".join(text.split())
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def _wide() -> int:
    return max(40, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns))


def _filled(text: str, *, indent: int = 0) -> str:
    lines = textwrap.wrap(text, _wide(), subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)


class Option(NamedTuple):
    """A field.

    Attributes:
        name: Dotted, as `--NAME` has it; of an entry in a list "rewards[].weight".
        value: In force; `dataclasses.MISSING` where one must be given.
        names: Where it names a class, those that ship with the package.
    """

    name: str
    hint: object
    value: Any
    line: str
    names: tuple[str, ...] = ()


class Section(NamedTuple):
    """A section and its fields, without those of sections inside.

    Attributes:
        name: "sampling", "policy.lora", "judges.NAME".
        about: Its help, in a sentence.
    """

    name: str
    about: str
    options: tuple[Option, ...]


def sections_of(kind: type, values: Values) -> list[Section]:
    """Return all sections of a config: those of the run, of the task and judges in use, and what all tasks share.

    `values` are plain values of all fields (`build.complete`).
    """
    return [section for section in _sections(kind, values, "", "The run as a whole.") if section.options]


def _sections(kind: type, values: Values, name: str, about: str, first: Sequence[Option] = ()) -> list[Section]:
    options, objects, below = list(first), [], []
    lines = help_lines(kind)
    for field, hint in hinted_fields(kind):
        line = lines.get(field.name, "")
        dotted = join(name, field.name)
        value = values.get(field.name, default_of(field))
        named = named_of(hint)
        if named:
            entries = {dotted: value} if KEY in value else {join(dotted, key): value[key] for key in value}
            for where, entry in entries.items():
                option = Option(where, str, entry[KEY], line, tuple(built_in_names(named.places)))
                named_kind = find_class(entry[KEY], named.places, where)
                whole, *inner = _sections(named_kind, entry, where, named_kind.__doc__ or "", [option])
                shared = _sections(named.holder.section, entry, where, "")[0].options if named.shared else ()
                objects += [whole._replace(options=(*whole.options, *shared)), *inner]
        elif is_section(hint):
            below += _sections(hint, value if isinstance(value, Mapping) else {}, dotted, line)  # a run refuses others
        elif get_origin(hint) is list and is_section(get_args(hint)[0]):
            below += _sections(get_args(hint)[0], {}, f"{dotted}[]", line, [Option(dotted, hint, value, line)])
        else:
            options.append(Option(dotted, hint, value, line))
    return [Section(name.removesuffix("[]") or RUN, first_sentence(about), tuple(options)), *objects, *below]


def help_lines(kind: type) -> dict[str, str]:
    """Return the help line of each field, from the docstring of the class that has it."""
    from docstring_parser import parse

    params = [param for one in reversed(kind.__mro__) for param in parse(vars(one).get("__doc__") or "").params]
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def first_sentence(text: str) -> str:
    """Return the first sentence of a text's first paragraph."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z\"`])", paragraph, maxsplit=1)[0]


def clause(line: str) -> str:
    """Return the main clause of a field's or section's help."""
    return re.split("[;:] ", first_sentence(line))[0].rstrip(".")


_WORDS = {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false", types.NoneType: "null"}


def type_word(hint: object) -> str:
    """Return a type as help spells it: INT, TEXT|null, constant|linear|cosine, [TEXT, …]."""
    members = sorted(members_of(hint), key=lambda member: member is types.NoneType)
    if len(members) > 1:
        return "|".join(map(type_word, members))
    (member,) = members
    if get_origin(member) is Literal:
        return "|".join(map(str, get_args(member)))
    if get_origin(member) is list:
        return f"[{type_word(get_args(member)[0])}, …]"
    if get_origin(member) is dict:
        return f"{{NAME: {type_word(get_args(member)[1])}, …}}"
    return "{…}" if is_section(member) else _WORDS.get(member, "VALUE")
