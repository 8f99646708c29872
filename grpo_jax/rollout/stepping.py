"""Environments that are classes: reset(seed) → prompt, step(text) → (reply, reward, done)."""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from grpo_jax.errors import one_line
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.episodes import Answer, Episode
from grpo_jax.rollout.rewards import as_number, finished

Prompt = str | list[dict[str, Any]]
"""A text, or a conversation as chat messages."""

Stepped = tuple[str | Answer | None, float | None, bool]
"""(reply, reward, done)."""

_STEPS, _WAITING = 65_536, 4_096  # that are remembered: what steps returned, and environments after their last one


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

    reply: str | Answer | None
    reward: float | None
    done: bool


Environment = TypeVar("Environment", bound=SteppedEnvironment)


class Stepper(Generic[Environment]):
    """Steps environments along the episodes of a rollout.

    Nothing else remembers where an episode stands: the environment of an episode that is asked for its next step is
    at hand, or is made again and led through the texts of the episode, as after a resume.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Environment]], seed: str = "seed"):
        """Environments by kind, which rows have as a column "environment", and the name of their seeds' column."""
        self._makers = makers
        self._seed = seed
        self._steps: OrderedDict[tuple, Step] = OrderedDict()
        self._waiting: OrderedDict[tuple, Environment] = OrderedDict()

    def prompt(self, kind: str, seed: int) -> Prompt:
        """Return what the episode of a seed begins with."""
        return finished(awaited(self._makers[kind]().reset(seed)))

    def respond(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Answer | str | None]:
        """Reply to the last text of each episode; None where it is done."""
        texts = [tuple(turn.text for turn in episode.turns) for episode in episodes]
        places = [(row.columns["environment"], row.columns[self._seed]) for row in rows]
        return [None if step.done else step.reply for step in self._taken(places, texts)]

    def reward(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        """Of each text, what the environment gave for it; not for anything before."""
        return [step.reward for step in self._taken(*self._judged(completions, **columns))]

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
            texts = [tuple(turn.text for turn in episode.turns) for episode in episodes]
        return [*zip(columns["environment"], columns[self._seed], strict=True)], texts

    def _taken(self, places: Sequence[tuple[str, int]], texts: Sequence[tuple[str, ...]]) -> list[Step]:
        keys = [(*place, text) for place, text in zip(places, texts, strict=True)]
        return finished(self._all(keys))

    async def _all(self, keys: Sequence[tuple[str, int, tuple[str, ...]]]) -> list[Step]:
        new = [key for key in dict.fromkeys(keys) if key not in self._steps]
        steps = dict(zip(new, await asyncio.gather(*(self._step(*key) for key in new)), strict=True))
        taken = [steps.get(key) or self._steps[key] for key in keys]
        self._steps |= steps
        for remembered, most in ((self._steps, _STEPS), (self._waiting, _WAITING)):
            while len(remembered) > most:
                remembered.popitem(last=False)
        return taken

    async def _step(self, kind: str, seed: int, texts: tuple[str, ...]) -> Step:
        environment = self._waiting.pop((kind, seed, texts[:-1]), None)  # of a group's equal texts one gets it
        if environment is None:
            environment = await self._led(kind, seed, texts[:-1])
        step = _checked(await awaited(environment.step(texts[-1])))
        self._waiting[kind, seed, texts] = environment
        return step

    async def _led(self, kind: str, seed: int, texts: tuple[str, ...]) -> Environment:
        environment = self._makers[kind]()
        await awaited(environment.reset(seed))
        for text in texts:
            await awaited(environment.step(text))
        return environment


async def awaited(returned: Any) -> Any:
    """Return what a function returned, or what it promised."""
    return await returned if inspect.isawaitable(returned) else returned


def _checked(returned: object) -> Step:
    """Return what a step returned; TypeError where it is no (reply, reward, done)."""
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TypeError(f"step must return (reply, reward, done), got {one_line(repr(returned), 60)}")
    reply, reward, done = returned
    number = None if reward is None else as_number(reward)
    if reward is not None and number is None:
        raise TypeError(f"step must return a finite number or None as its reward, got {one_line(repr(reward), 40)}")
    if not done and reply is None:
        raise TypeError("step must return a reply where the episode is not done, got None")
    return Step(reply, number, bool(done))
