"""The task for environment classes, which supply prompts and rewards."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from grpo_jax.config.fields import PositiveCount, require
from grpo_jax.config.named import load_object
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError, short_repr
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env_adapters import EnvRunner
from grpo_jax.rollout.prompts import make_prompt_set
from grpo_jax.tasks.task import Task, TaskData, TaskSetup, TurnEnvironment, Vocabulary

_HELD_OUT = 64  # episodes for validation, and as many for testing


def _refuse_shares(value: Any) -> Any:
    paths = value.values() if isinstance(value, Mapping) else [value]
    if all(isinstance(path, str) for path in paths):
        return value
    raise ValueError(
        "expected a class, or {name: class} for several, which take turns, in place of a list or shares (give a class "
        f"two names for twice as many prompts); got {short_repr(value)}"
    )


class Environment(Task):
    """Episodes of environments of your own: reset(seed) → prompt, step(text) → (observation, reward, done)."""

    environment: Annotated[dict[str, str] | str, BeforeValidator(_refuse_shares)] = ""
    """Class of the environment, package.module:Class or file.py:Class, made without arguments for each episode.
    Several as {name: class}: their prompts take turns, and a row's column "environment" is the name."""
    seeds: PositiveCount = 1024
    """Number of training seeds, which repeat; validation and test have 64 further seeds each."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling": {"turns": 4, "max_new_tokens": 64, "max_observation_tokens": 64},
        "algorithm": {"turn_advantage": "return"},
    }

    def check(self, config: Config) -> None:
        """Refuse prompts besides those of the environments."""
        super().check(config)
        for name in ("prompts", "validation", "test"):
            config.require(not getattr(config.data, name), f"data.{name}", "nothing: environments bring their own")

    def load(self, setup: TaskSetup) -> TaskData:
        """Get the prompts from the environments."""
        if setup.prompts is not None:
            raise UserError("prompts: expected none, environments bring their own")
        require(bool(self.environment), "task.environment", "a class, such as my_env.py:Env", None)
        paths = self.environment
        if isinstance(paths, str):
            paths = {paths.rpartition(":")[2]: paths}
        classes = {kind: load_object(path, "environment") for kind, path in paths.items()}
        runner = EnvRunner(classes)
        counts = (self.seeds, _HELD_OUT, _HELD_OUT)
        kinds, seeds = [*classes], itertools.count()
        parts = [
            [_row(runner, kind, next(seeds)) for kind in itertools.islice(itertools.cycle(kinds), count)]
            for count in counts
        ]
        words = [word for made in classes.values() for word in getattr(made, "words", ())]
        return TaskData(
            make_prompt_set(*parts),
            rewards=runner.rewards(kinds),
            source=f"{', '.join(kinds)}: {self.seeds} episodes",
            environment=TurnEnvironment(
                runner.step if setup.config.sampling.turns > 1 else None, start_episode=_refuse_prompt
            ),
            vocabulary=Vocabulary(lambda: [*dict.fromkeys(words)]) if words else None,
        )


def _row(runner: EnvRunner, kind: str, seed: int) -> dict[str, object]:
    reset = f"task.environment: {kind}.reset({seed})"
    prompt = runner.prompt(kind, seed, reset)
    if not (prompt.strip() if isinstance(prompt, str) else isinstance(prompt, list | tuple) and prompt):
        raise UserError(f"{reset} must return the prompt, a text or chat messages, got {short_repr(prompt)}")
    return {"prompt": prompt, "environment": kind, "seed": seed}


def _refuse_prompt(row: Row) -> Row:
    raise UserError("task.environment: environments make their own prompts")
