"""Ask a run's checkpoints about a prompt that somebody typed, and judge the answers as the run's evaluation does."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import ExitStack
from pathlib import Path

from grpo_jax.config.named import IN_PYTHON
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import Episode
from grpo_jax.rollout.rollout import collect
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.runs.evaluation import evaluate_texts
from grpo_jax.runs.loading import RunContext, load
from grpo_jax.runs.policy import START, restore_variables, run_config
from grpo_jax.runs.python_input import kept_prompts
from grpo_jax.tasks.task import Info

_HELD_VARIABLES = 2  # checkpoints in memory: the one that is asked and the one beside it


def checkpoint_names(run_dir: str | Path, wanted: str) -> list[str]:
    """Return the names of a run's checkpoints, newest first, and `START`; UserError unless `wanted` can be read."""
    run_config(run_dir)
    with Checkpoints(Path(run_dir) / "checkpoints", read_only=True) as checkpoints:
        if wanted != START:
            checkpoints.read_meta(wanted)
        return list(dict.fromkeys([wanted, *reversed(checkpoints.available()), START]))


class Asker:
    """A run that is loaded once, its judges included; checkpoints are restored when they are asked for.

    Attributes:
        ctx: The run. A judge that fails is an error, whatever its config says.
    """

    def __init__(self, run_dir: str | Path, info: Info, leaving: ExitStack):
        """Load the run of a directory; `leaving` closes its judges."""
        config = run_config(run_dir).replace(on_judge_error="stop")
        prompts = kept_prompts(RunDirectory(run_dir)) if config.data.prompts == IN_PYTHON else None
        self.ctx = load(config, info, prompts=prompts, leaving=leaving)
        self._held_out = [*self.ctx.test_rows, *self.ctx.validation_rows]
        loaded = self.ctx.policy.variables
        restore = functools.lru_cache(_HELD_VARIABLES)(functools.partial(restore_variables, loaded, run_dir))
        self._variables = lambda name: restore(name)[0]

    @property
    def draws(self) -> bool:
        """Whether texts are drawn."""
        return self.ctx.fns.render is not None

    def row(self, prompt: str, seed: int) -> Row:
        """Return the row of a prompt, with the columns and pictures of a held-out one of the same text.

        Its id is `seed`: noise and random numbers follow from it, those of a held-out prompt from its own id.
        """
        if not prompt.strip():
            raise UserError("prompt: expected a text, got an empty one")
        if not 0 <= seed < 2**32:
            raise UserError(f"seed: expected a number in [0, 2**32), got {seed}")
        same = [row for row in self._held_out if row.prompt == prompt]
        known = next((row for row in same if row.id == seed), same[0] if same else Row(seed, prompt))
        row = dataclasses.replace(known, id=seed)
        self.ctx.fns.encode([row])  # refuses one that is too long
        return row

    def write(self, row: Row, checkpoint: str, *, group: bool = False) -> list[Episode]:
        """Return a checkpoint's greedy episode, judged; with `group` those of a group as training samples it."""
        ctx = self._judging(row)
        rollout = collect(
            ctx.fns,
            ctx.samplers.training if group else ctx.samplers.greedy,
            self._variables(checkpoint),
            [row],
            key=ctx.key,
            iteration=None,
            work=ctx.work(1),
        )
        return rollout.episodes[0]

    def unchanged(self, row: Row) -> Episode | None:
        """Return the prompt as it is, judged in a rewrite's place; None where it is none."""
        texts = self.ctx.task_data.report.references([row]).get("unchanged")
        return evaluate_texts(self._judging(row), [row], texts).episodes[0] if texts else None

    def _judging(self, row: Row) -> RunContext:
        """Return the run with pictures kept; rewards that need columns, which a typed prompt lacks, may be missing."""
        fns = self.ctx.fns._replace(gallery=1)
        if not row.columns:
            fns = fns._replace(score=functools.partial(fns.score, missing=True))
        return self.ctx._replace(fns=fns)
