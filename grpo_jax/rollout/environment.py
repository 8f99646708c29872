"""Environment of a rollout: rows to tokens, texts to rewards, and the observations between two turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.errors import UserError, failures_as, one_line
from grpo_jax.models.hf.chat import observation_encoder
from grpo_jax.models.variables import PyTree
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Pictures, PictureStates, placed
from grpo_jax.rollout.data import Row, map_pictures, repeat_rows
from grpo_jax.rollout.encoding import Encoded, PictureInput, as_chat_messages
from grpo_jax.rollout.env import Env, EnvError, Episode, Observation, as_observation, observe
from grpo_jax.rollout.pictures import Source, open_picture
from grpo_jax.rollout.pipeline import at_work
from grpo_jax.rollout.rewards import (
    MESSAGES,
    PICTURES,
    Columns,
    Reward,
    asks,
    collect_rewards,
    reason_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_jax.rollout.texts import ParsedCompletion

EncodeObservation = Callable[[Observation, bool, Sequence[np.ndarray]], list[int]]
"""(observation, whether the text before it ended, rows and columns of each picture) → tokens up to the next text."""


class ObservationTokens(NamedTuple):
    """Observations as token ids i32 [P, G, A], padded on the right, and their mask bool [P, G, A], on the host.

    The mask is false where a completion does not go on. `pictures` are `Pictures` [P, G, I, ..] or None.
    """

    tokens: np.ndarray
    mask: np.ndarray
    pictures: Pictures | None = None


class EnvSettings(NamedTuple):
    """Replies of a task of several turns.

    Attributes:
        turns: How often the policy writes, at most.
        step: The environment.
        stream_tokens: Most tokens of an episode.
        lenient: Whether a completion that cannot be answered goes without rewards; otherwise it ends the run.
        eos_ids: Tokens that end a text as the chat template does; a text that ended otherwise is ended for it.
    """

    turns: int
    step: Env
    encode_observation: EncodeObservation
    stream_tokens: int
    pad_id: int
    lenient: bool = False
    eos_ids: tuple[int, ...] = ()


class RolloutFns(NamedTuple):
    """Functions between a policy's tokens and its rewards.

    Attributes:
        encode: Rows → `Encoded`, left-padded to a length that depends on no batch.
        decode: (token ids of one completion, the user's prompt) → (completion as written, its `ParsedCompletion`).
        render: (rows, texts `[P][G]`, iteration, evaluation) → pictures for `score`, or None where nothing is drawn.
        score: (rows, texts `[P][G]`, pictures) → f32 [P, G, N] rewards and f32 [P, G, W] eval rewards; NaN is missing.
            In tasks of several turns `episodes` has those `[P][G]` that end with the texts; `tokens` `[P][G]` are what
            the policy wrote, where it did.
        encode_images: (variables, `Pictures`) → their `PictureStates`, and what the update takes: these or, to be
            encoded again, those. None for a policy that is shown no pictures.
        gallery: How many of the first held-out rows keep the pictures of their episodes.
        prepare: Pictures in memory, torch float [N, 3, H, W] in [0, 1] or a list of what a row may hold → `Pictures`
            [N, 1, ..], as the policy's processor makes them; None for a policy that sees none.
        env: None where the policy writes once.
    """

    encode: Callable[[Sequence[Row]], Encoded]
    decode: Callable[[np.ndarray, str], tuple[str, ParsedCompletion]]
    render: Callable[[Sequence[Row], list[list[str]], int, bool], object] | None
    score: Callable[..., tuple[np.ndarray, np.ndarray]]
    reward_names: tuple[str, ...]
    eval_reward_names: tuple[str, ...]
    prepare: Callable[[Source], Pictures] | None = None
    env: EnvSettings | None = None
    encode_images: Callable[[PyTree, Pictures], tuple[PictureStates, PictureInput]] | None = None
    gallery: int = 0


def make_score(
    rewards: Mapping[str, Reward],
    eval_rewards: Mapping[str, Reward],
    *,
    missing: bool,
    columns_of: Callable[[Sequence[str], Columns], Columns] | None = None,
    tokenize: Callable[[str], list[int]] | None = None,
) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Make score(rows, texts, pictures, episodes=None, tokens=None) → rewards f32 [P, G, N], others f32 [P, G, W].

    Where a reward asks for them, episodes `[P][G]` reach it as "episodes", token ids `[P][G]` as "completion_ids",
    and prompts and completions as chat messages. Where the policy writes once, "place_in_group" counts a group's
    completions from 0, so that a reward sees where a group begins.

    Args:
        rewards: N functions by name.
        eval_rewards: W functions by name.
        missing: A reward that fails is missing; otherwise it raises.
        columns_of: (completions, columns) → further columns, asked once for all rewards.
        tokenize: The tokens of a text that the policy has not written.
    """
    functions = [*rewards.values(), *eval_rewards.values()]
    ids_asked, prompts_asked, completions_asked = (
        any(asks(function, name) for function in functions) for name in ("completion_ids", *MESSAGES)
    )

    def score(
        rows: Sequence[Row],
        texts: list[list[str]],
        pictures: Any,
        episodes: list[list[Episode]] | None = None,
        tokens: list[list[list[int]]] | Callable[[], list[list[list[int]]]] | None = None,
        missing: bool = missing,
    ) -> tuple[np.ndarray, np.ndarray]:
        group = len(texts[0])
        prompts, columns = repeat_rows(rows, group)
        completions = [*itertools.chain.from_iterable(texts)]
        columns |= _prompt_columns(rows, group, drawn=pictures is not None)
        columns |= {name: drawn for name in PICTURES if (drawn := getattr(pictures, name, None)) is not None}
        if episodes is None:  # of these some are judged without the others of their group
            columns["place_in_group"] = [*range(group)] * len(rows)
        else:
            columns["episodes"] = [*itertools.chain.from_iterable(episodes)]
        if ids_asked and (tokens is not None or tokenize is not None):
            by_group = tokens() if callable(tokens) else tokens or []
            written = [*itertools.chain.from_iterable(by_group)] or [[] for _ in completions]
            columns["completion_ids"] = [  # what the policy did not write has no tokens of its own
                ids or ([] if tokenize is None else tokenize(text))
                for ids, text in zip(written, completions, strict=True)
            ]
        if prompts_asked:
            columns[MESSAGES[0]] = [as_chat_messages(row) for row in rows for _ in range(group)]
        if completions_asked:
            columns[MESSAGES[1]] = [[{"role": "assistant", "content": text}] for text in completions]
        if columns_of is not None:
            columns |= columns_of(completions, columns)

        def collect(functions: Mapping[str, Reward]) -> np.ndarray:
            on_error = "missing" if missing else "raise"
            return collect_rewards(functions, prompts, completions, columns, group, on_error=on_error)

        return collect(rewards), collect(eval_rewards)

    return score


def _prompt_columns(rows: Sequence[Row], group: int, *, drawn: bool) -> dict[str, list[object]]:
    """Return the columns of pictures and conversations in prompts, repeated for each completion.

    "pictures" are lists, of Pillow; where nothing is drawn these are "images" too, and "image" is the first of each.
    "messages" are conversations as they were given, unless the rows have a column of that name.
    """
    columns: dict[str, list[object]] = {}
    if any(row.pictures for row in rows):
        pictures = [map_pictures(row, open_picture) for row in rows]
        columns["pictures"] = [*pictures]
        if not drawn:
            columns["images"] = [*pictures]
            columns["image"] = [first[0] if first else None for first in pictures]
    if any(row.messages for row in rows) and not any("messages" in row.columns for row in rows):
        columns["messages"] = [as_chat_messages(row) for row in rows]
    return {name: [value for value in values for _ in range(group)] for name, values in columns.items()}


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
    """Make the function from an observation to the tokens between the policy's text and its next one.

    An observation, a message of `role`, may take `limit` tokens (sampling.max_observation_tokens); the function raises
    `EnvError` for a longer one, or one without tokens. `template_options` are passed to the chat template, as for
    prompts. UserError if the template does not go on after an observation.
    """
    picture = () if vision is None else (vision.vision_start_token, vision.image_token, vision.vision_end_token)
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
    """Ask the environment for its observation to each episode, or why it failed to give one.

    An environment fails if it raises (SystemExit too) or returns another number of observations, for all episodes;
    with an exception or anything else that is no observation, for one. `StopRun` passes.
    """
    at_work("the environment")
    try:
        with failures_as(_failure):
            returned = observe(step, rows, episodes)
    except EnvError as error:
        return [error] * len(episodes)
    observations: list[Observation | EnvError] = []
    for number, one in enumerate(returned):
        try:
            observations.append(_failure(one) if isinstance(one, BaseException) else as_observation(one))
        except ValueError as error:
            text = one_line(repr(episodes[number].last.completion[:40]), 50)
            observations.append(EnvError(f"it answered {error} to completion {number} ({text})"))
    return observations


def _failure(error: BaseException) -> EnvError:
    """Describe what an environment raised."""
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
) -> tuple[list[Observation | None], ObservationTokens]:
    """Ask for observations to some completions of a chunk of `shape` (P, G), and encode them.

    `rows`, `episodes`, `ended` (whether the last text came to its end) and `places` (p, g) have one entry for each of
    these completions, and so have the observations: None where the environment failed and `env` is lenient,
    otherwise it raises EnvError.
    """
    observations = collect_observations(env.step, rows, episodes)
    shown = [() if isinstance(one, EnvError) or one.done else one.pictures for one in observations]
    pictures = None
    try:
        pictures = prepared(prepare, shown, places, shape)
    except EnvError as error:
        observations = [error if several else one for several, one in zip(shown, observations, strict=True)]
    encoded: list[list[list[int]]] = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
    for number, ((p, g), observation) in enumerate(zip(places, observations, strict=True)):
        if isinstance(observation, EnvError) or observation.done:
            continue
        grids = [] if pictures is None else [*pictures.grid[p, g][: len(observation.pictures)]]
        try:
            observations[number], encoded[p][g] = _encoded(env.encode_observation, observation, ended[number], grids)
        except EnvError as error:
            observations[number] = error
    failures = [one for one in observations if isinstance(one, EnvError)]
    if failures and not env.lenient:
        raise failures[0]
    given = [None if isinstance(one, EnvError) else one for one in observations]
    return given, _padded(encoded, env.pad_id, pictures)


def _encoded(
    encode: EncodeObservation, observation: Observation, ended: bool, grids: Sequence[np.ndarray]
) -> tuple[Observation, list[int]]:
    """Encode an observation, or what it says is read in its place where that fails; return the one that is read."""
    try:
        return observation, encode(observation, ended, grids)
    except EnvError:
        if not observation.otherwise:
            raise
        in_place = Observation(observation.otherwise)
        return in_place, encode(in_place, ended, [])


def _padded(encoded: Sequence[Sequence[Sequence[int]]], pad_id: int, pictures: Pictures | None) -> ObservationTokens:
    """Pad token lists `[P][G]` to arrays, at least one place wide."""
    width = max(1, *(len(tokens) for group in encoded for tokens in group))
    lengths = np.array([[len(tokens) for tokens in group] for group in encoded])
    mask = np.arange(width) < lengths[..., None]
    array = np.full(mask.shape, pad_id, np.int32)
    array[mask] = [token for group in encoded for tokens in group for token in tokens]
    return ObservationTokens(array, mask, pictures)


def prepared(
    prepare: Callable[[Source], Pictures] | None,
    shown: Sequence[Sequence[Source]],
    places: Sequence[tuple[int, int]],
    shape: tuple[int, ...],
) -> Pictures | None:
    """Prepare the pictures that some completions are shown, as `Pictures` [P, G, I, ..]; None without any."""
    owners = [place for place, pictures in zip(places, shown, strict=True) for _ in pictures]
    sources = [*itertools.chain.from_iterable(shown)]
    if not sources:
        return None
    if prepare is None:
        raise EnvError("it answered with a picture, and the policy reads text alone")

    def describe(error: BaseException) -> EnvError:
        reason = str(error) if isinstance(error, UserError | ValueError) else reason_of(error)
        return EnvError(f"its picture: {one_line(reason, 150)}")

    with failures_as(describe):
        return placed(prepare(_stacked(sources)), owners, shape)


def _stacked(sources: list[Source]) -> Source:
    """Stack pictures drawn in torch, of one size, to one tensor on their device; leave others as they are."""
    drawn = all(hasattr(one, "detach") and one.is_floating_point() and one.ndim == 3 for one in sources)
    if not drawn or len({(one.shape, one.dtype, one.device) for one in sources}) > 1:
        return sources
    import torch

    return torch.stack(sources)
