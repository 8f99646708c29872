"""Environments: the policy generates, the environment returns an observation, the policy generates again.

An `Env` is batched and stateless: the episode holds its own history. `rollout.env_adapters` makes one of classes, and
`rollout.tools` of Python functions.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.config.copies import own_copy
from grpo_jax.config.files import require_text
from grpo_jax.errors import UserError, failures_as, one_line
from grpo_jax.models.hf.chat import observation_encoder, pad
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Pictures, place_pictures
from grpo_jax.rollout.data import Encoded, Row
from grpo_jax.rollout.pictures import Source, read_rgb, source_of
from grpo_jax.rollout.pipeline import set_current_judge
from grpo_jax.rollout.user_code import as_list, reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Observation:
    """The environment's response to a completion."""

    text: str = ""  # the next user message; special tokens in it stay plain text
    pictures: tuple[Source, ...] = ()  # shown to the policy before the text: torch or NumPy arrays, or PIL images
    done: bool = False  # the episode ends here, and the policy never sees the observation
    messages: tuple[str, ...] = ()  # the text as several successive messages; () for one
    # text in place of one beyond sampling.max_observation_tokens or that cannot be encoded; "" for a failure
    otherwise: str = ""


@dataclass(frozen=True)
class Turn:
    """A completion of the policy, with its rewards and the observation that follows it."""

    completion: str  # the parsed completion, which the rewards judge
    raw_completion: str = ""  # the policy's text
    valid: bool = True  # whether `completion` is parsed from it; false if a fallback replaces it
    truncated: bool = False  # whether it was truncated at max_new_tokens
    # rewards and eval rewards by name, NaN if missing; empty before scoring
    rewards: Mapping[str, float] = field(default_factory=dict)
    # the rendered completion, a torch tensor float [3, H, W] in [0, 1]; None without a renderer
    image: Source | None = None
    observation: Observation | None = None  # the environment's; None for the last turn
    logged: Mapping[str, Any] = field(default_factory=dict)  # values that rewards logged by `log_extra`, by column
    # f32 [K, N + W], rewards and eval rewards of each of the K pictures, whose means are `rewards`; None before scoring
    picture_rewards: np.ndarray | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Episode:
    """The turns of one completion so far, first to last.

    A copy has rewards of its own, and shares pictures and `memory`.
    """

    turns: tuple[Turn, ...]
    final: bool = False  # whether no further turn can follow; an environment may end an episode earlier
    # objects that environments keep from turn to turn; they are neither compared nor pickled
    memory: dict[object, object] = field(default_factory=dict, compare=False, repr=False)

    def __deepcopy__(self, _: object) -> Episode:
        return replace(self, turns=tuple(replace(turn, rewards=dict(turn.rewards)) for turn in self.turns))

    def __reduce__(self) -> tuple[type[Episode], tuple[tuple[Turn, ...], bool]]:
        return Episode, (copy.deepcopy(self).turns, self.final)  # with rewards in dicts, which can be pickled

    @property
    def last(self) -> Turn:
        """Return the latest turn."""
        return self.turns[-1]

    @property
    def completions(self) -> tuple[str, ...]:
        """Return the parsed completions of all turns."""
        return tuple(turn.completion for turn in self.turns)

    def on_host(self, *, pictures: bool) -> Episode:
        """Return the episode with its pictures as uint8 [H, W, 3] on the host, or without them."""
        turns = []
        for turn in self.turns:
            image = as_uint8(turn.image) if pictures and turn.image is not None else None
            if (observation := turn.observation) is not None:
                shown = tuple(map(as_uint8, observation.pictures)) if pictures else ()
                observation = replace(observation, pictures=shown)
            turns.append(replace(turn, image=image, observation=observation))
        return Episode(tuple(turns), self.final)


def as_uint8(picture: Source) -> np.ndarray:
    """Return a picture in memory, in any form that a data set may hold, as uint8 [H, W, 3]."""
    return np.asarray(read_rgb(source_of(picture, None)))


class EnvError(UserError):
    """Failure of an environment, with its exception as the cause."""

    def __init__(self, reason: str):
        super().__init__(f"the environment: {reason}")


Env = Callable[[Sequence[Row], Sequence[Episode]], Sequence[Observation | str | BaseException | None]]
"""step(rows, episodes) → for each an observation, its text, None if the episode is done, or its exception."""


def as_observation(value: object) -> Observation:
    """Convert an environment's return value to an observation; ValueError, which describes it, for another type."""
    if value is None:
        return Observation(done=True)
    observation = Observation(value) if isinstance(value, str) else value
    if not isinstance(observation, Observation) or not (
        isinstance(observation.text, str) and isinstance(observation.pictures, tuple | list)
    ):
        raise ValueError(f"{one_line(value, 60)}, not an Observation (a text and a list of pictures), a text or None")
    require_text(observation.text)
    # An environment may draw its next pictures into the same arrays.
    return replace(observation, pictures=own_copy(tuple(observation.pictures)), done=bool(observation.done))


EncodeObservation = Callable[[Observation, bool, Sequence[np.ndarray]], list[int]]
"""(observation, whether the text before it ended, rows and columns of each picture) → tokens up to the next text."""


class EnvSettings(NamedTuple):
    """Environment of a multi-turn task."""

    turns: int  # maximum number
    step: Env
    encode_observation: EncodeObservation
    stream_tokens: int  # maximum of an episode
    pad_id: int
    lenient: bool = False  # whether a failure of the environment makes the rewards missing; otherwise it ends the run
    eos_ids: tuple[int, ...] = ()  # of the chat template; one is added to a completion that ended in another way


def make_encode_observation(
    tokenizer: PreTrainedTokenizerBase,
    *,
    eos_ids: Sequence[int],
    vocab_size: int,
    limit: int,
    vision: VisionConfig | None = None,
    role: str = "user",
    **template_options: object,
) -> EncodeObservation:
    """Make the function that encodes an observation to the tokens between two completions.

    The function raises `EnvError` for an observation of more than `limit` tokens (sampling.max_observation_tokens), or
    of none. UserError if the template, with `template_options` as for prompts, cannot continue after one of `role`.
    """
    picture = () if vision is None else vision.picture_tokens[:3]
    encode = observation_encoder(
        tokenizer, eos_ids, vocab_size=vocab_size, picture=picture, role=role, **template_options
    )

    def encode_observation(observation: Observation, ended: bool, grids: Sequence[np.ndarray] = ()) -> list[int]:
        pictures = [int(rows) * int(columns) // vision.merged for rows, columns in grids] if vision else []
        try:
            ids = encode(observation.messages or (observation.text,), ended, pictures)
        except UserError as error:
            raise EnvError(f"its observation: {error}") from error
        if len(ids) > limit:
            raise EnvError(
                f"its observation {one_line(repr(observation.text[:40]), 50)} takes {len(ids)} tokens with the chat "
                f"template's marks{' and its pictures' if pictures else ''}; sampling.max_observation_tokens is {limit}"
            )
        return ids

    return encode_observation


def collect_observations(step: Env, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Observation | EnvError]:
    """Step the environment with rows and rewards of its own; return each episode's observation or failure.

    All episodes fail if the environment raises (SystemExit too) or returns the wrong number of observations. One
    episode fails if its value is an exception or not an observation. `StopRun` propagates.
    """
    set_current_judge("the environment")
    try:
        with failures_as(_failure):
            own = [copy.deepcopy(row) for row in rows], [copy.deepcopy(episode) for episode in episodes]
            returned = as_list(step(*own), len(episodes))
    except EnvError as error:
        return [error] * len(episodes)
    observations: list[Observation | EnvError] = []
    for number, answer in enumerate(returned):
        try:
            observations.append(_failure(answer) if isinstance(answer, BaseException) else as_observation(answer))
        except ValueError as error:
            text = one_line(repr(episodes[number].last.completion[:40]), 50)
            observations.append(EnvError(f"it answered {error} to completion {number} ({text})"))
    return observations


def _failure(error: BaseException) -> EnvError:
    """Describe an environment's exception."""
    if isinstance(error, EnvError):
        return error
    failure = EnvError(str(error) if isinstance(error, UserError) else reason_of(error))
    failure.__cause__ = error
    return failure


def ask_environment(
    env: EnvSettings,
    prepare: Callable[[Source], Pictures] | None,
    rows: Sequence[Row],
    episodes: Sequence[Episode],
    ended: Sequence[bool],
    places: Sequence[tuple[int, int]],
    shape: tuple[int, ...],
) -> tuple[list[Observation | None], Encoded]:
    """Step the environment for some completions of a chunk of `shape` (P, G), and encode the observations.

    `rows`, `episodes`, `ended` (whether the last completion ended with EOS) and `places` (p, g) have one entry for each
    of these completions. So have the observations. If the environment fails, the observation is None with a lenient
    `env`; otherwise EnvError is raised.
    """
    observations = collect_observations(env.step, rows, episodes)
    shown = [() if isinstance(answer, EnvError) or answer.done else answer.pictures for answer in observations]
    pictures = None
    try:
        pictures = prepared(prepare, shown, places, shape)
    except EnvError as error:
        observations = [error if several else one for several, one in zip(shown, observations, strict=True)]
    encoded: list[list[int]] = [[] for _ in range(shape[0] * shape[1])]
    for number, ((p, g), observation) in enumerate(zip(places, observations, strict=True)):
        if isinstance(observation, EnvError) or observation.done:
            continue
        grids = [] if pictures is None else [*pictures.grid[p, g][: len(observation.pictures)]]
        otherwise = [(Observation(observation.otherwise), [])] if observation.otherwise else []
        for answer, shown_grids in [(observation, grids), *otherwise]:
            try:
                encoded[p * shape[1] + g] = env.encode_observation(answer, ended[number], shown_grids)
                observations[number] = answer
                break
            except EnvError as error:
                observations[number] = error
    if (failures := [error for error in observations if isinstance(error, EnvError)]) and not env.lenient:
        raise failures[0]
    answers = [None if isinstance(answer, EnvError) else answer for answer in observations]
    tokens, mask = pad(encoded, max(1, *map(len, encoded)), env.pad_id)
    return answers, Encoded(tokens.reshape(*shape, -1), mask.reshape(*shape, -1), pictures)


def prepared(
    prepare: Callable[[Source], Pictures] | None,
    shown: Sequence[Sequence[Source]],
    places: Sequence[tuple[int, int]],
    shape: tuple[int, ...],
) -> Pictures | None:
    """Prepare the pictures of some observations, as `Pictures` [P, G, I, ..]; None without any."""
    owners = [place for place, pictures in zip(places, shown, strict=True) for _ in pictures]
    sources = [*itertools.chain.from_iterable(shown)]
    if not sources:
        return None
    if prepare is None:
        raise EnvError("it answered with a picture, and no vision tower is loaded (a vision policy with task.pictures)")

    def describe(error: BaseException) -> EnvError:
        reason = str(error) if isinstance(error, UserError | ValueError) else reason_of(error)
        return EnvError(f"its picture: {one_line(reason, 150)}")

    with failures_as(describe):
        return place_pictures(prepare(_stacked(sources)), owners, shape)


def _stacked(sources: list[Source]) -> Source:
    """Stack torch pictures of one size to one tensor on their device; return others unchanged."""
    drawn = all(hasattr(picture, "detach") and picture.is_floating_point() and picture.ndim == 3 for picture in sources)
    if not drawn or len({(picture.shape, picture.dtype, picture.device) for picture in sources}) > 1:
        return sources
    import torch

    return torch.stack(sources)
