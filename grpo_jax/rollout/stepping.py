"""Environments that are classes: reset(seed) → prompt, step(text) → (reply, reward, done)."""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from grpo_jax.errors import UserError, failures_as, is_own_doing, one_line
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.episodes import Episode, Observation
from grpo_jax.rollout.rewards import as_number, finished

Prompt = str | list[dict[str, Any]]
"""A text, or a conversation as chat messages."""

Stepped = tuple[str | Observation | None, float | None, bool]
"""(reply, reward, done)."""

_STEPS, _WAITING = 65_536, 4_096  # most remembered results of steps, and environments after their last step


class SteppedEnvironment(Protocol):
    """One episode. What follows on a seed and on the texts that it was given is always the same.

    Both methods may be `async def`.
    """

    def reset(self, seed: int) -> Prompt | Awaitable[Prompt]:
        """Begin the episode of a seed, and return its prompt."""
        ...

    def step(self, text: str) -> Stepped | Awaitable[Stepped]:
        """Take what the policy wrote: the reply, the reward of it (None for none), and whether this is the end."""
        ...


class Step(NamedTuple):
    """What one step returned."""

    reply: str | Observation | None
    reward: float | None
    done: bool


Environment = TypeVar("Environment", bound=SteppedEnvironment)


class EnvRunner(Generic[Environment]):
    """Steps environments along the episodes of a rollout.

    Nothing else remembers where an episode stands: the environment of an episode that is asked for its next step is
    at hand, or is made again and led through the texts of the episode, as after a resume. One that raises fails its
    own episode alone: the exception stands in place of its answer and of its reward.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Environment]], seed: str = "seed"):
        """Environments by kind, which rows have as a column "environment", and the name of their seeds' column."""
        self._makers = makers
        self._seed = seed
        self._steps: OrderedDict[tuple, Step | BaseException] = OrderedDict()
        self._waiting: OrderedDict[tuple, Environment] = OrderedDict()

    def prompt(self, kind: str, seed: int) -> Prompt:
        """Return what the episode of a seed begins with."""
        return finished(awaited(self._makers[kind]().reset(seed)))

    def step(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Observation | str | BaseException | None]:
        """Reply to the last text of each episode; None if it is done."""
        texts = [tuple(turn.completion for turn in episode.turns) for episode in episodes]
        places = [(row.columns["environment"], row.columns[self._seed]) for row in rows]
        steps = self._taken(places, texts)
        return [step if isinstance(step, BaseException) else None if step.done else step.reply for step in steps]

    def reward(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float | BaseException | None]:
        """Return the environment's reward of each text, without those of earlier texts."""
        steps = self._taken(*self._judged(completions, **columns))
        return [step if isinstance(step, BaseException) else step.reward for step in steps]

    def environments(self, completions: Sequence[str], **columns: Any) -> list[Environment]:
        """Return the environment of each text as it is after it; equal texts of a row share one."""
        places, texts = self._judged(completions, **columns)
        self._taken(places, texts)
        keys = [(*place, text) for place, text in zip(places, texts, strict=True)]
        return [self._waiting.get(key) or finished(self._led(*key)) for key in keys]

    def _judged(
        self, completions: Sequence[str], episodes: Sequence[Episode] | None = None, **columns: Any
    ) -> tuple[list[tuple[str, int]], list[tuple[str, ...]]]:
        texts = [(text,) for text in completions]
        if episodes is not None:
            texts = [tuple(turn.completion for turn in episode.turns) for episode in episodes]
        return [*zip(columns["environment"], columns[self._seed], strict=True)], texts

    def _taken(self, places: Sequence[tuple[str, int]], texts: Sequence[tuple[str, ...]]) -> list[Step | BaseException]:
        keys = [(*place, text) for place, text in zip(places, texts, strict=True)]
        return finished(self._all(keys))

    async def _all(self, keys: Sequence[tuple[str, int, tuple[str, ...]]]) -> list[Step | BaseException]:
        new = [key for key in dict.fromkeys(keys) if key not in self._steps]
        steps = dict(zip(new, await asyncio.gather(*(self._step(*key) for key in new)), strict=True))
        taken = [steps.get(key) or self._steps[key] for key in keys]
        self._steps |= steps
        for remembered, most in ((self._steps, _STEPS), (self._waiting, _WAITING)):
            while len(remembered) > most:
                remembered.popitem(last=False)
        return taken

    async def _step(self, kind: str, seed: int, texts: tuple[str, ...]) -> Step | BaseException:
        environment = self._waiting.pop((kind, seed, texts[:-1]), None)  # of a group's equal texts one gets it
        try:
            if environment is None:
                environment = await self._led(kind, seed, texts[:-1])
            return _checked(await awaited(environment.step(texts[-1])))
        except BaseException as error:
            if not is_own_doing(error):
                raise
            return error
        finally:
            if environment is not None:
                self._waiting[kind, seed, texts] = environment

    async def _led(self, kind: str, seed: int, texts: tuple[str, ...]) -> Environment:
        environment = self._makers[kind]()
        await awaited(environment.reset(seed))
        for text in texts:
            await awaited(environment.step(text))
        return environment


def first_prompt(runner: EnvRunner, kind: str, seed: int, method: str) -> Prompt:
    """Return what the episode of a seed begins with; UserError, which names the `method`, where it fails."""

    def describe(error: BaseException) -> UserError:
        return UserError(f"{method} raised {type(error).__name__}: {one_line(error, 100)}")

    with failures_as(describe):
        return runner.prompt(kind, seed)


async def awaited(returned: Any) -> Any:
    """Return what a function returned, or what it promised."""
    return await returned if inspect.isawaitable(returned) else returned


def _checked(returned: object) -> Step:
    """Return the result of a step; TypeError unless it is (reply, reward, done)."""
    reply, reward, done = returned if isinstance(returned, tuple) and len(returned) == 3 else (None, None, False)
    number = None if reward is None else as_number(reward)
    if (reply is None and not done) or (number is None and reward is not None):
        expected = "(reply, reward, done), the reward finite or None, the reply no None unless it is done"
        raise TypeError(f"step must return {expected}, got {one_line(repr(returned), 60)}")
    return Step(reply, number, bool(done))
