"""The command line of a config: --config FILE, --section.field VALUE, --help [SECTION], --print_config.

The fields depend on the task and the judges, which the config names: they are looked for first, in the files and
among the arguments. Arguments are built and checked like the values of a file (`build`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config.build import RawArgument, build, complete, listed, merged, to_yaml
from grpo_jax.config.files import DEEPEST, LONGEST, Fields, Values, read_text, read_yaml, require_text
from grpo_jax.config.help import show_help
from grpo_jax.config.named import KEY
from grpo_jax.config.run import find_task, with_defaults
from grpo_jax.errors import UserError, short_name, short_repr

DEFAULT_CONFIG = "prompt_enhancement_miniature"
FLAGS = ("--resume", "--deterministic", "--debug")
"""Options that may stand without a value: `--resume` is `--resume=true`."""
_OTHERS = ("--print_config", "--plan", "--version", "--help")
_LISTED = "--rewards"
"""The option that takes several words."""


def parse(arguments: Sequence[str], command: str = "train") -> Any:
    """Read the command line into a `Config`, or the task's own class of config.

    Later values win: the task's defaults, the files that --config names, the arguments. Without --config the file is
    the run directory's config.yaml on --resume, else the task's default. `command` is the one that --help is about.
    Raises UserError, with each mistake in one line, and SystemExit after --help and --print_config.
    """
    options = list(_options(arguments))
    files = [find_config(value) for name, value in options if name == "config"]
    topics = [value for name, value in options if name == "help"]
    printing = any(name == "print_config" for name, _ in options)
    classes = {}
    assignments = []
    for name, value in options:
        place = re.fullmatch(rf"(task|judges\.\w+)(?:\.{KEY})?", name)
        if place:
            classes[place[1]] = value
        elif name not in ("config", "help", "print_config"):
            assignments.append((name, value))
    values = merged(*map(read_config, files or _default_files(dict(assignments), classes.get("task"), bool(topics))))
    if "task" in classes:
        values = _with_class(values, ["task"], classes.pop("task"))
    values = with_defaults(values)
    for place, kind in classes.items():  # judges: those of the task's defaults among them
        values = _with_class(values, place.split("."), kind)
    task = find_task(values["task"][KEY])
    resets = getattr(task.config, "resets", {})
    values = _assigned(complete(task.config, values), assignments, resets)
    for topic in topics:
        print(show_help(topic, task.config, complete(task.config, values), command))
        raise SystemExit(0)
    config = build(task.config, values)
    if printing:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def find_config(name: str) -> Path:
    """Find a config: a file as named, else one that ships with the package (with or without .yaml)."""
    if os.path.exists(name) and not os.path.isdir(name):  # of any text, one too long for a path among them
        return Path(name)
    stem = Path(name).name.removesuffix(".yaml")
    # A mistyped path elsewhere must not find a shipped config of the same name.
    bare = Path(name).parent in (Path(), Path("configs"))
    shipped = shipped_configs()
    if bare and stem in shipped:
        return shipped[stem]
    raise UserError(f"--config {short_name(name)}: no such file; configs that ship with grpo_jax: {listed(shipped)}")


def shipped_configs() -> dict[str, Path]:
    """Return the configs that ship with the package, by name: those of the wheel, or of a checkout."""
    package = Path(__file__).parents[1]
    folders = [package.parent / "configs", package / "configs"]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def read_config(path: Path) -> Fields:
    """Return the nested values of a YAML file; UserError if it holds anything else."""
    text = read_text(path, LONGEST)
    try:
        values = read_yaml(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(values, Mapping):
        came = "nothing: the file is empty" if values is None else short_repr(values)
        raise UserError(f"{path}: expected sections and fields, got {came}")
    return dict(values)


def load_config(path: Path) -> Any:
    """Return the config that a YAML file holds, over the defaults of its task; UserError as `parse`."""
    values = with_defaults(read_config(path))
    return build(find_task(values["task"][KEY]).config, values)


def _default_files(values: Mapping[str, str], task: str | None, helping: bool) -> list[Path]:
    run_dir = values.get("run_dir")
    if values.get("resume") == "true" and (run_dir is not None or not helping):
        if run_dir is None:
            raise UserError("--resume: say which run with --run_dir DIR")
        if not os.path.isfile(Path(run_dir) / "config.yaml"):
            raise UserError(f"--resume: {short_name(run_dir)} holds no run (no config.yaml); start it without --resume")
        return [Path(run_dir) / "config.yaml"]
    default = DEFAULT_CONFIG if task is None else find_task(task).default_config
    return [] if default is None else [find_config(default)]


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each option; several words of a list with commas between them."""
    pending = list(arguments)
    while pending:
        argument, equals, value = pending.pop(0).partition("=")
        _check_argument(argument, f"{argument}{equals}{value}")
        name = "--help" if argument == "-h" else argument
        if not name.startswith("--"):
            raise UserError(f"{short_name(argument)}: expected an option, such as --config FILE")
        if not equals and name == "--help":
            value = pending.pop(0) if pending and not pending[0].startswith("-") else ""
        elif not equals and name in FLAGS:
            value = pending.pop(0).lower() if pending and pending[0].lower() in ("true", "false") else "true"
        elif not equals and name != "--print_config":
            if not pending or pending[0].startswith("--"):
                raise UserError(_without_value(name))
            words = [pending.pop(0)]
            while name == _LISTED and pending and not pending[0].startswith("--"):
                words.append(pending.pop(0))
            value = ",".join(words)
            _check_argument(name, value)
        yield name.removeprefix("--"), value


def _check_argument(name: str, text: str) -> None:
    """Raise UserError for an argument that is no text, or a field with more levels than any config has."""
    try:
        require_text(text)
    except ValueError as error:
        raise UserError(f"{short_repr(name)}: {error}") from error
    if name.startswith("--") and name.count(".") > DEEPEST:
        raise UserError(f"{short_repr(name)}: no such field")


def _without_value(argument: str) -> str:
    near = difflib.get_close_matches(argument, (*FLAGS, *_OTHERS), n=1, cutoff=0.75)
    return f"{short_name(argument)}: " + (f"no such option; did you mean {near[0]}?" if near else "expected a value")


def _with_class(values: Values, place: Sequence[str], kind: str) -> Fields:
    """Return values with the class at a place; where another stood, its fields go with it."""
    first, *rest = place
    inner = values.get(first) or {}
    if rest:
        return {**values, first: _with_class(inner, rest, kind)}
    inner = {KEY: inner} if isinstance(inner, str) else inner
    same = inner.get(KEY) in (None, kind)
    return {**values, first: {**(inner if same else {}), KEY: kind}}


def _assigned(values: Values, assignments: Sequence[tuple[str, str]], resets: Mapping[str, Values]) -> Fields:
    for name, _ in assignments:
        values = merged(values, resets.get(name, {}))
    for name, text in assignments:
        values = _placed(values, name.split("."), RawArgument(text))
    return {**values}


def _placed(values: Values, path: Sequence[str], text: RawArgument) -> Fields:
    """Return values with an argument at a place; a section changes the fields it names."""
    first, *rest = path
    below = values.get(first)
    value: Any = text
    if rest and isinstance(below, list):
        raise UserError(f"--{short_name('.'.join(path))}: {first} is a list, which is given whole")
    if rest:
        value = _placed(below if isinstance(below, Mapping) else {}, rest, text)
    elif isinstance(below, Mapping) and isinstance(fields := text.read(first), Mapping):
        value = merged(below, fields)
    return {**values, first: value}
