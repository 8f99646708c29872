"""Episodes as a task's code sees them: plain objects, texts and numbers, without arrays of a policy.

The policy writes, the environment answers, the policy writes again. An environment is a function

    def step(rows, episodes):
        return [Observation("try again") for row, episode in zip(rows, episodes)]

of the rows of the data and of the episodes so far; it keeps nothing between its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from grpo_jax.config.files import require_text
from grpo_jax.errors import UserError, one_line
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.pictures import Source, read_rgb, source_of
from grpo_jax.rollout.rewards import BadReturn


@dataclass(frozen=True)
class Observation:
    """The environment's answer to a text of the policy.

    Attributes:
        text: The next user's turn; all of it is text, whatever marks it spells.
        pictures: Shown to the policy before the text: torch or NumPy arrays, or PIL images.
        done: The episode ends here: nothing of the answer reaches the policy.
        messages: The text as several messages, one after another; () for one.
        otherwise: What the policy reads in its place where it is longer than sampling.max_answer_tokens, or cannot be
            encoded; "" where that is a failure of the environment.
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
        image: Picture drawn of the text, in torch: float [3, H, W] in [0, 1]; None where nothing was.
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

    def with_last(self, **changes: object) -> Episode:
        """Return the episode with other values in its last turn."""
        return Episode((*self.turns[:-1], replace(self.last, **changes)))


class EnvError(UserError):
    """An environment that failed; what it raised is the cause."""

    def __init__(self, reason: str):
        super().__init__(f"the environment: {reason}")


Env = Callable[[Sequence[Row], Sequence[Episode]], Sequence[Observation | str | BaseException | None]]
"""step(rows, episodes) → for each an answer, its text alone, None if the episode is done, or why it failed."""


def answers_of(step: Env, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[object]:
    """Return an environment's answers; raises BadReturn unless they are a list with one entry for each episode."""
    answers = step(list(rows), list(episodes))
    listed = isinstance(answers, Sequence) and not isinstance(answers, str | bytes | Observation)
    if not listed or len(answers) != len(episodes):
        got = len(answers) if listed else one_line(type(answers).__name__, 40)
        raise BadReturn(f"it must return a list of {len(episodes)} answers, one for each completion, got {got}")
    return list(answers)


def checked(answer: object) -> Observation:
    """Return an answer whatever form it came in; raises ValueError, which describes it, for anything else."""
    if answer is None:
        return Observation(done=True)
    if isinstance(answer, str):
        answer = Observation(answer)
    known = (
        isinstance(answer, Observation) and isinstance(answer.text, str) and isinstance(answer.pictures, tuple | list)
    )
    if not known:
        raise ValueError(f"{one_line(answer, 60)}, not an Observation (a text and a list of pictures), a text or None")
    require_text(answer.text)
    return replace(answer, pictures=tuple(answer.pictures), done=bool(answer.done))


def remembered(episode: Episode, *, pictures: bool) -> Episode:
    """Return an episode with its pictures as uint8 [H, W, 3] on the host, or without them."""
    turns = []
    for turn in episode.turns:
        image = as_uint8(turn.image) if pictures and turn.image is not None else None
        answer = turn.observation
        if answer is not None:
            answer = replace(answer, pictures=tuple(map(as_uint8, answer.pictures)) if pictures else ())
        turns.append(replace(turn, image=image, observation=answer))
    return Episode(tuple(turns))


def as_uint8(picture: Source) -> np.ndarray:
    """Return a picture in memory, in any form of a data set's, as uint8 [H, W, 3]."""
    return np.asarray(read_rgb(source_of(picture, None)))
