"""The command line of a config: --config FILE, --section.field VALUE, --help [SECTION], --print_config."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from grpo_jax.config.fields import KEY, Argument, build, is_text, listed, merged, to_yaml, walk
from grpo_jax.config.files import DEEPEST, LONGEST, Fields, Values, read_text, read_yaml
from grpo_jax.config.other_names import hint_for
from grpo_jax.config.removed import REMOVED
from grpo_jax.config.run import find_task, with_defaults
from grpo_jax.errors import UserError, short_name, short_repr

DEFAULT_CONFIG = "prompt_enhancement_miniature"
FLAGS = ("--resume", "--deterministic")
"""Options that may stand without a value: `--resume` is `--resume=true`."""
_ALONE = ("--print_config", "--debug")
_OTHERS = (*_ALONE, "--plan", "--version", "--help")
_ASKED = ("config", "help", "print_config", "debug")
"""Options that are no fields."""
_JUDGE = re.compile(rf"judges\.\w+(\.{KEY})?")
"""An option that says the kind of a judge."""
_SEVERAL = "--rewards"
"""The option that takes several words."""


def parse(arguments: Sequence[str], command: str = "train") -> Any:
    """Read the command line into a `Config`, or the task's own class of config.

    Later values win: the task's defaults, the files that --config names, the arguments. Without --config the file is
    the run directory's config.yaml on --resume, else the task's default. `command` is the one that --help is about.
    Raises UserError, with each mistake in one line, and SystemExit after --help and --print_config.
    """
    given = list(_options(arguments))
    asked = {name: [value for other, value in given if other == name] for name in _ASKED}
    own = [(name, value) for name, value in given if name not in asked]
    files = [find_config(name) for name in asked["config"]] or _default_files(dict(own), bool(asked["help"]))
    neutral = {"task": "text"} if asked["help"] and not files else {}
    values = reduce(merged, map(read_config, files), neutral)
    task = [(name, value) for name, value in own if name in ("task", f"task.{KEY}")]
    values = with_defaults(_assigned(values, task))
    kind = find_task(values["task"]).config
    judges = _assigned(values, [(name, value) for name, value in own if _JUDGE.fullmatch(name)])
    values = _assigned(values, own, {field.path for field in walk(kind, judges) if is_text(field.info.annotation)})
    if asked["help"]:
        from grpo_jax.config.help import show_help

        shown = show_help(asked["help"][0], kind, values, command)
    else:
        config = build(kind, values)
        if not asked["print_config"]:
            return config
        shown = to_yaml(config).rstrip("\n")
    print(shown)
    raise SystemExit(0)


def find_config(name: str) -> Path:
    """Find a config: a file as named, else one that ships with the package (with or without .yaml)."""
    if os.path.exists(name) and not os.path.isdir(name):
        return Path(name)
    stem, shipped = Path(name).name.removesuffix(".yaml"), shipped_configs()
    if Path(name).parent in (Path(), Path("configs")) and stem in shipped:  # a mistyped path finds no shipped config
        return shipped[stem]
    left = REMOVED.get(f"config.{stem}")
    hint = f"it {left}" if left else f"configs that ship with grpo_jax: {listed(shipped)}"
    raise UserError(f"--config {short_name(name)}: no such file; {hint}")


def shipped_configs() -> dict[str, Path]:
    """Return the configs that ship with the package, by name: those of the wheel, or of a checkout."""
    package = Path(__file__).parents[1]
    folders = [package.parent / "configs", package / "configs"]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


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


def load_config(path: Path) -> Any:
    """Return the config that a YAML file holds, over the defaults of its task; UserError as `parse`."""
    values = with_defaults(read_config(path))
    return build(find_task(values["task"]).config, values)


def _default_files(own: Mapping[str, str], helping: bool) -> list[Path]:
    run_dir, task = own.get("run_dir"), own.get("task", own.get(f"task.{KEY}"))
    if own.get("resume") == "true" and (run_dir is not None or not helping):
        if run_dir is None:
            raise UserError("--resume: say which run with --run_dir DIR")
        if not os.path.isfile(Path(run_dir) / "config.yaml"):
            raise UserError(f"--resume: {short_name(run_dir)} holds no run (no config.yaml); start it without --resume")
        return [Path(run_dir) / "config.yaml"]
    if task is None:
        return [] if helping else [find_config(DEFAULT_CONFIG)]
    default = find_task(task).default_config
    return [] if default is None else [find_config(default)]


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each option; several words of a list with commas between them."""
    pending = list(arguments)
    while pending:
        argument, equals, value = pending.pop(0).partition("=")
        name = "--help" if argument == "-h" else argument
        if not name.startswith("--") or name.count(".") > DEEPEST:
            raise UserError(f"{short_name(argument)}: expected an option, such as --config FILE")
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
    """Return the line about an option without a value: what it is called here, if it is another program's."""
    if other := hint_for(option.rpartition(".")[2].removeprefix("--")):
        return f"{short_name(option)}: no such option; {other}"
    near = difflib.get_close_matches(option, (*FLAGS, *_OTHERS), n=1, cutoff=0.75)
    return f"{short_name(option)}: " + (f"no such option; did you mean {near[0]}?" if near else "expected a value")


def _assigned(values: Values, arguments: Sequence[tuple[str, str]], texts: Collection[str] = ()) -> Fields:
    """Lay arguments over values, kinds first: null, lists and mappings are YAML, all else is text for its field.

    `texts` names the fields that hold text, which a bracket may begin.
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
        for part in reversed(name.split(".")):
            value = {part: value}
        values = merged(values, value)
    return dict(values)
