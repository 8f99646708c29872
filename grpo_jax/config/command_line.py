"""The command line of a config: --config FILE, --section.field VALUE, --help [SECTION], --print_config.

Which fields there are depends on the task and the judges, which the config names: they are looked for first, in the
files and among the arguments. What an argument says is built and checked as what a file says is (`build`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config.build import Words, build, complete, listed, merged, to_yaml
from grpo_jax.config.files import read_text
from grpo_jax.config.help import show_help
from grpo_jax.config.named import KEY
from grpo_jax.config.reading import DEEPEST, LONGEST, read_yaml, require_text
from grpo_jax.config.run import find_task, refuse_renamed, with_defaults
from grpo_jax.errors import UserError, said, shown

DEFAULT_CONFIG = "prompt_enhancement_miniature"
FLAGS = ("--resume", "--deterministic", "--debug")
_HELP = "--help"
_PRINT = "--print_config"
_LISTED = ("--rewards", "--rewards+")
"""Options that take several words."""


def parse(arguments: Sequence[str], command: str = "train") -> Any:
    """Reads the command line into a `Config`, or into what the task has in its place.

    Values are laid over each other: the task's defaults, the files that --config names, the arguments. Without --config
    the file is the run directory's config.yaml on --resume, else the task's default.

    Args:
        arguments: As they were typed.
        command: What --help is asked of.

    Raises:
        UserError: Unknown field, wrong type, value out of range or missing file, named in one line.
        SystemExit: After --help and --print_config.
    """
    for argument in arguments:
        _check_argument(argument)
    options, classes = _without_classes(_one_by_one(arguments))
    values = merged(*map(read_config, _files(options, classes)))
    if "task" in classes:
        values = _replaced(values, ["task"], classes.pop("task"))
    values = with_defaults(values)
    for place, named in classes.items():  # judges: those of the task's defaults among them
        values = _replaced(values, place.split("."), named)
    task = find_task(values["task"][KEY])
    values = _laid_over(complete(task.config, values), options, task)
    for option in options:
        if option.startswith(f"{_HELP}="):
            print(show_help(option.partition("=")[2], task.config, complete(task.config, values), command))
            raise SystemExit(0)
    config = build(task.config, values)
    if _PRINT in options:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def find_config(name: str) -> Path:
    """Finds a config: a file as named, else one that ships with the package (with or without .yaml).

    Raises:
        UserError: No such file; the message lists the configs that ship with the package.
    """
    if os.path.exists(name) and not os.path.isdir(name):  # of any text, one too long for a path among them
        return Path(name)
    stem = Path(name).name.removesuffix(".yaml")
    # A mistyped path elsewhere must not find a shipped config of the same name.
    bare = Path(name).parent in (Path(), Path("configs"))
    shipped = shipped_configs()
    if bare and stem in shipped:
        return shipped[stem]
    raise UserError(f"--config {said(name)}: no such file; configs that ship with grpo_jax: {listed(shipped)}")


def shipped_configs() -> dict[str, Path]:
    """The configs that ship with the package, by their names: of the wheel, or of a checkout."""
    package = Path(__file__).parents[1]
    folders = [package.parent / "configs", package / "configs"]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def read_config(path: Path) -> dict[str, Any]:
    """The nested values of a YAML file.

    Raises:
        UserError: It cannot be read, is no YAML, or holds something else.
    """
    text = read_text(path, LONGEST)
    try:
        values = read_yaml(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(values, Mapping):
        came = "nothing: the file is empty" if values is None else shown(values)
        raise UserError(f"{path}: expected sections and fields, got {came}")
    return dict(values)


def load_config(path: Path) -> Any:
    """The config that a YAML file holds, over the defaults of its task.

    Raises:
        UserError: As `read_config`, or a field is unknown, of another type or out of range.
    """
    values = with_defaults(read_config(path))
    return build(find_task(values["task"][KEY]).config, values)


# -------------------------------------------------------------------------------------------------------- arguments


def _check_argument(argument: str) -> None:
    """Raises UserError for what is no text, and for a field's name with more levels than any config has."""
    name = argument.partition("=")[0]
    try:
        require_text(argument)
    except ValueError as error:
        raise UserError(f"{shown(name)}: {error}") from error
    if name.startswith("--") and name.count(".") > DEEPEST:
        raise UserError(f"{shown(name)}: no such field")


def _one_by_one(arguments: Sequence[str]) -> list[str]:
    """Every option as one "--name=value"; flags may stand without a value: `--resume` is `--resume=true`."""
    result: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument in ("-h", _HELP):
            argument = f"{_HELP}={pending.pop(0) if pending and not pending[0].startswith('-') else ''}"
        elif argument in FLAGS and (not pending or pending[0].lower() not in ("true", "false")):
            argument += "=true"
        elif argument.startswith("--") and "=" not in argument and not _alone(argument):
            if not pending or pending[0].startswith("--"):
                raise UserError(_without_value(argument))
            listed = argument in _LISTED
            argument += f"={pending.pop(0)}"
            while listed and pending and not pending[0].startswith("--"):
                argument += f",{pending.pop(0)}"
        elif not argument.startswith("--"):
            raise UserError(f"{said(argument)}: expected an option, such as --config FILE")
        result.append(argument)
    return result


def _without_value(argument: str) -> str:
    """What to say of an option that stands alone and takes a value, if it is one."""
    near = difflib.get_close_matches(argument, (*FLAGS, _PRINT, "--plan", "--version", "--help"), n=1, cutoff=0.75)
    reason = f"no such option; did you mean {near[0]}?" if near else "expected a value"
    return f"{said(argument)}: {reason}"


def _alone(argument: str) -> bool:
    """Whether it is an option that is no field and needs no value."""
    return argument == _PRINT or argument.startswith(f"{_HELP}=")


def _without_classes(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments, and the classes that they name: {"task": name, "judges.NAME": kind}."""
    rest, classes = [], {}
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        place = re.fullmatch(rf"(task|judges\.\w+)(?:\.{KEY})?", name)
        if place:
            classes[place[1]] = value
        else:
            rest.append(argument)
    return rest, classes


def _files(arguments: Sequence[str], classes: Mapping[str, str]) -> list[Path]:
    """The files that hold what the arguments leave open, later ones over earlier ones."""
    pairs = (argument.removeprefix("--").partition("=") for argument in arguments)
    options: dict[str, str] = {name: value for name, _, value in pairs}
    named = [find_config(argument.partition("=")[2]) for argument in arguments if argument.startswith("--config=")]
    if named:
        return named
    if options.get("resume") == "true" and ("help" not in options or "run_dir" in options):
        return [_saved_config(options.get("run_dir"))]
    default = find_task(classes["task"]).default_config if "task" in classes else DEFAULT_CONFIG
    return [] if default is None else [find_config(default)]


def _replaced(values: Mapping[str, Any], place: Sequence[str], named: str) -> dict[str, Any]:
    """Values with the class at a place; where another stood, its fields go with it."""
    first, *rest = place
    inner = values.get(first) or {}
    if rest:
        return {**values, first: _replaced(inner, rest, named)}
    inner = {KEY: inner} if isinstance(inner, str) else inner
    same = inner.get(KEY) in (None, named)
    return {**values, first: {**(inner if same else {}), KEY: named}}


def _laid_over(values: Mapping[str, Any], arguments: Sequence[str], task: Any) -> dict[str, Any]:
    """Values with what the arguments say in their places.

    Raises:
        UserError: An argument has the name of an earlier version, or of no field; it says the nearest one.
    """
    pairs = [argument.removeprefix("--").partition("=")[::2] for argument in arguments if not _alone(argument)]
    options = [(name, Words(text)) for name, text in pairs if name != "config"]
    refuse_renamed(merged(*(_placed({}, name.split("."), Words()) for name, _ in options)), task.renamed)
    values = dict(values)
    for name, _ in options:
        if name in getattr(task.config, "anew", {}):
            values = merged(values, task.config.anew[name])
    entries = [option for option in options if _in_list(values, option[0].split("."))]
    for name, words in [option for option in options if option not in entries]:
        values = _placed(values, name.removesuffix("+").split("."), words, more=name.endswith("+"))
    if entries:  # of lists that may have been given as words
        values = complete(task.config, values)
    for name, words in entries:
        values = _placed(values, name.removesuffix("+").split("."), words, more=name.endswith("+"))
    return values


def _in_list(values: Any, path: Sequence[str]) -> bool:
    """Whether a path leads into an entry of a list."""
    if not path or isinstance(values, list):
        return bool(path)
    return isinstance(values, Mapping) and _in_list(values.get(path[0]), path[1:])


def _placed(values: Mapping[str, Any], path: Sequence[str], words: Words, *, more: bool = False) -> dict[str, Any]:
    """Values with some words at a place: those of a section change the fields they name; `more` adds to a list."""
    first, *rest = path
    below, value = values.get(first), words
    if rest and isinstance(below, list):
        value = _entry_placed(below, rest, words, f"--{said('.'.join([first, rest[0]]))}", more=more)
    elif rest:
        value = _placed(below if isinstance(below, Mapping) else {}, rest, words, more=more)
    elif more:
        entries = words.read(first)
        below = below.read(first) if isinstance(below, Words) else below
        if not isinstance(below, list | None):
            raise UserError(f"--{said(first)}+: it adds to a list, which this field is not; leave out the +")
        value = [*(below or []), *(entries if isinstance(entries, list) else [entries])]
    elif isinstance(below, Mapping) and isinstance(fields := words.read(first), Mapping):
        value = merged(below, fields)
    return {**values, first: value}


def _entry_placed(
    entries: Sequence[Any], path: Sequence[str], words: Words, name: str, *, more: bool = False
) -> list[Any]:
    """A list with some words in one of its entries, or in a field of it; they are counted from 0."""
    number, *rest = path
    numbered = {str(place): entry for place, entry in enumerate(entries)}
    if number not in numbered:
        raise UserError(f"{name}: no such entry; the list has {len(entries)}, counted from 0")
    if rest and not isinstance(numbered[number], Mapping):
        raise UserError(f"{name}: this entry has no fields, got {shown(numbered[number])}")
    placed = _placed(numbered[number], rest, words, more=more) if rest else words
    return [*{**numbered, number: placed}.values()]


def _saved_config(run_dir: str | None) -> Path:
    if run_dir is None:
        raise UserError("--resume: say which run with --run_dir DIR")
    saved = Path(run_dir) / "config.yaml"
    if not os.path.isfile(saved):
        raise UserError(f"--resume: {said(run_dir)} holds no run (no config.yaml); start it without --resume")
    return saved
