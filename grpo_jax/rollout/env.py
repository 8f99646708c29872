"""Environments: the policy writes, the environment answers, the policy writes again.

An `Env` is batched and keeps nothing between its calls: an episode's past stands in the episode. Two adapters make one:
`EnvRunner` steps classes with `reset` and `step`, `rollout.tools` calls Python functions.

    def step(rows, episodes):
        return [Observation("try again") for row, episode in zip(rows, episodes)]
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from grpo_jax.config.files import require_text
from grpo_jax.errors import UserError, failures_as, is_own_doing, one_line
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.pictures import Source, read_rgb, source_of
from grpo_jax.rollout.rewards import BadReturn, as_number, finished

_STEPS, _WAITING = 65_536, 4_096  # most remembered results of steps, and environments after their last step


@dataclass(frozen=True)
class Observation:
    """The environment's answer to a completion.

    Attributes:
        text: The next user's turn; all of it is text, whatever marks it spells.
        pictures: Shown to the policy before the text: torch or NumPy arrays, or PIL images.
        done: The episode ends here: nothing of the observation reaches the policy.
        messages: The text as several messages, one after another; () for one.
        otherwise: Text in its place if it exceeds sampling.max_observation_tokens or cannot be encoded; "" if that
            is a failure of the environment.
    """

    text: str = ""
    pictures: tuple[Source, ...] = ()
    done: bool = False
    messages: tuple[str, ...] = ()
    otherwise: str = ""


@dataclass(frozen=True)
class Turn:
    """A completion of the policy, with its rewards and the observation that follows it.

    Attributes:
        completion: The parsed completion, which is judged.
        raw_completion: The policy's text.
        valid: Whether `completion` is parsed from it; false where another text stands in.
        truncated: Whether it was cut off at max_new_tokens.
        rewards: Rewards and watched measures by name, NaN where missing; empty until they are there.
        image: Picture drawn of the completion, in torch: float [3, H, W] in [0, 1]; None where nothing was.
        observation: The environment's; None of the last turn.
    """

    completion: str
    raw_completion: str = ""
    valid: bool = True
    truncated: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    image: Source | None = None
    observation: Observation | None = None


@dataclass(frozen=True)
class Episode:
    """The turns of one completion so far, first to last."""

    turns: tuple[Turn, ...]

    @property
    def last(self) -> Turn:
        """The turn that it ended with, or that is to be answered."""
        return self.turns[-1]

    @property
    def completions(self) -> tuple[str, ...]:
        """The parsed completions of all turns."""
        return tuple(turn.completion for turn in self.turns)

    def with_last(self, **changes: object) -> Episode:
        """Return the episode with other values in its last turn."""
        return Episode((*self.turns[:-1], replace(self.last, **changes)))

    def remembered(self, *, pictures: bool) -> Episode:
        """Return the episode with its pictures as uint8 [H, W, 3] on the host, or without them."""
        turns = []
        for turn in self.turns:
            image = as_uint8(turn.image) if pictures and turn.image is not None else None
            observation = turn.observation
            if observation is not None:
                shown = tuple(map(as_uint8, observation.pictures)) if pictures else ()
                observation = replace(observation, pictures=shown)
            turns.append(replace(turn, image=image, observation=observation))
        return Episode(tuple(turns))


def as_uint8(picture: Source) -> np.ndarray:
    """Return a picture in memory, in any form of a data set's, as uint8 [H, W, 3]."""
    return np.asarray(read_rgb(source_of(picture, None)))


class EnvError(UserError):
    """An environment that failed; what it raised is the cause."""

    def __init__(self, reason: str):
        super().__init__(f"the environment: {reason}")


class Env(Protocol):
    """The environment of a rollout: a function step(rows, episodes), or a method of that form."""

    def __call__(
        self, rows: Sequence[Row], episodes: Sequence[Episode], /
    ) -> Sequence[Observation | str | BaseException | None]:
        """Return for each episode an observation, its text alone, None if the episode is done, or why it failed."""
        ...


def observe(step: Env, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[object]:
    """Return an environment's observations; raises BadReturn unless they are a list with one for each episode."""
    returned = step(list(rows), list(episodes))
    listed = isinstance(returned, Sequence) and not isinstance(returned, str | bytes | Observation)
    if not listed or len(returned) != len(episodes):
        got = len(returned) if listed else one_line(type(returned).__name__, 40)
        raise BadReturn(f"it must return a list of {len(episodes)} observations, one for each completion, got {got}")
    return list(returned)


def as_observation(value: object) -> Observation:
    """Return an observation whatever form it came in; raises ValueError, which describes it, for anything else."""
    if value is None:
        return Observation(done=True)
    given = Observation(value) if isinstance(value, str) else value
    if not (
        isinstance(given, Observation) and isinstance(given.text, str) and isinstance(given.pictures, tuple | list)
    ):
        raise ValueError(f"{one_line(value, 60)}, not an Observation (a text and a list of pictures), a text or None")
    require_text(given.text)
    return replace(given, pictures=tuple(given.pictures), done=bool(given.done))


Prompt = str | list[dict[str, Any]]
"""A text, or a conversation as chat messages."""


class Step(NamedTuple):
    """The result of a step; a class may return it as a plain tuple."""

    observation: str | Observation | None
    reward: float | None
    done: bool


class SingleEnv(Protocol):
    """One episode, made without arguments. It is a function of its seed and of the texts that it was given.

    Both methods may be `async def`.
    """

    def reset(self, seed: int) -> Prompt | Awaitable[Prompt]:
        """Begin the episode of a seed, and return its prompt."""
        ...

    def step(self, text: str) -> tuple[str | Observation | None, float | None, bool] | Awaitable[tuple]:
        """Take a completion: return the observation, its reward (None for none), and whether this is the end."""
        ...


Single = TypeVar("Single", bound=SingleEnv)
Key = tuple[str, int, tuple[str, ...]]
"""Kind of environment, seed, and texts so far: an episode."""


class EnvRunner(Generic[Single]):
    """Steps environments along the episodes of a rollout; `step` is an `Env`.

    Nothing else remembers where an episode stands: its environment is at hand, or is made again and led through the
    episode's texts, as after a resume. One that raises fails its own episode alone: the exception stands in place of
    its observation and of its reward.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Single]], seed: str = "seed"):
        """Take environments by kind, which rows have as a column "environment", and the name of their seeds' column."""
        self._makers = makers
        self._seed = seed
        self._steps: OrderedDict[Key, Step | BaseException] = OrderedDict()
        self._waiting: OrderedDict[Key, Single] = OrderedDict()

    def prompt(self, kind: str, seed: int, method: str) -> Prompt:
        """Return the prompt of a seed; UserError, which names the `method`, if reset fails."""
        with failures_as(lambda error: UserError(f"{method} raised {type(error).__name__}: {one_line(error, 100)}")):
            return finished(awaited(self._makers[kind]().reset(seed)))

    def step(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Observation | str | BaseException | None]:
        """Answer the last completion of each episode; None if it is done."""
        keys = [
            (row.columns["environment"], row.columns[self._seed], episode.completions)
            for row, episode in zip(rows, episodes, strict=True)
        ]
        steps = finished(self._taken(keys))
        return [step if isinstance(step, BaseException) else None if step.done else step.observation for step in steps]

    def reward(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float | BaseException | None]:
        """Return the environment's reward of each completion, without those of earlier turns."""
        steps = finished(self._taken(self._keys(completions, **columns)))
        return [step if isinstance(step, BaseException) else step.reward for step in steps]

    def environments(self, completions: Sequence[str], **columns: Any) -> list[Single]:
        """Return the environment of each completion as it is after it; equal episodes share one."""
        keys = self._keys(completions, **columns)
        finished(self._taken(keys))
        return [self._waiting.get(key) or finished(self._led(key)) for key in keys]

    def _keys(self, completions: Sequence[str], episodes: Sequence[Episode] | None = None, **columns: Any) -> list[Key]:
        texts = [(one,) for one in completions] if episodes is None else [one.completions for one in episodes]
        return [*zip(columns["environment"], columns[self._seed], texts, strict=True)]

    async def _taken(self, keys: Sequence[Key]) -> list[Step | BaseException]:
        new = [key for key in dict.fromkeys(keys) if key not in self._steps]
        steps = dict(zip(new, await asyncio.gather(*map(self._step, new)), strict=True))
        taken = [steps.get(key) or self._steps[key] for key in keys]
        self._steps |= steps
        for remembered, most in ((self._steps, _STEPS), (self._waiting, _WAITING)):
            while len(remembered) > most:
                remembered.popitem(last=False)
        return taken

    async def _step(self, key: Key) -> Step | BaseException:
        kind, seed, texts = key
        before = (kind, seed, texts[:-1])
        environment = self._waiting.pop(before, None)  # of a group's equal texts one gets it
        try:
            if environment is None:
                environment = await self._led(before)
            return _checked(await awaited(environment.step(texts[-1])))
        except BaseException as error:
            if not is_own_doing(error):
                raise
            return error
        finally:
            if environment is not None:
                self._waiting[key] = environment

    async def _led(self, key: Key) -> Single:
        kind, seed, texts = key
        environment = self._makers[kind]()
        await awaited(environment.reset(seed))
        for text in texts:
            await awaited(environment.step(text))
        return environment


async def awaited(returned: Any) -> Any:
    """Return what a function returned, or what it promised."""
    return await returned if inspect.isawaitable(returned) else returned


def _checked(returned: object) -> Step:
    """Return the result of a step; TypeError unless it is (observation, reward, done)."""
    observation, reward, done = returned if isinstance(returned, tuple) and len(returned) == 3 else (None, None, False)
    number = None if reward is None else as_number(reward)
    if (observation is None and not done) or (number is None and reward is not None):
        expected = "(observation, reward, done), the reward finite or None, the observation no None unless it is done"
        raise TypeError(f"step must return {expected}, got {one_line(repr(returned), 60)}")
    return Step(observation, number, bool(done))
