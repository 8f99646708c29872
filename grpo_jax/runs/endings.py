"""The ends of a run: no reward, no finite update, and failures, each with its remedy."""

from __future__ import annotations

from grpo_jax.config.run import Config
from grpo_jax.errors import StageError, StageTimeout, StopRun, UserError
from grpo_jax.rollout.rewards import join_names
from grpo_jax.runs.session import Progress
from grpo_jax.training.update import PATIENCE

MISSING_ITERATIONS = 3
"""Iterations in a row without a reward, after which a run stops."""


def rewards_missing_reason(progress: Progress, run_dir: str | None) -> str:
    """Return the reason to end a run without rewards (`reward_streaks`), recently or in a short run; else "".

    All rewards must be missing, since a single reward may apply to few prompts.
    """
    streaks, done, iterations = progress.notes.streaks, progress.iteration, progress.iterations
    shortest = min(streaks.values(), default=0)
    if not shortest or shortest < min(MISSING_ITERATIONS, iterations):
        return ""
    return (
        f"no completion got a reward in {shortest} iterations in a row ({join_names(list(streaks))}). Saved after "
        f"iteration {done}; fix the rewards or their judges, and {_again(run_dir, done < iterations)}"
    )


def updates_skipped_reason(
    skipped: int, updates: int, progress: Progress, run_dir: str | None, *, renderer: bool = False
) -> str:
    """Return the reason to end a run if all updates of a few iterations, or most of a short run, were skipped; else "".

    `updates` is their number per iteration. They are the policy's, or the `renderer`'s.
    """
    done, iterations = progress.iteration, progress.iterations
    if skipped < max(1, min(PATIENCE * updates, iterations * updates - 1)):
        return ""
    export = f"python -m grpo_jax.export --run {run_dir} --checkpoint {done} --out FOLDER, --policy.path FOLDER"
    rate = "judges.renderer.train.learning_rate" if renderer else f"optimizer.learning_rate and these weights: {export}"
    return (
        f"the {'renderer' if renderer else 'policy'}'s loss or its gradient was not finite in {skipped} updates in a "
        f"row; they were left out. Saved after iteration {done}, with the weights before them. If a reward or a prompt "
        f"is at fault, fix it and {_again(run_dir, done < iterations)}; else give a new run a lower {rate}"
    )


def with_remedy(error: StageError | StopRun, iteration: int | None, config: Config, *, resumable: bool) -> Exception:
    """Return the error that ended a run as one line with its remedy; `iteration` is the saved one.

    An error of the policy's own stage stays unchanged.
    """
    saved = "Nothing was trained yet" if iteration is None else f"Saved after iteration {iteration}"
    again = _again(config.run_dir, resumable)
    cause = error if isinstance(error, StopRun) else error.__cause__
    named = cause if isinstance(cause, StopRun | UserError) else error  # its message already names the reward
    line = " ".join(str(named).split())
    if isinstance(cause, StopRun):
        return StopRun(f"{line}. {saved}; {again} when that is fixed")
    assert isinstance(error, StageError)
    if error.stage == "sample":  # not a reward's failure
        return error if named is error else UserError(f"{line}. {saved}; {again} when that is fixed")
    at_fault = {"render": "the renderer", "env": "the environment"}.get(error.stage, "the reward")
    hint = "" if config.on_judge_error == "missing" else ", or choose --on_judge_error missing"
    hint += "" if resumable else "; --debug shows the traceback"
    if isinstance(error, StageTimeout):
        pool = "{kind: function, name: FILE.py:FUNCTION, pool: {batch_timeout: 60}}"
        actor = f"run it in a Ray actor, which can be killed: --judges.NAME '{pool}' --rewards NAME (docs/rewards.md)"
        hint = f", give it more time (--judge_timeout), or {actor}"
    return UserError(f"{line}. {saved}; fix {at_fault} and {again}{hint}")


def _again(run_dir: str | None, resumable: bool) -> str:
    return f"continue with --resume --run_dir {run_dir}" if resumable else "start again"
