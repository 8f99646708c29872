"""The command line of a config: --config FILE, --section.field VALUE, --help [SECTION], --print_config."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from grpo_jax.config.fields import KEY, Argument, ConfigField, KeyOf, build, hint, merged, to_yaml, walk
from grpo_jax.config.files import DEEPEST, LONGEST, Fields, Values, read_text, read_yaml
from grpo_jax.config.other_names import ALL_NAMES, REMOVED, fields_of, hint_for
from grpo_jax.config.run import Config, find_task, make_config
from grpo_jax.errors import UserError, one_line, short_name, short_repr

DEFAULT_CONFIG = "prompt_enhancement_miniature"
FLAGS = ("--resume", "--deterministic")
"""Options that need no value: `--resume` is `--resume=true`."""
_ALONE = ("--print_config", "--debug")
_OTHERS = (*_ALONE, "--plan", "--version", "--help")
_ASKED = ("config", "help", "print_config", "debug")  # options that are not fields
_JUDGE = re.compile(rf"judges\.\w+(\.{KEY})?")  # an option that sets the kind of a judge
_SEVERAL = "--rewards"  # the option with several words

_WIDTH = 100  # characters of a line of --help
_NAMES, _VALUES = 28, 18  # characters of the first screen's columns
_MOST_USED = (
    *("task", "run_dir", "policy.path", "policy.lora.rank", "data.prompts", "rewards", "sampling.group_size"),
    *("sampling.max_new_tokens", "algorithm.preset", "optimizer.learning_rate"),
    *("training.prompts_per_batch", "training.max_steps"),
)
_WORDS = {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false", NoneType: "null", list: "LIST", dict: "{…}"}
SCREENS = {
    "train": """\
usage: grpo train [--config FILE] [--task NAME] [--run_dir DIR] [--section.field VALUE …]

Train a policy. Without --config and --task it trains the miniature, in minutes on a CPU.

  grpo train --config my.yaml --run_dir runs/mine --seed 1
  grpo train --task text --policy.path FOLDER --data.prompts questions.jsonl \\
      --rewards rewards.py:correct
""",
    "resume": """\
usage: grpo resume DIR [--section.field VALUE …]

Continue a run from its last checkpoint, with the same results as an uninterrupted run. Fields for
memory, devices and the length of the run may change.

  grpo resume runs/mine --training.max_steps 200
""",
    "plan": """\
usage: grpo plan [--device_memory_gib GIB,GIB,… | --target DEVICE] [options of grpo train …]

Show the memory of each device and whether the run fits, without training. --target compiles for an
absent device: h100, h200, b200, a100, a6000, rtx6000pro, rtx4090, l4, t4, v5e, v6e or v5p; h100:8
means eight. Exit code: 0 if it fits, 1 if not.

  grpo plan --config my.yaml --device_memory_gib 80,80
  grpo plan --config my.yaml --target h100
""",
}
"""The beginning of each command's first screen."""


def parse(arguments: Sequence[str], command: str = "train") -> Config:
    """Read the command line into a `Config`.

    Later values win: the task's defaults, the files of --config, the arguments. Without --config the file is the run
    directory's config.yaml on --resume, else the task's default. `command` is the command that --help describes.
    Raises UserError, with each mistake in one line, and SystemExit after --help and --print_config.
    """
    given = list(_options(arguments))
    asked = {name: [os.path.expanduser(value) for other, value in given if other == name] for name in _ASKED}
    own = [(name, value) for name, value in given if name not in asked]
    for name in ("rewards", "eval_rewards", "data.tools"):
        if (count := sum(other == name and text[:1] != "[" for other, text in own)) > 1:  # [] replaces the list
            raise UserError(f"--{name}: given {count} times, which keeps the last alone: list all entries after one")
    files = [find_config(name) for name in asked["config"]] or _default_files(dict(own), bool(asked["help"]))
    neutral = {"task": "text"} if asked["help"] and not files else {}
    values = reduce(merged, map(read_config, files), neutral)
    task = [(name, value) for name, value in own if name in ("task", f"task.{KEY}")]
    values = _assigned(values, task)
    values = merged(find_task(values.get("task")).defaults, values)
    judges = _assigned(values, [(name, value) for name, value in own if _JUDGE.fullmatch(name)])
    texts = {field.path for field in walk(Config, judges) if field.info.annotation in (str, str | None)}
    values = _assigned(values, own, texts)
    if asked["help"]:
        shown = help_text(asked["help"][0], values, command)
    else:
        config = build(Config, values)
        if not asked["print_config"]:
            return config
        shown = to_yaml(config).rstrip("\n")
    print(shown)
    raise SystemExit(0)


def find_config(name: str) -> Path:
    """Find a config: a file, else a config of the package (with or without .yaml)."""
    if os.path.exists(name) and not os.path.isdir(name):
        return Path(name)
    package, stem = Path(__file__).parents[1], Path(name).name.removesuffix(".yaml")
    folders = (package.parent / "configs", package / "configs")  # of a checkout, of the wheel
    shipped = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    if Path(name).parent in (Path(), Path("configs")) and stem in shipped:  # a mistyped path finds no shipped config
        return shipped[stem]
    left = REMOVED.get(f"config.{stem}")
    near = [name for name in shipped if name.startswith(stem or " ")] or difflib.get_close_matches(stem, shipped, n=1)
    hint = f"configs that ship with grpo_jax: {one_line(', '.join(shipped), 150)}"
    hint = f"it {left}" if left else f"did you mean {' or '.join(near)}?" if near else hint
    raise UserError(f"--config {short_name(name)}: no such file; {hint}")


def read_config(path: Path) -> Fields:
    """Return the nested values of a YAML file; UserError if it holds anything else."""
    try:
        values = read_yaml(read_text(path, LONGEST))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(values, Mapping):
        came = "nothing: the file is empty" if values is None else short_repr(values)
        raise UserError(f"{path}: expected sections and fields, got {came}")
    return dict(values)


def load_config(path: Path) -> Config:
    """Load a YAML file's config, over the defaults of its task; UserError as in `parse`."""
    return make_config(read_config(path))


def _default_files(own: Mapping[str, str], helping: bool) -> list[Path]:
    run_dir, task = own.get("run_dir"), own.get("task", own.get(f"task.{KEY}"))
    if own.get("resume", "").lower() in ("true", "yes", "on", "1", "t", "y") and (run_dir is not None or not helping):
        if run_dir is None:
            raise UserError("--resume: give the run's folder by --run_dir DIR")
        saved = Path(os.path.expanduser(run_dir)) / "config.yaml"
        if not os.path.isfile(saved):
            raise UserError(f"--resume: {short_name(run_dir)} holds no run (no config.yaml); start it without --resume")
        return [saved]
    if task is None:
        return [] if helping else [find_config(DEFAULT_CONFIG)]
    default = find_task(task).default_config
    return [] if default is None else [find_config(default)]


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each option; several words become a comma-separated list."""
    pending = list(arguments)
    while pending:
        argument, equals, value = pending.pop(0).partition("=")
        name = "--help" if argument == "-h" else argument
        if not name.startswith("--") or name.count(".") > DEEPEST:
            other = hint_for(name)
            meant = f"; {other}" if other else f"; write --{short_name(name)} VALUE" if equals else ""
            raise UserError(f"{short_name(argument)}: expected an option{meant or ', such as --config FILE'}")
        alone = not pending or pending[0].startswith("-" if name == "--help" else "--")
        if not equals and name == "--help":
            value = "" if alone else pending.pop(0)
        elif not equals and name in FLAGS:
            value = pending.pop(0).lower() if pending and pending[0].lower() in ("true", "false") else "true"
        elif not equals and name not in _ALONE:
            if alone:
                raise UserError(_without_value(name))
            words = [pending.pop(0)]
            while name == _SEVERAL and pending and not pending[0].startswith("--"):
                words.append(pending.pop(0))
            value = ",".join(words)
        yield name.removeprefix("--"), value


def _without_value(option: str) -> str:
    """Return the error about an option without a value, with its name here if it is another program's."""
    if other := hint_for(option.removeprefix("--")):
        return f"{short_name(option)}: no such option; {other}"
    near = difflib.get_close_matches(option, (*FLAGS, *_OTHERS), n=1, cutoff=0.75)
    return f"{short_name(option)}: " + (f"no such option; did you mean {near[0]}?" if near else "expected a value")


def _assigned(values: Values, arguments: Sequence[tuple[str, str]], texts: Collection[str] = ()) -> Fields:
    """Override values by arguments, kinds first: null, lists and mappings are YAML, all else is text for its field.

    `texts` names the text fields, whose values may start with a bracket.
    """
    if any(name == "policy.lora.path" for name, _ in arguments):  # an adapter has its own rank, alpha and targets
        values = {**values, "policy": {**(values.get("policy") or {}), "lora": {}}}
    for name, text in sorted(arguments, key=lambda pair: pair[0].removesuffix(f".{KEY}").count(".")):
        value: Any = Argument(text)
        if text == "null" or (text[:1] in ("[", "{") and name not in texts):
            try:
                value = read_yaml(text)
            except ValueError as error:
                raise UserError(f"{name}: {error}") from None
        for given in (None, value) if value == {} else (value,):  # {} empties a mapping
            values = merged(values, reduce(lambda inner, part: {part: inner}, reversed(name.split(".")), given))
    return dict(values)


def help_text(topic: str, values: Values, command: str) -> str:
    """Return the text of `--help TOPIC`: "" for the first screen, a section, a field, or "all"; else a UserError."""
    fields = [field for field in walk(Config, values) if field.inner is None or "list" in str(field.info.annotation)]
    sections: dict[str, str] = {}
    for field in fields:
        whole = _home(field) == field.path
        sections[_home(field)] = _paragraph(field.info.description if whole else field.about.__doc__)
    if not topic:
        outer = {name: about for name, about in sections.items() if "." not in name}
        return _first_screen(SCREENS[command], fields, outer)
    for name in (topic, *fields_of(ALL_NAMES.get(topic, ""))[:1]):
        shown = [home for home in sections if name == "all" or f"{home}.".startswith(f"{name}.")]
        if shown:
            return "\n\n".join(_section(home, sections[home], fields) for home in shown)
        named = [field for field in fields if f".{field.path.replace('[]', '')}".endswith(f".{name}")]
        if named:
            return "\n".join(map(_option, named))
    raise UserError(f"--help {topic}: no such section; {hint(topic, [*sections, *(field.path for field in fields)])}")


def _home(field: ConfigField) -> str:
    """Return the help section of a field."""
    return field.section.removesuffix("[]") or (field.name if field.marked or field.inner else "run")


def _first_screen(screen: str, fields: Sequence[ConfigField], sections: Mapping[str, str]) -> str:
    options = {field.path: field for field in fields}
    used = [options[name] for name in _MOST_USED if name in options]
    return "\n".join(
        [
            screen,
            "Most used options, with their values here (--print_config prints all):",
            _row("--config", "FILE", "YAML file or name of a shipped config; later ones override earlier ones"),
            *(_row(f"--{field.path}", _spelled(field, _VALUES), _paragraph(field.info.description)) for field in used),
            "",
            "Sections: --help SECTION lists its fields, --help all every field, with --task or --config theirs.",
            *(_row(name, "", about) for name, about in sections.items()),
            "",
            "More: docs/ at https://github.com/grpo-jax/grpo_jax",
        ]
    )


def _row(name: str, value: str, text: str) -> str:
    start = f"  {name:<{_NAMES}} " + (f"{value:<{_VALUES}} " if value else "")
    clause = re.split(r"[;:] |\. ", text)[0].rstrip(".")
    return start + textwrap.shorten(clause, _WIDTH - len(start), placeholder=" …")


def _section(home: str, about: str, fields: Sequence[ConfigField]) -> str:
    options = [_option(field) for field in fields if _home(field) == home]
    return "\n".join([textwrap.fill(f"{home}: {about}", _WIDTH), "", *options])


def _option(field: ConfigField) -> str:
    name = field.path if "[]" in field.path else f"--{field.path}"  # an entry's fields are given within the entry
    value = "must be given" if field.info.is_required() and field.value is None else f"default: {_spelled(field)}"
    keys = next((mark for mark in field.info.metadata if isinstance(mark, KeyOf)), None)
    kind = "|".join(keys.names) if keys else _type_word(field.info.annotation)
    kind = f"{', '.join(field.marked.kinds)}, file.py:Class" if field.marked else kind
    fill = functools.partial(textwrap.fill, width=_WIDTH, break_on_hyphens=False, break_long_words=False)
    first = fill(f"{name}  {kind}  ({value})", initial_indent="  ", subsequent_indent=" " * 8)
    return f"{first}\n{fill(_paragraph(field.info.description), initial_indent=' ' * 6, subsequent_indent=' ' * 6)}"


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").strip().partition("\n\n")[0].split())


def _spelled(field: ConfigField, most: int | None = None) -> str:
    """Return a value as on a command line or in a file; for tasks and judges the kind."""
    value = field.value
    if field.marked:
        given = {"": value} if field.name == "task" else value or {}
        kinds = {name: entry.get(KEY) if isinstance(entry, dict) else entry for name, entry in given.items()}
        value = kinds[""] if field.name == "task" else kinds
    if most and isinstance(value, list) and value:
        return f"[{len(value)} entries]"
    text = " ".join(value.split()) or '""' if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def _type_word(hint: Any) -> str:
    """Return a type as in help: INT, TEXT|null, constant|linear|cosine, [TEXT, …]."""
    inner = get_args(hint)
    if hasattr(hint, "__metadata__"):
        return _type_word(inner[0])
    if get_origin(hint) is Literal:
        return "|".join(map(str, inner))
    if get_origin(hint) in (list, dict):
        return f"[{_type_word(inner[0])}, …]" if len(inner) == 1 else f"{{NAME: {_type_word(inner[1])}, …}}"
    return "|".join(map(_type_word, inner)) or _WORDS.get(hint, "{…}")
