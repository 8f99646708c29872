"""The training command, a thin shell over `run`.

python -m grpo_jax.train [--config FILE] [--seed N] [--run_dir DIR] [--resume] [--section.field VALUE …]
python -m grpo_jax.train … --plan [--device_memory_gib 16,16,16]
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from grpo_jax.config import Config
from grpo_jax.config.command_line import arguments_with_defaults, parse, take_request
from grpo_jax.errors import UserError, extras_named
from grpo_jax.runs.processes import refuse_several
from grpo_jax.tasks.cartpole.config import CartPoleConfig


@extras_named()
def run(
    config: Config | CartPoleConfig,
    *,
    prompts: Any = None,
    rewards: Sequence[Callable[..., Any]] | None = None,
) -> dict[str, Any]:
    """Trains a policy and leaves a run directory.

    Args:
        config: The run; config.run_dir must be set. A `CartPoleConfig` takes no prompts and no rewards.
        prompts: A list of prompts, or of records {"prompt": …, column: …}, or a `PromptSet`, in place of
            data.prompts.
        rewards: Reward functions in place of config.rewards, each with weight 1:
            reward(prompts, completions, **columns) → P·G numbers, None for a missing one.

    Returns:
        What summary.json holds, and "stopped": whether a signal ended the run early.

    Raises:
        UserError: A mistake in the config or the files it names, a package that is missing for it, or a judge that
            failed; checkpoints stay valid.
    """
    if config.run_dir is None:
        raise UserError("run_dir: expected a folder for the run, got null")
    if isinstance(config, CartPoleConfig):
        from grpo_jax.tasks.cartpole.command import run_cartpole

        return run_cartpole(config)
    from grpo_jax.reports.console import RunOutput
    from grpo_jax.runs.checkpoint import Checkpoints
    from grpo_jax.runs.experiment import Run, execute
    from grpo_jax.runs.loop import make_learner
    from grpo_jax.runs.parts import load_parts
    from grpo_jax.runs.signals import stop_requests
    from grpo_jax.training.memory_budget import within_budget

    clock = time.monotonic()
    with RunOutput(config) as output, stop_requests() as stop:
        parts = load_parts(config, say=output.part, prompts=prompts, rewards=rewards)
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
