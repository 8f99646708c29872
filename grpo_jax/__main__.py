"""All commands under one name: `grpo train …` is `python -m grpo_jax.train …`, and `python -m grpo_jax train …`."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from grpo_jax.errors import UserError, exit_on_interrupt, exit_process, run_cli, short_name, version

if __name__.endswith("__main__"):  # also of the script `grpo`; before slow imports
    exit_on_interrupt()

from grpo_jax import demo, evaluate, export, predict, recommend, train
from grpo_jax.cartpole import __main__ as cartpole
from grpo_jax.planning import PLAN

_HELP = """grpo COMMAND …, or python -m grpo_jax COMMAND …

  train       train a policy: --config FILE, --task NAME, --run_dir DIR, --section.field VALUE
  resume      continue a run: resume DIR, --training.max_steps 200
  plan        show a run's memory on each device, with the options of train: --device_memory_gib 80,80
  evaluate    measure a run's policy on its held-out prompts: --run DIR
  export      write a run's policy as a Hugging Face folder: --run DIR --out FOLDER
  predict     answer prompts with a run's policy: --run DIR --prompt TEXT, or --file FILE
  demo        serve a page on this machine to try a run's policy: --run DIR
  recommend   recommend items with a run's policy: --run DIR --history "title | title"
  cartpole    train on CartPole, to see the algorithms learn in a minute: --algorithm grpo|gdpo|ppo

grpo COMMAND --help lists the options. In Python: from grpo_jax import make_config, run, load_rewriter"""
_MODULES = (demo, evaluate, export, predict, recommend)
_OTHERS = {"cartpole": cartpole.main} | {module.__name__.rpartition(".")[2]: module.main for module in _MODULES}
_COMMANDS = ("train", "resume", "plan", *_OTHERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by the first word; return its exit code, or 2 for an unknown command."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name == "train":
        return train.main(rest)
    if name == "plan":
        return train.main([PLAN, *rest])
    if name == "resume" and rest and (rest[0] in ("-h", "--help") or not rest[0].startswith("-")):
        return train.main(["--resume", *([] if rest[0].startswith("-") else ["--run_dir"]), *rest])
    if name in _OTHERS:
        return _OTHERS[name](rest)
    if name in ("-h", "--help", "help", "--version"):
        print(version() if name == "--version" else _HELP)
        return 0
    return run_cli(lambda _: _refuse(name), ())


def _refuse(name: str) -> NoReturn:
    if name == "resume":
        raise UserError("resume: give the run's folder, as in resume runs/my_run")
    near = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(_COMMANDS)}"
    raise UserError(f"{short_name(name)}: no such command; {hint}")


def command() -> NoReturn:
    """Run `main` as a process, with the working directory on the import path, like `python -m`."""
    if os.getcwd() not in (path or os.getcwd() for path in sys.path[:1]):
        sys.path.insert(0, os.getcwd())
    exit_process(main())


if __name__ == "__main__":
    command()
