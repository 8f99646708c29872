"""The command line of a config: --config FILE, --section.field VALUE, --help, --print_config.

The task decides which dataclass it is: `CartPoleConfig` for `task: cartpole`, else `Config`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config import Config, from_dict
from grpo_jax.errors import UserError
from grpo_jax.tasks.cartpole.config import CartPoleConfig, cartpole_from_dict

DEFAULT_CONFIG = "prompt_enhancement_miniature"
DEFAULT_CARTPOLE_CONFIG = "cartpole_grpo"
FLAGS = ("--resume", "--deterministic", "--debug")
PLAN, MEMORY = "--plan", "--device_memory_gib"


def find_config(name: str) -> Path:
    """Finds a config: a file as named, else one that ships with the package (with or without .yaml).

    Raises:
        UserError: No such file; the message lists the configs that ship with the package.
    """
    if Path(name).exists() and not Path(name).is_dir():
        return Path(name)
    package = Path(__file__).parents[1]
    folders = [package / "configs", package.parent / "configs"]
    stem = Path(name).name.removesuffix(".yaml")
    # A mistyped path elsewhere must not find a shipped config of the same name.
    ours = Path(name).parent in (Path(), Path("configs"))
    for folder in folders if ours else ():
        candidate = folder / f"{stem}.yaml"
        if candidate.is_file():
            return candidate
    shipped = sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.yaml")})
    raise UserError(f"--config {name}: no such file; configs that ship with grpo_jax: {', '.join(shipped) or 'none'}")


def is_cartpole(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for CartPole: by --task, else by the file that --config names."""
    task = _value_of(arguments, "--task")
    name = _value_of(arguments, "--config")
    if task is None and name is not None:
        import yaml

        try:
            values = yaml.safe_load(find_config(name).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            return False  # the parser says what is wrong with the file
        task = values.get("task") if isinstance(values, dict) else None
    return task == "cartpole"


def make_parser(prog: str, kind: type = Config) -> Any:
    """The command line of a config: --config FILE, --section.field VALUE, --help, --print_config."""
    from jsonargparse import ActionConfigFile, ArgumentParser

    parser = ArgumentParser(
        prog=prog,
        description="Trains a policy with group-relative policy optimisation. Without --config it trains the "
        "miniature: a small real policy, Stable-Diffusion-3 pipeline and CLIP that ship with the package. "
        "--task cartpole has fields of its own: --task cartpole --help. With --plan it says what each device would "
        "hold and whether it fits, and trains nothing; --device_memory_gib 16,16,16 plans for devices not here.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file, or the name of a shipped config.")
    parser.add_class_arguments(kind, nested_key=None, as_group=False)
    return parser


def normalise_arguments(arguments: Sequence[str]) -> list[str]:
    """Finds shipped configs by name and lets flags stand without a value: `--resume` is `--resume=true`."""
    result: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument in FLAGS and (not pending or pending[0].lower() not in ("true", "false")):
            argument += "=true"
        elif argument == "--config" and pending:
            argument = f"--config={find_config(pending.pop(0))}"
        elif argument.startswith("--config="):
            argument = f"--config={find_config(argument.removeprefix('--config='))}"
        result.append(argument)
    return result


def parse(arguments: Sequence[str], prog: str = "python -m grpo_jax.train") -> Config | CartPoleConfig:
    """Reads the command line into a `Config`, or a `CartPoleConfig` if the task is that.

    Raises:
        UserError: Unknown field, wrong type, value out of range or missing file, named in one line.
        SystemExit: After --help and --print_config.
    """
    from jsonargparse import ArgumentError

    cartpole = is_cartpole(arguments)
    parser = make_parser(prog, CartPoleConfig if cartpole else Config)
    try:
        namespace = parser.parse_args(normalise_arguments(arguments))
        namespace.pop("config", None)
        return (cartpole_from_dict if cartpole else from_dict)(namespace.as_dict())
    except (ArgumentError, TypeError, ValueError) as error:
        raise UserError(" ".join(str(error).split())) from error


def arguments_with_defaults(arguments: Sequence[str]) -> list[str]:
    """Fills in the config: that of the run directory on --resume, else the task's default."""
    arguments = list(arguments)
    named = any(argument == "--config" or argument.startswith("--config=") for argument in arguments)
    helping = any(argument in ("-h", "--help") for argument in arguments)
    if named or helping:
        return arguments
    if any(argument in ("--resume", "--resume=true") for argument in arguments):
        run_dir = _value_of(arguments, "--run_dir")
        if run_dir is None:
            raise UserError("--resume: say which run with --run_dir DIR")
        saved = Path(run_dir) / "config.yaml"
        if not saved.is_file():
            raise UserError(f"--resume: {run_dir} holds no run (no config.yaml); start it without --resume")
        return [f"--config={saved}", *arguments]
    default = DEFAULT_CARTPOLE_CONFIG if is_cartpole(arguments) else DEFAULT_CONFIG
    return [f"--config={default}", *arguments]


def take_request(arguments: Sequence[str]) -> tuple[tuple[float, ...] | None, list[str]]:
    """Splits --plan and --device_memory_gib off a command line.

    Returns:
        GiB of each device, () for those of this machine, None where no plan is asked for; and the other arguments.

    Raises:
        UserError: The memory is no list of positive numbers, or comes without --plan.
    """
    rest, given, planning = [], None, False
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument == PLAN:
            planning = True
        elif argument == MEMORY:
            given = pending.pop(0) if pending else ""
        elif argument.startswith(f"{MEMORY}="):
            given = argument.removeprefix(f"{MEMORY}=")
        else:
            rest.append(argument)
    if given is not None and not planning:
        raise UserError(f"{MEMORY}: it says what {PLAN} is to plan for; add {PLAN}")
    try:
        gib = tuple(float(part) for part in given.split(",")) if given is not None else ()
    except ValueError:
        gib = (0.0,)
    if not all(0 < size < math.inf for size in gib):
        raise UserError(f"{MEMORY}: expected the GiB of each device, such as 16,16,16, got {given!r}")
    return (gib if planning else None), rest


def _value_of(arguments: Sequence[str], name: str) -> str | None:
    for position, argument in enumerate(arguments):
        if argument == name and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    return None
