"""Run a batch of prompts through sampler, renderer, rewards and environment.

    chunk i:  sample ─► render ─► score ─► env ─► sample 2 ─► render 2 ─► score 2 ─► …

Every rollout is a batch of episodes; where the policy writes once, each has one turn. Axes: P prompts, G completions
of each, U turns, T tokens, N rewards, W watched measures. The parts come as functions in an `Environment`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import StageError, Stopped
from grpo_jax.models.broadcast import broadcast, is_main_process, process_count
from grpo_jax.models.sharding import on_host
from grpo_jax.models.variables import PyTree
from grpo_jax.models.vision.pictures import Pictures, PictureStates, chained, joined_some
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.encoding import Encoded, PictureInput
from grpo_jax.rollout.env import EnvError, Episode, Observation, Turn
from grpo_jax.rollout.environment import Environment, EnvSettings, ReplyTokens, ask_environment
from grpo_jax.rollout.pipeline import Slot, Stage, run_pipeline
from grpo_jax.sampling.episodes import Carried, EpisodeSampler
from grpo_jax.sampling.sampler import Samples
from grpo_jax.training.estimators import Objectives

EVALUATION_STREAM = 2**31 - 1
"""Replaces the iteration in the keys of evaluation, so that no training iteration shares them."""
IN_FLIGHT = 2
"""Chunks between their first turn and their last reward where there are several turns: caches stay on the device."""
_TURN_STREAM = 2**31 - 7  # folded into a prompt's key for the turns after the first

Tree = TypeVar("Tree")
Sample = EpisodeSampler | Callable[..., Samples]


class Episodes(NamedTuple):
    """Prompts and completions of a batch, on the host.

    Attributes:
        prompt_tokens: i32 [P, L], left-padded; a picture stands in them as its placeholders.
        prompt_mask: bool [P, L].
        samples: Arrays [P, G, T] and [P, G], all turns of a completion in one stream (`join_turns`).
        episodes: `[P][G]`.
        lengths: i32 [P, G, U], tokens that the policy wrote in each turn.
        seconds: Seconds of work by stage.
        pictures: "pictures" [P, I, ..] of the prompts and "answers" [P, G, I, ..], as the update takes them; empty in
            evaluation.
    """

    rows: Sequence[Row]
    prompt_tokens: np.ndarray
    prompt_mask: np.ndarray
    samples: Samples
    episodes: list[list[Episode]]
    lengths: np.ndarray
    seconds: dict[str, float]
    pictures: Mapping[str, PictureInput] = {}

    @property
    def texts(self) -> list[list[str]]:
        """The last parsed completion, `[P][G]`."""
        return _texts(self.episodes)

    @property
    def completions(self) -> list[list[str]]:
        """The last raw completion, `[P][G]`."""
        return [[episode.last.raw_completion for episode in group] for group in self.episodes]

    @property
    def valid(self) -> np.ndarray:
        """bool [P, G], false where the last text could not be read and another stands in."""
        return np.array([[episode.last.valid for episode in group] for group in self.episodes])

    @property
    def usable_turns(self) -> np.ndarray:
        """bool [P, G, U], likewise of each turn; true for one that does not exist."""
        valid = np.ones(self.lengths.shape, bool)
        for p, g in np.ndindex(valid.shape[:2]):
            turns = self.episodes[p][g].turns
            valid[p, g, : len(turns)] = [turn.valid for turn in turns]
        return valid


class Judgement(NamedTuple):
    """Rewards of episodes.

    Attributes:
        rewards: f32 [P, G, U, N]; NaN where one is missing, and of turns that do not exist.
        watched: f32 [P, G, U, W], likewise.
        last: i32 [P, G], the last turn of each episode, from 0.
        columns: Columns of a task's ranking (`tasks.task.Choices`), P values by name.
        objectives: What is maximised; None in evaluation.
        informative: bool [P], the groups that the estimator learns something from; None in evaluation.
    """

    rewards: np.ndarray
    watched: np.ndarray
    last: np.ndarray
    columns: Mapping[str, Sequence[Any]] = {}
    objectives: Objectives | None = None
    informative: np.ndarray | None = None

    @property
    def informative_count(self) -> int:
        """The number of informative groups."""
        return 0 if self.informative is None else int(self.informative.sum())

    @property
    def final_rewards(self) -> np.ndarray:
        """f32 [P, G, N], those of the last turn."""
        return _at_last(self.rewards, self.last)

    @property
    def final_watched(self) -> np.ndarray:
        """f32 [P, G, W], those of the last turn."""
        return _at_last(self.watched, self.last)


def _at_last(values: np.ndarray, last: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, last[..., None, None], axis=2)[:, :, 0]


@dataclass
class EpisodeChunk:
    """Part of a batch on its way through the stages, which one at a time change it.

    Attributes:
        start: The chunk's first row in the batch.
        rows: p prompts.
        episodes: `[p][G]`, as far as they have come.
        rewards: f32 [p, G, U, N]; NaN where a turn does not exist.
        watched: f32 [p, G, U, W].
        active: bool [p, G], the completions that this turn is about.
        failed: bool [p, G], those that the environment failed to answer.
        prompt: None where given texts are judged.
        samples: Of each turn, on the host.
        replies: Tokens between the turns.
        answer_pictures: [p, G, I, ..] in each of `replies`, as the update takes them, or None.
        carried: State that the sampler goes on from.
        drawn: Pictures of this turn's texts, or None.
    """

    start: int
    rows: Sequence[Row]
    episodes: list[list[Episode]]
    rewards: np.ndarray
    watched: np.ndarray
    active: np.ndarray
    failed: np.ndarray
    prompt: Encoded | None = None
    samples: list[Samples] = field(default_factory=list)
    replies: list[ReplyTokens] = field(default_factory=list)
    answer_pictures: list[PictureInput | None] = field(default_factory=list)
    carried: Carried | None = None
    drawn: object = None

    @property
    def places(self) -> list[tuple[int, int]]:
        """(p, g) of the active completions, in order."""
        return [(int(p), int(g)) for p, g in np.argwhere(self.active)]

    @property
    def groups(self) -> list[list[tuple[int, int]]]:
        """(p, g) of the active completions that are judged together: whole groups, or each alone once some ended."""
        if not self.active.all():
            return [[place] for place in self.places]
        return [[(p, g) for g in range(self.active.shape[1])] for p in range(len(self.rows))]

    def judged(self) -> tuple[list[Row], list[list[Episode]]]:
        """Return rows and episodes of `groups`."""
        groups = self.groups
        rows = [self.rows[group[0][0]] for group in groups]
        return rows, [[self.episodes[p][g] for p, g in group] for group in groups]

    def tokens(self) -> list[list[list[int]]]:
        """Return what the policy wrote in the last turn, of `groups`."""
        return [[self.written(place).tolist() for place in group] for group in self.groups]

    def written(self, place: tuple[int, int]) -> np.ndarray:
        """Return the tokens of a completion's last turn."""
        samples = self.samples[-1]
        return np.asarray(samples.tokens[place])[np.asarray(samples.mask[place])]

    def change_last(self, place: tuple[int, int], **values: object) -> None:
        """Change the last turn of a completion."""
        p, g = place
        self.episodes[p][g] = self.episodes[p][g].with_last(**values)


def prompt_keys(key: jax.Array, stream: int, rows: Sequence[Row]) -> jax.Array:
    """Derive one key per prompt from (seed, iteration, prompt id) alone: typed key array [P]."""
    stream_key = jax.random.fold_in(key, stream)
    ids = jnp.asarray([row.id for row in rows], jnp.uint32)
    return jax.vmap(lambda row_id: jax.random.fold_in(stream_key, row_id))(ids)


def turn_keys(keys: jax.Array, turn: int) -> jax.Array:
    """Derive the keys [P] of a turn, from 0; the first has the prompts' own."""
    if turn == 0:
        return keys
    return jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, _TURN_STREAM), turn))(keys)


class Scheduling(NamedTuple):
    """How a batch goes through the pipeline; no result depends on it.

    Attributes:
        chunk_prompts: Prompts of a chunk; 0 for one chunk.
        timeout: Seconds a judge may spend on one chunk; the sampler, which compiles in its first call, has no limit.
        slot: Among batches that are on their way at once; not where the environment answers.
    """

    chunk_prompts: int = 0
    timeout: float | None = None
    stopping: Callable[[], bool] = lambda: False
    slot: Slot | None = None


def collect(
    environment: Environment,
    sample: Sample,
    variables: PyTree,
    rows: Sequence[Row],
    *,
    key: jax.Array,
    iteration: int | None,
    scheduling: Scheduling = Scheduling(),
) -> tuple[Episodes, Judgement]:
    """Sample and judge one batch; the stages work at once on different chunks.

    Args:
        sample: sample(variables, prompt_tokens, prompt_mask, keys [P]) → Samples; with pictures=`PictureStates` where
            the prompts have some. An `EpisodeSampler` where the environment answers.
        key: The run's key.
        iteration: Chooses the random numbers in training; None in evaluation, whose numbers are fixed.

    Raises:
        Stopped: A stop was asked for.
        StageError: A stage failed.
    """
    keys = prompt_keys(key, EVALUATION_STREAM if iteration is None else iteration, rows)
    stages = _Stages(environment, iteration, rows, sample, variables, keys)
    env = environment.env
    in_flight = None
    if env is not None:  # processes take part in one turn at a time
        in_flight = IN_FLIGHT if process_count() == 1 else 1
    chunks, seconds, judgement = stages.run(scheduling, stages.sampled(), in_flight)
    episodes = _joined([_episodes_of(chunk, env, stages.turns) for chunk in chunks])
    return episodes._replace(seconds=stages.seconds(seconds)), judgement


def judge(
    environment: Environment,
    rows: Sequence[Row],
    texts: Sequence[Sequence[str]],
    scheduling: Scheduling = Scheduling(),
) -> tuple[list[list[Episode]], Judgement]:
    """Judge given texts `[P][G]`, as episodes of one turn, the way evaluation does; raises as `collect`."""
    stages = _Stages(environment, None, rows)
    chunks, _, judgement = stages.run(scheduling, stages.judging(texts))
    return [group for chunk in chunks for group in chunk.episodes], judgement


class _Ended(Exception):
    """In another process than 0: its error, which ends the batch in all."""

    def __init__(self, error: StageError | Stopped):
        self.error = error


@dataclass(frozen=True)
class _Stages:
    """Stages of one batch; arguments as of `collect`, keys [P]."""

    environment: Environment
    iteration: int | None
    rows: Sequence[Row]
    sample: Sample | None = None
    variables: PyTree = None
    keys: jax.Array | None = None
    device: threading.Lock = field(default_factory=threading.Lock)  # two of the sampler's programs need two memories
    waited: list[float] = field(default_factory=list)  # seconds for `device`
    ended: threading.Event = field(default_factory=threading.Event)  # process 0 has told the others so

    @property
    def turns(self) -> int:
        """U."""
        return 1 if self.environment.env is None else self.environment.env.turns

    @property
    def gallery(self) -> int:
        """The number of first rows whose pictures are kept for the report."""
        return 0 if self.iteration is not None else self.environment.gallery

    def run(
        self, scheduling: Scheduling, stages: list[Stage], in_flight: int | None = None
    ) -> tuple[list[EpisodeChunk], dict[str, float], Judgement]:
        """Send the batch through stages; of several processes all sample it, and process 0 judges it for all."""
        try:
            prompts = len(self.rows)
            size = scheduling.chunk_prompts or prompts
            chunks, seconds = run_pipeline(
                [(start, min(start + size, prompts)) for start in range(0, prompts, size)],
                stages,
                timeout=scheduling.timeout,
                in_flight=in_flight,
                stopping=scheduling.stopping,
                slot=scheduling.slot,
            )
            judgement = _judgement(chunks)
            judged = self._share([judgement.rewards, judgement.watched, judgement.last])
        except (StageError, Stopped, _Ended) as error:
            ended = error if isinstance(error, _Ended) else error.__cause__
            if isinstance(ended, _Ended):
                raise ended.error from None
            in_all = isinstance(error, StageError) and error.stage.startswith(("read", "sample"))
            if process_count() > 1 and is_main_process() and not in_all:
                with self.device:  # what is being sampled is sampled to its end, by all
                    self.ended.set()
                    broadcast({"stopped": isinstance(error, Stopped), "error": str(error)})
            raise
        return chunks, seconds, Judgement(*judged)

    def _share(self, tree: Any) -> Any:
        """Return process 0's tree in all processes; raises `_Ended` if it has ended the batch."""
        if self.ended.is_set():
            raise Stopped
        message = broadcast(tree)
        if isinstance(message, dict) and "error" in message:
            raise _Ended(Stopped() if message["stopped"] else StageError("score", 0, message["error"]))
        return message

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Hold the policy's devices, in all processes."""
        started = time.perf_counter()
        with self.device:
            self.waited.append(time.perf_counter() - started)
            self._share(None)
            yield

    def sampled(self) -> list[Stage]:
        """Stages from (first row, row behind the last) to an `EpisodeChunk`."""
        if self.environment.encode_images is None:  # texts are no work to read, and take no room while they wait
            first = [Stage("sample", lambda part: self.begin(self.read(part)), timed=False, unbounded=True)]
        else:  # pictures are read while others are encoded
            first = [Stage("read", self.read, timed=False), Stage("sample", self.begin, timed=False)]
        stages = [*first, *self._judging(0)]
        for turn in range(1, self.turns):
            stages.append(Stage(_named("env", turn - 1), self.step))
            stages.append(Stage(_named("sample", turn), partial(self.go_on, turn), timed=False))
            stages += self._judging(turn)
        return stages

    def judging(self, texts: Sequence[Sequence[str]]) -> list[Stage]:
        """Stages from (first row, row behind the last) to an `EpisodeChunk` of given texts."""

        def begin(part: tuple[int, int]) -> EpisodeChunk:
            episodes = [[Episode((Turn(text),)) for text in group] for group in texts[slice(*part)]]
            return self._chunk(part[0], episodes, turns=1)

        return [Stage("sample", begin), *self._judging(0, last=True)]

    def _judging(self, turn: int, *, last: bool = False) -> list[Stage]:
        if not is_main_process():
            return []
        score = partial(self.score, turn, last or turn + 1 == self.turns)
        stages = [Stage(_named("score", turn), score)]
        return stages if self.environment.render is None else [Stage(_named("render", turn), self.render), *stages]

    def _chunk(self, start: int, episodes: list[list[Episode]], turns: int) -> EpisodeChunk:
        shape = (len(episodes), len(episodes[0]))
        rewards, watched = (
            np.full((*shape, turns, len(names)), np.nan, np.float32)
            for names in (self.environment.reward_names, self.environment.eval_reward_names)
        )
        rows = self.rows[start : start + len(episodes)]
        return EpisodeChunk(start, rows, episodes, rewards, watched, np.ones(shape, bool), np.zeros(shape, bool))

    def read(self, part: tuple[int, int]) -> tuple[tuple[int, int], Encoded]:
        return part, self.environment.encode(self.rows[slice(*part)])

    def begin(self, read: tuple[tuple[int, int], Encoded]) -> EpisodeChunk:
        (start, stop), prompt = read
        assert self.keys is not None and self.sample is not None
        shown: dict[str, PictureStates] = {}
        with self._sampling():
            if prompt.pictures is not None and self.environment.encode_images is not None:
                shown["pictures"], trained_on = self._encode_images(prompt.pictures)
                prompt = prompt._replace(pictures=trained_on)
            given = self.variables, prompt.tokens, prompt.mask, self.keys[start:stop]
            if isinstance(self.sample, EpisodeSampler):
                samples, carried = self.sample.begin(*given, **shown)
            else:
                samples, carried = self.sample(*given, **shown), None
            samples = on_host(samples)
        empty = [[Episode(())] * samples.truncated.shape[1] for _ in range(start, stop)]
        chunk = self._chunk(start, empty, self.turns)
        chunk.prompt = prompt
        chunk.carried = carried
        self._read_turn(chunk, samples)
        return chunk

    def go_on(self, turn: int, chunk: EpisodeChunk) -> EpisodeChunk:
        carried, chunk.carried = chunk.carried, None
        if not chunk.active.any():
            return chunk
        assert self.keys is not None and isinstance(self.sample, EpisodeSampler)
        reply = chunk.replies[-1]
        keys = turn_keys(self.keys[chunk.start : chunk.start + len(chunk.rows)], turn)
        states = trained_on = None
        with self._sampling():
            if reply.pictures is not None:
                states, trained_on = self._encode_images(reply.pictures)
            samples, carried = self.sample.go_on(
                self.variables, carried, reply.tokens, reply.mask, keys, chunk.active, states
            )
            samples = on_host(samples)
        if turn + 1 < self.turns:
            chunk.carried = carried
        chunk.answer_pictures.append(trained_on)
        self._read_turn(chunk, samples)
        return chunk

    def _encode_images(self, pictures: Pictures) -> tuple[PictureStates, PictureInput | None]:
        """Return the states of pictures and, but in evaluation, what the update takes of them."""
        if self.environment.encode_images is None:  # it must not answer with what nobody looks at
            raise EnvError("it answered with a picture, and the policy's vision tower is not loaded (task.pictures)")
        states, trained_on = self.environment.encode_images(self.variables, pictures)
        return states, None if self.iteration is None else trained_on

    def _read_turn(self, chunk: EpisodeChunk, samples: Samples) -> None:
        """Add the sampled turn to the active episodes."""
        chunk.samples.append(samples)
        for p, g in chunk.places:
            raw, parsed = self.environment.decode(chunk.written((p, g)), chunk.rows[p].prompt)
            turn = Turn(parsed.text, raw, parsed.valid, bool(samples.truncated[p, g]))
            chunk.episodes[p][g] = Episode((*chunk.episodes[p][g].turns, turn))

    def render(self, chunk: EpisodeChunk) -> EpisodeChunk:
        render = self.environment.render
        if render is None or not chunk.active.any():
            return chunk
        rows, episodes = chunk.judged()
        chunk.drawn = render(rows, _texts(episodes), self.iteration or 0, self.iteration is None)
        images = getattr(chunk.drawn, "images", None)
        if images is not None:  # it may fail
            for number, place in enumerate(chunk.places):
                # A picture that nobody looks at stays where it was drawn, perhaps on another machine.
                if self.environment.env is not None or chunk.start + place[0] < self.gallery:
                    chunk.change_last(place, image=images[number])
        return chunk

    def score(self, turn: int, last: bool, chunk: EpisodeChunk) -> EpisodeChunk:
        environment = self.environment
        if chunk.active.any():
            rows, episodes = chunk.judged()
            judged = environment.score(
                rows,
                _texts(episodes),
                chunk.drawn,
                episodes=None if environment.env is None else episodes,
                tokens=chunk.tokens if chunk.samples else None,
            )
            chunk.drawn = None
            places = chunk.places
            for array, values in zip((chunk.rewards, chunk.watched), judged, strict=True):
                array[chunk.active, turn] = values.reshape(len(places), values.shape[-1])
            names = (*environment.reward_names, *environment.eval_reward_names)
            for p, g in places:
                values = np.concatenate([chunk.rewards[p, g, turn], chunk.watched[p, g, turn]]).tolist()
                chunk.change_last((p, g), rewards=dict(zip(names, values, strict=True)))
        if last:
            chunk.episodes = [
                [episode.remembered(pictures=row < self.gallery) for episode in group]
                for row, group in enumerate(chunk.episodes, chunk.start)
            ]
        return chunk

    def step(self, chunk: EpisodeChunk) -> EpisodeChunk:
        """Ask the environment for its answer to each active completion; those that go on stay active."""
        env = self.environment.env
        if env is None or not chunk.active.any():
            return chunk
        places = chunk.places
        asked = [chunk.rows[p] for p, _ in places], [chunk.episodes[p][g] for p, g in places]
        ended = [chunk.written(place)[-1] in env.eos_ids for place in places]
        answers: list[Observation | None] = []
        reply = ReplyTokens(np.zeros(0), np.zeros(0))
        if is_main_process():
            answers, reply = ask_environment(env, self.environment.prepare, *asked, ended, places, chunk.active.shape)
        if process_count() > 1:
            answers, reply = self._shared_observations(answers, reply)
        for place, answer in zip(places, answers, strict=True):
            chunk.active[place] = answer is not None and not answer.done
            chunk.failed[place] = answer is None
            chunk.change_last(place, observation=answer)
        chunk.replies.append(reply)
        return chunk

    def _shared_observations(
        self, answers: list[Observation | None], reply: ReplyTokens
    ) -> tuple[list[Observation | None], ReplyTokens]:
        """Return process 0's answers in all processes; the others have no pictures but the prepared ones."""
        texts = [None if answer is None else [answer.text, answer.done] for answer in answers]
        pictures = None if reply.pictures is None else [*reply.pictures]
        with self.device:
            texts, tokens, mask, pictures = self._share([texts, reply.tokens, reply.mask, pictures])
        if is_main_process():
            return answers, reply
        answers = [None if text is None else Observation(text[0], done=text[1]) for text in texts]
        return answers, ReplyTokens(tokens, mask, None if pictures is None else Pictures(*pictures))

    def seconds(self, by_stage: Mapping[str, float]) -> dict[str, float]:
        """Sum the seconds of all turns by stage; the sampler's without its waiting for itself."""
        total: dict[str, float] = {}
        for name, value in by_stage.items():
            stage = name.partition(" ")[0]
            total[stage] = total.get(stage, 0.0) + value
        total["sample"] -= sum(self.waited)
        return total


def _named(stage: str, turn: int) -> str:
    return stage if turn == 0 else f"{stage} {turn + 1}"


def _texts(episodes: list[list[Episode]]) -> list[list[str]]:
    return [[episode.last.completion for episode in group] for group in episodes]


def _judgement(chunks: Sequence[EpisodeChunk]) -> Judgement:
    # A completion that the environment failed did not get as far as the others: it has no reward, of no turn.
    rewards = [np.where(chunk.failed[..., None, None], np.float32(np.nan), chunk.rewards) for chunk in chunks]
    last = [[len(episode.turns) - 1 for episode in group] for chunk in chunks for group in chunk.episodes]
    return Judgement(np.concatenate(rewards), np.concatenate([chunk.watched for chunk in chunks]), np.array(last))


def _episodes_of(chunk: EpisodeChunk, env: EnvSettings | None, turns: int) -> Episodes:
    assert chunk.prompt is not None
    samples = chunk.samples[0]
    if env is not None:
        samples = join_turns(chunk.samples, chunk.replies, env.stream_tokens, env.pad_id)
    pictures = {"pictures": chunk.prompt.pictures, "answers": chained(chunk.answer_pictures)}
    return Episodes(
        chunk.rows,
        chunk.prompt.tokens,
        chunk.prompt.mask,
        samples,
        chunk.episodes,
        _lengths(samples, turns),
        {},
        {name: some for name, some in pictures.items() if some is not None},
    )


def _joined(parts: Sequence[Episodes]) -> Episodes:
    """Join the episodes of several chunks or batches; prompts are padded on the left to the longest."""
    width = max(one.prompt_tokens.shape[1] for one in parts)

    def aligned(array: np.ndarray) -> np.ndarray:
        return np.pad(array, ((0, 0), (width - array.shape[1], 0)))

    counts = [len(one.rows) for one in parts]
    names = sorted({name for one in parts for name in one.pictures})
    pictures = {name: joined_some([one.pictures.get(name) for one in parts], counts) for name in names}
    return Episodes(
        [row for one in parts for row in one.rows],
        np.concatenate([aligned(one.prompt_tokens) for one in parts]),
        np.concatenate([aligned(one.prompt_mask) for one in parts]),
        _concatenated([one.samples for one in parts]),
        [group for one in parts for group in one.episodes],
        np.concatenate([one.lengths for one in parts]),
        {name: sum(one.seconds[name] for one in parts) for name in parts[0].seconds},
        {name: some for name, some in pictures.items() if some is not None},
    )


def _concatenated(parts: Sequence[Tree]) -> Tree:
    """Concatenate trees of arrays [p, ..], on the host."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def _lengths(samples: Samples, turns: int) -> np.ndarray:
    if samples.turn is None:
        return np.asarray(samples.mask).sum(-1, dtype=np.int32)[..., None]
    by_turn = [samples.mask & (samples.turn == turn) for turn in range(turns)]
    return np.stack([mask.sum(-1, dtype=np.int32) for mask in by_turn], axis=-1)


def join_turns(samples: Sequence[Samples], replies: Sequence[ReplyTokens], length: int, pad_id: int) -> Samples:
    """Join all turns of each completion and the replies between them to one stream without holes, [P, G, length].

    `mask` is true for the policy's tokens, `present` for the first places of each row; `turn` is a token's turn from
    0, or the turn that it answers. A completion is truncated if any of its turns was. `samples` has each turn, [P, G,
    T] on the host, fewer than there may be where all episodes ended.
    """
    parts = []
    for turn, one in enumerate(samples):
        number = np.full_like(one.tokens, turn)
        parts.append((one.tokens, one.mask, one.mask, one.logprobs, one.sampler_logprobs, number))
        if turn + 1 < len(samples):
            tokens, there = replies[turn].tokens, replies[turn].mask
            nothing = np.zeros(there.shape, np.float32)
            parts.append((tokens, there, np.zeros_like(there), nothing, nothing, np.full_like(tokens, turn)))
    whole = [np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True)]
    order = np.argsort(~whole[1], axis=-1, kind="stable")
    tokens, present, *others = (np.take_along_axis(array, order, axis=-1) for array in whole)

    def filled(array: np.ndarray, fill: int = 0) -> np.ndarray:
        array = np.where(present, array, fill).astype(array.dtype)[..., :length]
        missing = length - array.shape[-1]
        return np.pad(array, ((0, 0), (0, 0), (0, missing)), constant_values=fill) if missing else array

    mask, logprobs, sampler_logprobs, turns = map(filled, others)
    truncated = np.any([one.truncated for one in samples], axis=0)
    return Samples(
        filled(tokens, pad_id), mask, logprobs, sampler_logprobs, truncated, present=filled(present), turn=turns
    )


def informative_first(batches: Sequence[tuple[Episodes, Judgement]]) -> tuple[Episodes, Judgement]:
    """Choose, from several batches, as many groups as the first has, informative ones first."""
    judgements = [judgement for _, judgement in batches]
    informative = np.concatenate([one.informative for one in judgements if one.informative is not None])
    places = np.argsort(~informative, kind="stable")[: len(batches[0][0].rows)]
    objectives = [one.objectives for one in judgements if one.objectives is not None]
    values = [(one.rewards, one.returns) for one in objectives]
    rewards, returns = jax.tree.map(lambda *arrays: jnp.concatenate(arrays)[places], *values)  # on their device

    def pick(tree: Tree) -> Tree:
        return jax.tree.map(lambda array: array[places], tree)

    episodes = _joined([episodes for episodes, _ in batches])
    return episodes._replace(
        rows=[episodes.rows[place] for place in places],
        prompt_tokens=episodes.prompt_tokens[places],
        prompt_mask=episodes.prompt_mask[places],
        samples=pick(episodes.samples),
        episodes=[episodes.episodes[place] for place in places],
        lengths=episodes.lengths[places],
        pictures=pick(episodes.pictures),
    ), Judgement(
        *pick(_concatenated([(one.rewards, one.watched, one.last) for one in judgements])),
        objectives=objectives[0]._replace(rewards=rewards, returns=returns),
        informative=informative[places],
    )
