"""Environments that are classes: reset(seed) → prompt, step(text) → (reply, reward, done)."""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from grpo_jax.errors import one_line
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.episodes import Answer, Episode
from grpo_jax.rollout.rewards import as_number, finished

Prompt = str | list[dict[str, Any]]
"""A text, or a conversation as chat messages."""

_STEPS, _WAITING = (
    65_536,
    4_096,
)  # that are remembered: of steps what they returned, and environments for their next one


class SteppedEnvironment(Protocol):
    """One episode. What follows on a seed and on the texts that it was given is always the same.

    Both methods may be `async def`.
    """

    def reset(self, seed: int) -> Prompt:
        """Begin the episode of a seed, and return its prompt."""
        ...

    def step(self, text: str) -> tuple[str | Answer | None, float | None, bool]:
        """Take what the policy wrote: the reply, the reward of it (None for none), and whether this is the end."""
        ...


class Step(NamedTuple):
    """What one step returned."""

    reply: str | Answer | None
    reward: float | None
    done: bool


class Stepper:
    """Steps environments along the episodes of a rollout.

    Nothing else remembers where an episode stands: the environment of an episode that is asked for its next step is
    at hand, or is made again and led through the texts of the episode, as after a resume.
    """

    def __init__(self, makers: Mapping[str, Callable[[], SteppedEnvironment]]):
        self._makers = makers
        self._steps: OrderedDict[tuple, Step] = OrderedDict()
        self._waiting: OrderedDict[tuple, SteppedEnvironment] = OrderedDict()

    def prompt(self, kind: str, seed: int) -> Prompt:
        """Return what the episode of a seed begins with."""
        return finished(_awaited(self._makers[kind]().reset(seed)))

    def respond(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Answer | str | None]:
        """Reply to the last text of each episode; None where it is done."""
        texts = [tuple(turn.text for turn in episode.turns) for episode in episodes]
        places = [(row.columns["environment"], row.columns["seed"]) for row in rows]
        return [None if step.done else step.reply for step in self._taken(places, texts)]

    def reward(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        *,
        environment: Sequence[str],
        seed: Sequence[int],
        episodes: Sequence[Episode] | None = None,
        **columns: object,
    ) -> list[float | None]:
        """Of each text, what the environment gave for it; not for anything before."""
        texts = [(text,) for text in completions]
        if episodes is not None:
            texts = [tuple(turn.text for turn in episode.turns) for episode in episodes]
        return [step.reward for step in self._taken([*zip(environment, seed, strict=True)], texts)]

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
            environment = self._makers[kind]()
            await _awaited(environment.reset(seed))
            for text in texts[:-1]:
                await _awaited(environment.step(text))
        step = _checked(await _awaited(environment.step(texts[-1])))
        if not step.done:
            self._waiting[kind, seed, texts] = environment
        return step


async def _awaited(returned: Any) -> Any:
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
