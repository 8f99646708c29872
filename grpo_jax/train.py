"""The training command, a thin wrapper of `run`: `python -m grpo_jax.train --help` lists its options."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from grpo_jax.errors import (
    UserError,
    exit_on_interrupt,
    exit_process,
    extras_named,
    quiet_libraries,
    run_cli,
    short_repr,
    version,
)

if __name__ == "__main__":  # before slow imports
    exit_on_interrupt()

from grpo_jax.config.command_line import parse
from grpo_jax.config.run import Config
from grpo_jax.planning import take_request

if TYPE_CHECKING:
    from grpo_jax.runs.session import Callback


def run(
    config: Config,
    *,
    prompts: Any = None,
    rewards: Any = None,
    on_iteration: Callback | None = None,
    on_validation: Callback | None = None,
    on_checkpoint: Callback | None = None,
) -> dict[str, Any]:
    """Train a policy and leave a run directory.

    Args:
        config: The config from `make_config`; its run_dir must be set.
        prompts: Replaces data.prompts: a list of prompts, or of records {"prompt": …, column: …} as in a .jsonl file
            (also with "split"), a pandas DataFrame or a `datasets.Dataset` of such records, or a `PromptSet`. They are
            stored in prompts.jsonl of the run directory, for --resume and evaluate. NumPy scalars become Python's; a
            warning names a column that has neither JSON nor a Python literal, and then both need prompts again.
        rewards: Replaces config.rewards: functions reward(prompts, completions, **columns) → P·G numbers, None for a
            missing one. It is a list, with the functions' own names, or {name: function}. An entry of config.rewards
            with the same name sets weight, condition, options and messages; otherwise the weight is 1. Every entry
            must have a function. --resume and evaluate can import functions at the top level of a module; others must
            be passed again.
        on_iteration: Called with a `runs.session.IterationEvent` when an iteration's metrics are written. Each callback
            returns None or False to continue, or True to stop like a signal: the state is saved for --resume.
        on_validation: Called after on_iteration, if the iteration was validated.
        on_checkpoint: Called when a checkpoint is on disk; the run waits for its writing.

    Returns:
        The contents of summary.json, and "stopped": whether a signal, a callback or training.max_hours ended the run
        early. With several processes (docs/scaling.md), each returns its own.

    Raises:
        UserError: A mistake in the config or its files, a missing package, or a failed judge; checkpoints stay valid. A
            run directory without anything saved is removed.
    """
    quiet_libraries()
    try:
        if not isinstance(config, Config):
            raise UserError(f"config: expected that of make_config(…), got {short_repr(config)}")
        return _run(config, (on_iteration, on_validation, on_checkpoint), prompts, rewards)
    except UserError as error:
        error.args = tuple(map(_in_python, error.args))
        raise error.with_traceback(None) from None  # show only the line, not the frames of this package


def _in_python(line: object) -> str:
    """Return an error's line with Python's words in place of the command's options."""
    text = str(line).replace("; --debug shows the traceback", "").replace("--resume --", "resume=True and --")
    return re.sub(r"--(?=run_dir|on_judge_error|judge_timeout|\w+\.)", "", text.replace("--resume", "resume=True"))


@extras_named()
def _run(
    config: Config, callbacks: tuple[Callback | None, ...] = (), prompts: Any = None, rewards: Any = None
) -> dict[str, Any]:
    if config.run_dir is None:
        raise UserError("run_dir: expected a folder for the run, got null")
    from grpo_jax.reports.output import open_output
    from grpo_jax.runs.session import Callbacks
    from grpo_jax.runs.trainer import train

    return train(config, open_output, prompts=prompts, rewards=rewards, callbacks=Callbacks(*callbacks))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, also after a saved stop by a signal; 2 for a user's mistake.

    With --plan, 0 means that the run fits, 1 that it does not.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--version" in words:
        print(version())
        return 0

    def act(words: list[str]) -> int:
        request, rest = take_request(words)
        config = parse(rest, "plan" if request is not None else "resume" if "--resume" in rest else "train")
        if request is not None:
            from grpo_jax.planning.memory import show_plan

            return show_plan(config, request)
        if config.run_dir is None:
            name = config.model_dump()["task"]["kind"].rpartition(":")[2]
            config = config.replace(run_dir=f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        _run(config)
        return 0

    return run_cli(act, words, silent=_is_other_process)


def _is_other_process() -> bool:
    """Return whether this is one of several processes, but not the first; all read the same command."""
    if not {"JAX_PROCESS_ID", "SLURM_PROCID"} & os.environ.keys():
        return False  # avoids importing JAX, which takes a second
    from grpo_jax.runs.processes import announced

    with suppress(UserError):
        return announced()[1] > 0
    return False


if __name__ == "__main__":
    exit_process(main())
