"""The task for environment classes, which supply prompts and rewards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from grpo_jax.config.fields import PositiveCount, require
from grpo_jax.config.named import load_object
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError, short_name, short_repr
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env_adapters import EnvRunner
from grpo_jax.rollout.prompts import make_prompt_set
from grpo_jax.rollout.reward_registry import TaskRewards
from grpo_jax.rollout.rewards import Reward
from grpo_jax.tasks.task import Task, TaskData, TaskSetup, TurnEnvironment, Vocabulary

_HELD_OUT = 64  # episodes for validation, and as many for testing


class Environment(Task):
    """Episodes of environments of your own: reset(seed) → prompt, step(text) → (observation, reward, done)."""

    environment: dict[str, Any] | list[str] | str = []
    """Class of the environment, package.module:Class or file.py:Class, made without arguments for each episode.
    Several as a list, or as {class: share of the prompts}."""
    seeds: PositiveCount = 1024
    """Number of training seeds, which repeat; validation and test have 64 further seeds each."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling": {"turns": 4, "max_new_tokens": 64, "max_observation_tokens": 64},
        "algorithm": {"turn_advantage": "return"},
    }

    def check(self, config: Config) -> None:
        """Refuse invalid shares, and prompts besides those of the environments."""
        super().check(config)
        for name, share in self.environment.items() if isinstance(self.environment, dict) else ():
            fits = isinstance(share, int | float) and 0 < share < math.inf
            require(fits, "task.environment", f"a share above 0 of {short_name(name)}", share)
        for name in ("prompts", "validation", "test"):
            given = getattr(config.data, name)
            require(not given, f"data.{name}", "nothing: environments bring their own", given)

    def load(self, setup: TaskSetup) -> TaskData:
        """Get the prompts from the environments."""
        if setup.prompts is not None:
            raise UserError("prompts: expected none, environments bring their own")
        require(bool(self.environment), "task.environment", "a class, such as my_env.py:Env", None)
        names = [self.environment] if isinstance(self.environment, str) else [*self.environment]
        classes = {name.rpartition(":")[2]: load_object(name, "environment") for name in names}
        if len(classes) < len(names):
            raise UserError(f"task.environment: expected classes of different names, got {', '.join(names)}")
        runner = EnvRunner(classes)
        counts = (self.seeds, _HELD_OUT, _HELD_OUT)
        kinds, seeds = [*classes], itertools.count()
        parts = [[_row(runner, kinds[kind], next(seeds)) for kind in self._kinds(count)] for count in counts]
        words = [word for made in classes.values() for word in getattr(made, "words", ())]
        return TaskData(
            make_prompt_set(*parts),
            rewards=_rewards(runner, kinds),
            source=f"{', '.join(kinds)}: {self.seeds} episodes",
            environment=TurnEnvironment(
                runner.step if setup.config.sampling.turns > 1 else None, start_episode=_refuse_prompt
            ),
            vocabulary=Vocabulary(lambda: [*dict.fromkeys(words)]) if words else None,
        )

    def _kinds(self, count: int) -> Sequence[int]:
        """Return each episode's environment, distributed as evenly as the shares allow."""
        named = self.environment
        given = [*named.values()] if isinstance(named, dict) else [1.0] * (1 if isinstance(named, str) else len(named))
        shares = np.array(given)
        due = np.outer(np.arange(1, count + 1), shares / shares.sum())
        given, kinds = np.zeros(len(shares)), []
        for row in due:
            kinds.append(int(np.argmax(row - given)))
            given[kinds[-1]] += 1
        return kinds


def _row(runner: EnvRunner, kind: str, seed: int) -> dict[str, object]:
    reset = f"task.environment: {kind}.reset({seed})"
    prompt = runner.prompt(kind, seed, reset)
    if not (prompt.strip() if isinstance(prompt, str) else isinstance(prompt, list | tuple) and prompt):
        raise UserError(f"{reset} must return the prompt, a text or chat messages, got {short_repr(prompt)}")
    return {"prompt": prompt, "environment": kind, "seed": seed}


def _refuse_prompt(row: Row) -> Row:
    raise UserError("task.environment: environments make their own prompts")


def _rewards(runner: EnvRunner, kinds: Sequence[str]) -> TaskRewards:
    """Return the reward of a step, and one for each kind of environment if there are several."""
    alone = {f"reward_{kind}": _of_kind(runner.reward, kind) for kind in kinds} if len(kinds) > 1 else {}
    return TaskRewards(
        {"reward": runner.reward, **alone}, defaults=(RewardSection(name="reward"),), eval_always=tuple(alone)
    )


def _of_kind(reward: Reward, kind: str) -> Callable[..., list[float | None]]:
    def of_kind(
        prompts: Sequence[str], completions: Sequence[str], *, environment: Sequence[str], **columns: object
    ) -> list[float | None]:
        values = reward(prompts, completions, environment=environment, **columns)
        return [value if own == kind else None for value, own in zip(values, environment, strict=True)]

    return of_kind
