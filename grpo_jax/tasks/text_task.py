"""The task of anyone's own rewards: what the policy writes is judged as it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from grpo_jax.config.fields import may_change, require
from grpo_jax.config.named import load_object
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import all_rows, row_sizes
from grpo_jax.rollout.episodes import Respond
from grpo_jax.rollout.isolated import ENVIRONMENT, isolate_environment
from grpo_jax.rollout.prompts import prompts_of
from grpo_jax.rollout.texts import Reading, as_written, continued
from grpo_jax.tasks.task import Task, TaskData, TaskSetup, TurnEnvironment


@dataclass(frozen=True)
class Text(Task):
    """Any Hugging Face folder, prompts from a file, rewards by import path.

    Args:
        environment: What answers the policy between its turns (sampling.turns), package.module:function or
            file.py:function: respond(rows, episodes) → an answer for each, its text alone, or None where it is done.
        pictures: Whether the environment shows pictures, which prompts need not: loads the policy's vision tower.
        isolated: Call the environment in a process of its own: one that crashes, hangs beyond judge_timeout or takes
            all memory ends that process alone, and the next call gets a new one.
    """

    environment: str = ""
    pictures: bool = False
    isolated: bool = may_change(False)

    defaults: ClassVar[Mapping[str, Any]] = {"sampling": {"max_new_tokens": 128}}  # room for an answer

    def check(self, config: Config) -> None:
        """Refuse an environment without turns, and turns without an environment."""
        turns = config.sampling.turns
        require(not self.environment or turns > 1, "sampling.turns", "at least 2 with task.environment", turns)
        require(
            bool(self.environment) or turns == 1, "task.environment", "a function with sampling.turns above 1", None
        )

    def reader(self, config: Config) -> Callable[[str, str], Reading]:
        """Return completions as they are; a continuation with its prompt."""
        return continued if config.data.form == "append" else as_written

    def count_pictures(self, config: Config) -> tuple[int, int]:
        """Count those of the prompts, where they are at hand."""
        section = config.data
        if not os.path.exists(section.prompts):
            return 0, 0
        return int(row_sizes(all_rows(prompts_of(section)))["pictures"].max()), 0

    def load(self, setup: TaskSetup) -> TaskData:
        """Load the prompts."""
        section, prompts = setup.config.data, setup.prompts
        if prompts is None:
            require(bool(section.prompts), "data.prompts", "a .jsonl, .csv, .txt or .parquet file", section.prompts)
            prompts = prompts_of(section)
        return TaskData(
            prompts,
            environment=TurnEnvironment(
                self._respond(setup.config) if self.environment else None, shows_pictures=self.pictures
            ),
        )

    def _respond(self, config: Config) -> Respond:
        if self.isolated:
            return isolate_environment(self.environment, config.judge_timeout or None)
        respond = load_object(self.environment, ENVIRONMENT)
        if not callable(respond):
            raise UserError(f"environment {self.environment!r}: it is a {type(respond).__name__}, not a function")
        return cast(Respond, respond)
