"""`python -m grpo_jax.cartpole [--algorithm grpo|gdpo|ppo] [--out DIR]`: train on CartPole, without torch.

`--evaluate DIR` measures the parameters that a training wrote.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from grpo_jax.cartpole.settings import SETTINGS
from grpo_jax.config.fields import require
from grpo_jax.errors import UserError, command, exit_process, one_line, run_parser

_MOST_SEEDS = 10_000


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    description = "Balance a pole: train seeds in parallel with GRPO, GDPO or PPO, compiled as one function."
    parser = run_parser("cartpole", description, reads_run=False)
    add = parser.add_argument
    add("--algorithm", choices=SETTINGS, help="Default: grpo.")
    add("--objectives", metavar="NAMES", help="Rewards of a step: upright,centred (default: upright, with gdpo both).")
    add("--condition", type=int, metavar="STEPS", help="Count centred only in episodes as long (default: 0).")
    add("--seeds", type=int, metavar="COUNT", help="Number of seeds (default: 10).")
    add("--seed", type=int, metavar="SEED", help="First seed (default: 0).")
    defaults = ", ".join(f"{name} {settings.iterations}" for name, settings in SETTINGS.items())
    add("--iterations", type=int, metavar="COUNT", help=f"Iterations (default: {defaults}).")
    add("--out", metavar="DIR", help="New folder for metrics.jsonl, curve.svg and parameters/.")
    add("--evaluate", metavar="DIR", help="Measure the parameters in a folder of --out instead of training.")
    return parser


def _cartpole(options: argparse.Namespace) -> None:
    chosen = {name: value for name, value in vars(options).items() if value is not None and name != "debug"}
    evaluated, out = chosen.pop("evaluate", None), chosen.pop("out", None)
    if evaluated is not None and (others := [*chosen, *(["out"] if out is not None else [])]):
        raise UserError(f"--{others[0]}: leave it out with --evaluate, which trains nothing")
    seeds, seed = chosen.pop("seeds", 10), chosen.pop("seed", 0)
    require(1 <= seeds <= _MOST_SEEDS, "seeds", f"1 to {_MOST_SEEDS:,}", seeds)
    require(0 <= seed <= 2**31 - 1 - seeds, "seed", "a number in [0, 2^31), with all seeds after it", seed)
    if "objectives" in chosen:
        chosen["objectives"] = tuple(chosen["objectives"].split(","))
    settings = dataclasses.replace(SETTINGS[chosen.pop("algorithm", "grpo")], **chosen)
    from grpo_jax.cartpole import program  # starts JAX
    from grpo_jax.runs.compile_cache import enable_compile_cache

    enable_compile_cache()
    if evaluated is not None:
        return program.measure_saved(Path(evaluated))
    try:
        program.train(settings, seed, seeds, None if out is None else Path(out))
    except OSError as error:
        raise UserError(f"--out: cannot write there ({one_line(error)})") from error


main = command(make_parser, _cartpole)

if __name__ == "__main__":
    exit_process(main())
