"""A batch of prompts through sampler and judges: completions, texts and rewards, chunk by chunk.

The parts come as functions in an `Environment`; nothing here knows a model, a task or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.vision.pictures import chained, joined, joined_some
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.environment import Environment
from grpo_jax.rollout.episodes import Episode, Turn
from grpo_jax.rollout.inputs.encoding import Encoded
from grpo_jax.rollout.pipeline import Place, Stage, run_pipeline
from grpo_jax.rollout.turns import IN_FLIGHT, Episodes, Play, stream, written_tokens

See = Callable[[Any, Any], tuple[Any, Any]]
"""see(variables, `Pictures`) → their `PictureStates`, and what the update takes: these or, to be seen again, those."""

EVALUATION_STREAM = 2**31 - 1
"""Takes the place of the iteration in the keys of evaluation, so that no training iteration shares them."""


class Judgement(NamedTuple):
    """What completions are worth; of episodes, as they ended.

    Attributes:
        rewards: f32 [P, G, N].
        watched: f32 [P, G, W].
        pictures: Of each chunk; none of episodes, which hold their own.
        turn_rewards: f32 [P, G, U, N] of each turn, NaN where it does not exist; None where the policy writes once.
        turn_watched: f32 [P, G, U, W], likewise.
        columns: What the task told of each row's ranking (`tasks.task.Choices`), P values by name; none of texts.
    """

    rewards: np.ndarray
    watched: np.ndarray
    pictures: list[Any]
    turn_rewards: np.ndarray | None = None
    turn_watched: np.ndarray | None = None
    columns: Mapping[str, Sequence[Any]] = {}

    @property
    def judged(self) -> np.ndarray:
        """Rewards f32 [P, G, N]; of episodes those of each turn, [P, G, U, N]."""
        return self.rewards if self.turn_rewards is None else self.turn_rewards


class Rollout(NamedTuple):
    """One sampled and judged batch.

    Attributes:
        rows: P prompts.
        prompt_tokens: i32 [P, L], a picture as its placeholders.
        prompt_mask: bool [P, L].
        samples: Arrays of the sampler, [P, G, T] and [P, G].
        completions: What the policy wrote, `[P][G]`; of an episode its last text, and so are texts and usable.
        texts: What was judged, `[P][G]`.
        usable: bool [P, G], false where the completion could not be read and the user's prompt stands in.
        judgement: Rewards and pictures.
        seconds: Seconds of work by stage.
        pictures: What the prompts show, as the update takes it: `PictureStates` or `Pictures` [P, I, ..]; None where
            they show nothing, and in evaluation.
        episodes: `[P][G]`; None where the policy writes once.
        answers: Pictures [P, G, I, ..] that stand among the samples' tokens, or None.
    """

    rows: Sequence[Row]
    prompt_tokens: np.ndarray
    prompt_mask: np.ndarray
    samples: Any
    completions: list[list[str]]
    texts: list[list[str]]
    usable: np.ndarray
    judgement: Judgement
    seconds: dict[str, float]
    pictures: Any = None
    episodes: list[list[Episode]] | None = None
    answers: Any = None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that the policy wrote, i32 [P, G]; of episodes in each turn, [P, G, U]."""
        by_turn, mask = self.judgement.turn_rewards, self.samples.mask
        if by_turn is None:
            return mask.sum(-1, dtype=np.int32)
        turns = [mask & (self.samples.turn == turn) for turn in range(by_turn.shape[2])]
        return np.stack([one.sum(-1, dtype=np.int32) for one in turns], axis=-1)


class _Written(NamedTuple):
    """What the policy read and wrote of a chunk; as `Rollout` has it."""

    prompt: Encoded
    samples: Any
    completions: list[list[str]]
    usable: np.ndarray


class _Chunk(NamedTuple):
    """Part of a batch on its way through the stages; each of them adds what it makes.

    Attributes:
        rows: p prompts.
        texts: What is judged, [p][G].
        written: `_Written`, or None where the texts were given.
        pictures: What the renderer makes of the texts, or None.
        rewards: f32 [p, G, N].
        watched: f32 [p, G, watched].
    """

    rows: Sequence[Row]
    texts: list[list[str]]
    written: Any = None
    pictures: Any = None
    rewards: Any = None
    watched: Any = None


def prompt_keys(key: jax.Array, stream: int, rows: Sequence[Row]) -> jax.Array:
    """One key per prompt from (seed, iteration, prompt id) alone: typed key array [P]."""
    stream_key = jax.random.fold_in(key, stream)
    ids = jnp.asarray([row.id for row in rows], jnp.uint32)
    return jax.vmap(lambda row_id: jax.random.fold_in(stream_key, row_id))(ids)


def collect(
    environment: Environment,
    sample: Callable[..., Any],
    variables: Any,
    rows: Sequence[Row],
    *,
    key: jax.Array,
    iteration: int,
    see: See | None = None,
    evaluation: bool = False,
    chunk_prompts: int = 0,
    timeout: float | None = None,
    stopping: Callable[[], bool] = lambda: False,
    shown: int = 0,
    keep_prompt: int = 0,
    place: Place | None = None,
) -> Rollout:
    """Samples and judges one batch; the stages work at once on different chunks.

    Args:
        environment: Tokenizer, renderer and rewards.
        sample: sample(variables, prompt_tokens, prompt_mask, keys [P]) → Samples; with pictures=`PictureStates` where
            the prompts have some. An `EpisodeSampler` where the environment answers.
        variables: The policy's.
        rows: P prompts.
        key: The run's key.
        iteration: Chooses the random numbers in training; without influence in evaluation.
        see: Looks at the prompts' pictures, once for each chunk; None for a policy that sees none.
        evaluation: Fixed random numbers and evaluation's render settings.
        chunk_prompts: Prompts of a chunk; 0 for one chunk.
        timeout: Seconds a judge may spend on one chunk; the sampler, which compiles in its first call, has no limit.
        stopping: Whether a stop was asked for.
        shown: How many of the first rows keep the pictures of their episodes.
        keep_prompt: How often the unchanged prompt stands among a group's completions, behind those that are sampled;
            not where the environment answers.
        place: Among batches that are on their way at once; not where the environment answers.

    Raises:
        Stopped: A stop was asked for.
        StageError: A stage failed; names it and carries the cause.
    """
    keys = prompt_keys(key, EVALUATION_STREAM if evaluation else iteration, rows)
    if environment.answering is not None:
        episodes = Episodes(environment, sample, variables, rows, keys, see, iteration, evaluation, shown)
        ranges = _ranges(len(rows), chunk_prompts)
        plays, seconds = run_pipeline(
            ranges, episodes.stages(), timeout=timeout, in_flight=IN_FLIGHT, stopping=stopping
        )
        return _played(environment, rows, plays, episodes.seconds(seconds))

    def read(part: tuple[int, int]) -> tuple[tuple[int, int], Encoded]:
        return part, environment.encode(rows[slice(*part)])

    def write(given: tuple[tuple[int, int], Encoded]) -> _Chunk:
        (start, stop), prompt = given
        shown: dict[str, Any] = {}
        if prompt.pictures is not None and see is not None:
            states, kept = see(variables, prompt.pictures)
            shown, prompt = {"pictures": states}, prompt._replace(pictures=None if evaluation else kept)
        sampled = sample(variables, prompt.tokens, prompt.mask, keys[start:stop], **shown)
        return _with_prompts(_read(environment, rows[start:stop], prompt, jax.device_get(sampled)), keep_prompt)

    # Pictures are prepared while others are looked at; texts are no work, and take no room while they wait.
    first = [Stage("sample", lambda part: write(read(part)), timed=False, unbounded=True)]
    if see is not None:
        first = [Stage("read", read, timed=False), Stage("sample", write, timed=False, unbounded=True)]
    stages, ranges = [*first, *_judges(environment, iteration, evaluation)], _ranges(len(rows), chunk_prompts)
    chunks, seconds = run_pipeline(ranges, stages, timeout=timeout, stopping=stopping, place=place)
    written = [chunk.written for chunk in chunks]
    return Rollout(
        rows,
        right_aligned([part.prompt.tokens for part in written]),
        right_aligned([part.prompt.mask for part in written]),
        jax.tree.map(lambda *parts: np.concatenate(parts), *[part.samples for part in written]),
        [group for part in written for group in part.completions],
        [group for chunk in chunks for group in chunk.texts],
        np.concatenate([part.usable for part in written]),
        _judgement(chunks),
        seconds,
        joined([part.prompt.pictures for part in written]),
    )


def right_aligned(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Prompts of several chunks [p, L], padded on the left to the longest."""
    width = max(array.shape[1] for array in arrays)
    return np.concatenate([np.pad(array, ((0, 0), (width - array.shape[1], 0))) for array in arrays])


def _played(
    environment: Environment,
    rows: Sequence[Row],
    plays: Sequence[Play],
    seconds: dict[str, float],
) -> Rollout:
    """Episodes as a rollout, whose completions are their last turns."""
    answering = environment.answering
    assert answering is not None
    streams = [stream(play.samples, play.said, answering.stream_tokens, answering.pad_id) for play in plays]
    # A completion that the environment failed did not get as far as the others: it has no reward, of no turn.
    rewards = np.concatenate([np.where(play.failed[..., None, None], np.nan, play.rewards) for play in plays])
    watched = np.concatenate([play.watched for play in plays])
    episodes = [group for play in plays for group in play.episodes]
    last = np.array([[len(episode.turns) - 1 for episode in group] for group in episodes])[..., None, None]
    ends = [np.take_along_axis(values, last, axis=2)[:, :, 0] for values in (rewards, watched)]
    return Rollout(
        rows,
        right_aligned([play.prompt.tokens for play in plays]),
        right_aligned([play.prompt.mask for play in plays]),
        jax.tree.map(lambda *parts: np.concatenate(parts), *streams),
        [[episode.last.written for episode in group] for group in episodes],
        [[episode.last.text for episode in group] for group in episodes],
        np.array([[episode.last.usable for episode in group] for group in episodes]),
        Judgement(ends[0], ends[1], [], rewards, watched),
        seconds,
        joined([play.prompt.pictures for play in plays]),
        episodes,
        joined_some([chained(play.answers) for play in plays], [len(play.rows) for play in plays]),
    )


def judge(
    environment: Environment,
    rows: Sequence[Row],
    texts: Sequence[Sequence[str]],
    *,
    chunk_prompts: int = 0,
    timeout: float | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Judgement:
    """Judges given texts `[P][G]` as evaluation does: for the unchanged prompt and the oracle; raises as `collect`."""

    def give(part: tuple[int, int]) -> _Chunk:
        start, stop = part
        return _Chunk(rows[start:stop], [list(group) for group in texts[start:stop]])

    stages = [Stage("sample", give), *_judges(environment, 0, True)]
    chunks, _ = run_pipeline(_ranges(len(rows), chunk_prompts), stages, timeout=timeout, stopping=stopping)
    return _judgement(chunks)


def _judges(environment: Environment, iteration: int, evaluation: bool) -> list[Stage]:
    render = environment.render

    def score(chunk: _Chunk) -> _Chunk:
        alone = [[Episode((Turn(text),)) for text in group] for group in chunk.texts]
        told: dict[str, Any] = {} if environment.answering is None else {"episodes": alone}
        if chunk.written is not None:
            told["tokens"] = partial(written_tokens, chunk.written.samples)
        rewards, watched = environment.score(chunk.rows, chunk.texts, chunk.pictures, **told)
        return chunk._replace(rewards=rewards, watched=watched)

    if render is None:
        return [Stage("score", score)]

    def draw(chunk: _Chunk) -> _Chunk:
        return chunk._replace(pictures=render(chunk.rows, chunk.texts, iteration, evaluation))

    return [Stage("render", draw), Stage("score", score)]


def _read(environment: Environment, rows: Sequence[Row], prompt: Encoded, samples: Any) -> _Chunk:
    """A chunk of sampled tokens as text."""
    read = [
        [environment.decode(tokens[mask], row.prompt) for tokens, mask in zip(row_tokens, row_mask, strict=True)]
        for row, row_tokens, row_mask in zip(rows, samples.tokens, samples.mask, strict=True)
    ]
    written = _Written(
        prompt,
        samples,
        [[completion for completion, _, _ in group] for group in read],
        np.array([[usable for _, _, usable in group] for group in read]),
    )
    return _Chunk(rows, [[text for _, text, _ in group] for group in read], written)


def _with_prompts(chunk: _Chunk, count: int) -> _Chunk:
    """A chunk with so many unchanged prompts behind each group's completions: judged like them, and without a token."""
    if count == 0:
        return chunk

    def behind(array: np.ndarray, value: Any = 0) -> np.ndarray:
        return np.pad(array, ((0, 0), (0, count), *[(0, 0)] * (array.ndim - 2)), constant_values=value)

    def texts(groups: list[list[str]]) -> list[list[str]]:
        return [[*group, *[row.prompt] * count] for group, row in zip(groups, chunk.rows, strict=True)]

    written = chunk.written
    written = written._replace(
        samples=jax.tree.map(behind, written.samples),
        completions=texts(written.completions),
        usable=behind(written.usable, True),
    )
    return chunk._replace(texts=texts(chunk.texts), written=written)


def _ranges(count: int, size: int) -> list[tuple[int, int]]:
    size = size or count
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _judgement(chunks: Sequence[_Chunk]) -> Judgement:
    return Judgement(
        np.concatenate([chunk.rewards for chunk in chunks]),
        np.concatenate([chunk.watched for chunk in chunks]),
        [chunk.pictures for chunk in chunks],
    )
