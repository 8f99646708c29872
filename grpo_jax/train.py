"""The training command, a thin shell over `run`.

python -m grpo_jax.train [--config FILE] [--seed N] [--run_dir DIR] [--resume] [--section.field VALUE …]
python -m grpo_jax.train … --plan [--device_memory_gib 16,16,16]
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from grpo_jax.config import Config
from grpo_jax.config.command_line import arguments_with_defaults, parse, take_request
from grpo_jax.errors import UserError
from grpo_jax.runs.processes import refuse_several
from grpo_jax.tasks.cartpole.config import CartPoleConfig


def run(config: Config | CartPoleConfig, *, prompts: Any = None, rewards: Any = None) -> dict[str, Any]:
    """Trains a policy and leaves a run directory.

    Args:
        config: The run; config.run_dir must be set. A `CartPoleConfig` takes no prompts and no rewards.
        prompts: In place of data.prompts: a list of prompts, or of records {"prompt": …, column: …} as a .jsonl file
            holds them ("split" included), a pandas DataFrame or a `datasets.Dataset` of such records, or a
            `PromptSet`. They are kept in prompts.jsonl of the run directory, where --resume and evaluate find them.
        rewards: In place of config.rewards: functions reward(prompts, completions, **columns) → P·G numbers, None for
            a missing one; a list of them, each called by its own name, or {name: function}. The entry of config.rewards
            with that name, if there is one, sets its weight, condition and options; otherwise it has weight 1. Every
            entry must have its function. --resume and evaluate find functions at the top level of a module again,
            others must be given again.

    Returns:
        What summary.json holds, and "stopped": whether a signal ended the run early.

    Raises:
        UserError: A mistake in the config or the files it names, or a judge that failed; checkpoints stay valid. A
            run directory in which nothing was saved yet is taken back.
    """
    if config.run_dir is None:
        raise UserError("run_dir: expected a folder for the run, got null")
    if isinstance(config, CartPoleConfig):
        from grpo_jax.tasks.cartpole.command import run_cartpole

        return run_cartpole(config)
    from grpo_jax.reports.console import RunOutput
    from grpo_jax.runs.checkpoint import Checkpoints
    from grpo_jax.runs.experiment import Run, execute
    from grpo_jax.runs.given import keep_prompts, take
    from grpo_jax.runs.loop import make_learner
    from grpo_jax.runs.parts import load_parts
    from grpo_jax.runs.signals import stop_requests
    from grpo_jax.training.memory_budget import within_budget

    clock = time.monotonic()
    given = take(config, prompts, rewards)
    with RunOutput(given.config) as output, stop_requests() as stop:
        keep_prompts(given, output.directory, output.note)
        parts = load_parts(given.config, say=output.part, prompts=given.prompts, rewards=given.rewards)
        parts = within_budget(parts, output.part)
        learner = make_learner(parts)
        with Checkpoints(output.directory.checkpoints, keep=config.training.keep_checkpoints) as checkpoints:
            return execute(Run(parts, learner, checkpoints, output, clock), stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, also when stopped by a signal after saving; 2 for a user's mistake.

    With --plan 0 says that the run fits, 1 that it does not.
    """
    from grpo_jax.runs.parts import guarded

    given = list(sys.argv[1:] if arguments is None else arguments)

    def command() -> int:
        planned, rest = take_request(given)
        config = parse(arguments_with_defaults(rest))
        if planned is not None:
            from grpo_jax.planning.command import show_plan

            return show_plan(config, planned)
        refuse_several()
        if config.run_dir is None:
            config = dataclasses.replace(config, run_dir=f"runs/{config.task}-{time.strftime('%Y%m%d-%H%M%S')}")
        run(config)
        return 0

    return guarded(command, debug="--debug" in given or "--debug=true" in given)


if __name__ == "__main__":
    sys.exit(main())
