"""Collect a batch: sample completions, judge them, and step the environment between turns.

    chunk:  sample ─► render ─► score ─► env ─► sample ─► render ─► score ─► …

Every rollout is a batch of episodes; in single-turn tasks each has one turn. Axes: P prompts, G completions of each,
U turns, T tokens, N rewards, W eval rewards. `RolloutFns` holds the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from grpo_jax.models.broadcast import is_main_process, process_count
from grpo_jax.models.sharding import on_host
from grpo_jax.models.variables import PyTree
from grpo_jax.models.vision.pictures import Pictures, PictureStates, chained, joined_some
from grpo_jax.rollout.data import Encoded, Row
from grpo_jax.rollout.encoding import ParsedCompletion, PictureInput
from grpo_jax.rollout.env import Env, EnvSettings, Episode, Observation, Turn, ask_environment
from grpo_jax.rollout.pictures import Source
from grpo_jax.rollout.pipeline import Work
from grpo_jax.rollout.rewards import ExtraColumns, Score
from grpo_jax.sampling.decoding import Samples
from grpo_jax.sampling.episodes import EpisodeSampler

EVALUATION_STREAM = 2**31 - 1
"""Replaces the iteration in the keys of evaluation, so that no training iteration shares them."""
GALLERY = 12
"""First held-out prompts whose pictures are kept."""
_TURN_STREAM = 2**31 - 7  # folded into a prompt's key for the turns after the first

Sample = EpisodeSampler | Callable[..., Samples]


class RolloutFns(NamedTuple):
    """Functions between a policy's tokens and its rewards."""

    encode: Callable[[Sequence[Row]], Encoded]  # left-padded to a length that does not depend on the batch
    # (token ids of one completion, the user's prompt) → (raw completion, its `ParsedCompletion`)
    decode: Callable[[np.ndarray, str], tuple[str, ParsedCompletion]]
    # (rows, texts `[P][G]`, iteration, evaluation) → pictures for `score`; None without a renderer
    render: Callable[[Sequence[Row], list[list[str]], int, bool], object] | None
    score: Score
    reward_names: tuple[str, ...]
    eval_reward_names: tuple[str, ...]
    # pictures in memory, torch float [N, 3, H, W] in [0, 1] or a list of a row's sources → `Pictures` [N, 1, ..] from
    # the policy's image processor; None for a policy without pictures
    prepare: Callable[[Source], Pictures] | None = None
    env: EnvSettings | None = None  # None for single-turn tasks
    # (variables, pictures) → their states, and the input of the update: these states, or the `Pictures` to encode
    # again; None for a policy without pictures
    encode_images: Callable[[PyTree, Pictures], tuple[PictureStates, PictureInput]] | None = None
    picture_rewards: frozenset[str] = frozenset()  # names of the rewards with an argument `images`

    def see(self, variables: PyTree, pictures: Pictures | None) -> tuple[PictureStates | None, PictureInput | None]:
        """Return the states of pictures and the input of the update; None for both without pictures."""
        if pictures is None or self.encode_images is None:
            return None, None
        return self.encode_images(variables, pictures)

    def with_step(self, step: Env) -> RolloutFns:
        """Return the functions with another environment, such as a control."""
        return self if self.env is None else self._replace(env=self.env._replace(step=step))


class Rollout(NamedTuple):
    """Prompts, completions and rewards of a batch, on the host."""

    rows: Sequence[Row]
    episodes: list[list[Episode]]  # `[P][G]`, as tasks see them: texts, pictures, observations
    rewards: np.ndarray  # f32 [P, G, U, N]; NaN if the reward or the turn is missing
    eval_rewards: np.ndarray  # f32 [P, G, U, W], likewise
    # [P, G, T] and [P, G], all turns of a completion in one stream (`join_turns`); None for given texts
    samples: Samples | None = None
    prompt_tokens: np.ndarray | None = None  # i32 [P, L], left-padded, with placeholder tokens for pictures
    prompt_mask: np.ndarray | None = None  # bool [P, L]
    # inputs of the update: "pictures" [P, I, ..] of prompts, "observations" [P, G, I, ..]; empty in evaluation
    pictures: Mapping[str, PictureInput] = {}
    seconds: Mapping[str, float] = {}  # of work, by stage
    columns: Mapping[str, Sequence[Any]] = {}  # P values by name from a task's ranking (`tasks.task.Choices`)

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of the policy's tokens in each turn, i32 [P, G, U]; 0 for given texts."""
        if self.samples is None:
            return np.zeros(self.rewards.shape[:3], np.int32)
        mask, turn = np.asarray(self.samples.mask), self.samples.turn
        turns = [mask] if turn is None else [mask & (turn == u) for u in range(self.rewards.shape[2])]
        return np.stack([tokens.sum(-1, dtype=np.int32) for tokens in turns], axis=-1)

    @property
    def texts(self) -> list[list[str]]:
        """Return the last parsed completions, `[P][G]`."""
        return [[episode.last.completion for episode in group] for group in self.episodes]

    @property
    def valid_turns(self) -> np.ndarray:
        """Return whether each turn's completion parsed, bool [P, G, U]."""
        valid = np.ones(self.rewards.shape[:3], bool)
        for p, g in np.ndindex(valid.shape[:2]):
            turns = self.episodes[p][g].turns
            valid[p, g, : len(turns)] = [turn.valid for turn in turns]
        return valid

    @property
    def valid(self) -> np.ndarray:
        """Return `valid_turns` of the last turn, bool [P, G]."""
        return np.array([[episode.last.valid for episode in group] for group in self.episodes])

    @property
    def final_rewards(self) -> np.ndarray:
        """Return the rewards of the last turn, f32 [P, G, N]."""
        return self._at_last(self.rewards)

    @property
    def final_eval_rewards(self) -> np.ndarray:
        """Return the eval rewards of the last turn, f32 [P, G, W]."""
        return self._at_last(self.eval_rewards)

    @property
    def final_values(self) -> np.ndarray:
        """Return rewards and eval rewards of the last turn, f32 [P, G, N + W]."""
        return np.concatenate([self.final_rewards, self.final_eval_rewards], axis=-1)

    def _at_last(self, values: np.ndarray) -> np.ndarray:
        last = np.array([[len(episode.turns) - 1 for episode in group] for group in self.episodes])
        return np.take_along_axis(values, last[..., None, None], axis=2)[:, :, 0]

    def pick(self, places: Sequence[int] | np.ndarray) -> Rollout:
        """Return the groups at some places."""
        arrays = (self.samples, self.prompt_tokens, self.prompt_mask, self.pictures)
        return Rollout(
            [self.rows[place] for place in places],
            [self.episodes[place] for place in places],
            self.rewards[places],
            self.eval_rewards[places],
            *jax.tree.map(lambda array: array[places], arrays),
            seconds=self.seconds,
        )


def collect(
    fns: RolloutFns,
    sample: Sample,
    variables: PyTree,
    rows: Sequence[Row],
    *,
    key: jax.Array,
    iteration: int | None,
    work: Work | None = None,
) -> Rollout:
    """Sample and judge one batch, two chunks at a time.

    `sample` is sample(variables, prompt_tokens, prompt_mask, keys [P]) → Samples, with pictures=`PictureStates` if the
    prompts have pictures, or an `EpisodeSampler`. `iteration` selects random numbers from the run's `key`; None in
    evaluation, whose numbers are fixed. Raises Stopped on a stop request, StageError if a stage fails.
    """
    work = work or Work()
    keys = prompt_keys(key, EVALUATION_STREAM if iteration is None else iteration, rows)

    def chunk(number: int, part: slice) -> Rollout:
        return _Chunk(fns, work, number, rows[part], iteration, part.start).collect(sample, variables, keys[part])

    return join_rollouts(_by_chunk(work, rows, chunk))._replace(seconds=work.seconds)


def judge(fns: RolloutFns, rows: Sequence[Row], texts: Sequence[Sequence[str]], work: Work | None = None) -> Rollout:
    """Judge given texts `[P][G]` as single-turn episodes, as in evaluation; raises as `collect`."""
    work = work or Work()

    def chunk(number: int, part: slice) -> Rollout:
        return _Chunk(fns, work, number, rows[part], None, part.start).judge(texts[part])

    return join_rollouts(_by_chunk(work, rows, chunk))


def _by_chunk(work: Work, rows: Sequence[Row], chunk: Callable[[int, slice], Rollout]) -> list[Rollout]:
    size = work.chunk_prompts or len(rows)
    starts = range(0, len(rows), size)
    return work.run(len(starts), lambda number: chunk(number, slice(starts[number], starts[number] + size)))


class _Chunk:
    """Part of a batch: p prompts, and their completions so far. `start` is its first row."""

    def __init__(
        self, fns: RolloutFns, work: Work, number: int, rows: Sequence[Row], iteration: int | None, start: int
    ):
        self.fns, self.work, self.number = fns, work, number
        self.rows, self.iteration, self.start = rows, iteration, start
        self.gallery = 0 if iteration is not None else GALLERY  # first rows whose pictures are kept
        self.episodes: list[list[Episode]] = []  # `[p][G]`, up to the current turn
        self.active = np.zeros((0, 0), bool)  # [p, G], the completions that take part in the current turn

    def judge(self, texts: Sequence[Sequence[str]]) -> Rollout:
        """Judge given texts `[p][G]`."""
        self.episodes = [[Episode((Turn(text),), final=True) for text in group] for group in texts]
        self.active = np.ones((len(self.rows), len(self.episodes[0])), bool)
        rewards, eval_rewards = np.split(self._judge_turn(None)[:, :, None], [len(self.fns.reward_names)], axis=-1)
        return Rollout(self.rows, self._episodes_on_host(), rewards, eval_rewards)

    def collect(self, sample: Sample, variables: PyTree, keys: jax.Array) -> Rollout:
        """Sample, judge and step the environment turn by turn, until all episodes are done."""
        fns, env = self.fns, self.fns.env
        turns = 1 if env is None else env.turns
        with self.work.stage("sample", self.number):
            prompt = fns.encode(self.rows)
            states, trained_on = fns.see(variables, prompt.pictures)
            pictures = {} if states is None else {"pictures": states}
            inputs, cache = (variables, prompt.tokens, prompt.mask, keys), None
            if isinstance(sample, EpisodeSampler):
                sampled, cache = sample.begin(*inputs, **pictures)
            else:
                sampled = sample(*inputs, **pictures)
            samples = [on_host(sampled)]
        shape = samples[0].truncated.shape
        self.episodes = [[Episode(()) for _ in range(shape[1])] for _ in self.rows]
        self.active, failed = np.ones(shape, bool), np.zeros(shape, bool)
        values = np.full((*shape, turns, len(fns.reward_names) + len(fns.eval_reward_names)), np.nan, np.float32)
        observed: list[Encoded] = []
        observed_inputs: list[PictureInput | None] = []  # pictures of each of `observed`, for the update
        for turn in range(turns):
            self._read_turn(samples[-1], final=turn + 1 == turns)
            values[:, :, turn] = self._judge_turn(samples[-1])
            if env is None or turn + 1 == turns:
                break
            observed.append(self._step(env, samples[-1], failed))
            if not self.active.any():
                break
            with self.work.stage("sample", self.number):
                assert isinstance(sample, EpisodeSampler)
                answer, following = observed[-1], turn_keys(keys, turn + 1)
                states, picture_input = fns.see(variables, answer.pictures)
                observed_inputs.append(picture_input)
                sampled, cache = sample.go_on(
                    variables, cache, answer.tokens, answer.mask, following, self.active, states
                )
                samples.append(on_host(sampled))
            if turn + 2 == turns:
                cache = None
        rewards, eval_rewards = np.split(values, [len(fns.reward_names)], axis=-1)
        rewards[failed] = np.nan  # a failed episode ended early: it has no reward in any turn
        stream = samples[0]
        if env is not None:
            stream = join_turns(samples, observed, env.stream_tokens, env.pad_id)
        inputs = {} if self.iteration is None else {"pictures": trained_on, "observations": chained(observed_inputs)}
        pictures = {name: part for name, part in inputs.items() if part is not None}
        judged = self.rows, self._episodes_on_host(), rewards, eval_rewards
        return Rollout(*judged, stream, prompt.tokens, prompt.mask, pictures)

    @property
    def _places(self) -> list[tuple[int, int]]:
        return [(int(p), int(g)) for p, g in np.argwhere(self.active)]

    def _change_last(self, place: tuple[int, int], **values: object) -> None:
        p, g = place
        *before, last = self.episodes[p][g].turns
        self.episodes[p][g] = replace(self.episodes[p][g], turns=(*before, replace(last, **values)))

    def _read_turn(self, samples: Samples, *, final: bool) -> None:
        """Add the samples to the active episodes."""
        for p, g in self._places:
            raw, parsed = self.fns.decode(_tokens(samples, (p, g)), self.rows[p].prompt)
            turn = Turn(parsed.text, raw, parsed.valid, bool(samples.truncated[p, g]))
            episode = self.episodes[p][g]
            self.episodes[p][g] = replace(episode, turns=(*episode.turns, turn), final=final)

    def _judge_turn(self, samples: Samples | None) -> np.ndarray:
        """Render and score the last texts of the active episodes: rewards and eval rewards f32 [p, G, N + W].

        Whole groups are judged together; once an episode has ended, the remaining ones are judged one by one. Rewards
        are means over the K pictures of a text, each judged as a completion of its own.
        """
        fns, names = self.fns, (*self.fns.reward_names, *self.fns.eval_reward_names)
        places, values, by_picture = self._places, np.zeros(0), None
        extra, count = ExtraColumns(0), 1
        if is_main_process():
            size = self.active.shape[-1] if self.active.all() else 1
            groups = [places[first : first + size] for first in range(0, len(places), size)]
            rows = [self.rows[group[0][0]] for group in groups]
            drawn = None
            if fns.render is not None:
                texts = [[self.episodes[p][g].last.completion for p, g in group] for group in groups]
                with self.work.stage("render", self.number):
                    drawn = fns.render(rows, texts, self.iteration or 0, self.iteration is None)
                images, count = getattr(drawn, "images", None), getattr(drawn, "per_text", 1)  # the first may raise
                for number, place in enumerate(places) if images is not None else ():
                    # Do not fetch unused pictures, which may be on another machine.
                    if fns.env is not None or self.start + place[0] < self.gallery:
                        self._change_last(place, image=images[number * count])  # pyright: ignore[reportOptionalSubscript]
            extra, groups = ExtraColumns(len(places) * count), [np.repeat(group, count, axis=0) for group in groups]
            with self.work.stage("score", self.number):
                scores = fns.score(
                    rows,
                    [[self.episodes[p][g] for p, g in group] for group in groups],
                    drawn,
                    tokens=samples and [[_tokens(samples, (p, g)).tolist() for p, g in group] for group in groups],
                    progress={**self.work.progress, "log_extra": extra.log_extra},
                    missing=self.work.missing,
                )
            by_picture = np.concatenate(scores, axis=-1).reshape(len(places), count, len(names))
            # In float64: means of equal rewards are equal, whatever their number.
            means = np.ma.masked_invalid(by_picture.astype(np.float64)).mean(axis=1).filled(np.nan)
            values = by_picture[:, 0] if count == 1 else means.astype(np.float32)
        judged = np.full((*self.active.shape, len(names)), np.nan, np.float32)
        judged[self.active] = self.work.share(values)
        for number, place in enumerate(places):
            rewards = MappingProxyType(dict(zip(names, judged[place].tolist(), strict=True)))
            logged = {name: column[number * count :][:count] for name, column in extra.items()}  # of each picture
            logged = {name: values if count > 1 else values[0] for name, values in logged.items()}
            each = None if by_picture is None else by_picture[number]
            self._change_last(place, rewards=rewards, logged=logged, picture_rewards=each)
        return judged

    def _step(self, env: EnvSettings, samples: Samples, failed: np.ndarray) -> Encoded:
        """Step the environment for each active completion; continuing episodes stay active."""
        places = self._places
        observations: list[Observation | None] = []
        encoded = Encoded(np.zeros(0), np.zeros(0))
        if is_main_process():
            with self.work.stage("env", self.number):
                arguments = [self.rows[p] for p, _ in places], [self.episodes[p][g] for p, g in places]
                ended = [_tokens(samples, place)[-1] in env.eos_ids for place in places]
                arguments = *arguments, ended, places, self.active.shape
                observations, encoded = ask_environment(env, self.fns.prepare, *arguments)
        if process_count() > 1:
            observations, encoded = self._shared_observations(observations, encoded)
        for place, observation in zip(places, observations, strict=True):
            self.active[place] = observation is not None and not observation.done
            failed[place] = observation is None
            self._change_last(place, observation=observation)
        return encoded

    def _shared_observations(
        self, observations: list[Observation | None], encoded: Encoded
    ) -> tuple[list[Observation | None], Encoded]:
        """Broadcast process 0's observations; the other processes receive only the prepared pictures."""
        texts = [None if observation is None else [observation.text, observation.done] for observation in observations]
        pictures = None if encoded.pictures is None else [*encoded.pictures]
        shared: Any = self.work.share([texts, encoded.tokens, encoded.mask, pictures])
        if is_main_process():
            return observations, encoded
        texts, tokens, mask, pictures = shared
        observations = [None if text is None else Observation(text[0], done=text[1]) for text in texts]
        return observations, Encoded(tokens, mask, None if pictures is None else Pictures(*pictures))

    def _episodes_on_host(self) -> list[list[Episode]]:
        return [
            [episode.on_host(pictures=row < self.gallery) for episode in group]
            for row, group in enumerate(self.episodes, self.start)
        ]


def _tokens(samples: Samples, place: tuple[int, int]) -> np.ndarray:
    return np.asarray(samples.tokens[place])[np.asarray(samples.mask[place])]


def prompt_keys(key: jax.Array, stream: int, rows: Sequence[Row]) -> jax.Array:
    """Derive one key per prompt, only from (seed, iteration, prompt id): typed key array [P]."""
    return _fold_in_each(key, np.uint32(stream), np.array([row.id for row in rows], np.uint32))


@jax.jit
def _fold_in_each(key: jax.Array, stream: ArrayLike, ids: ArrayLike) -> jax.Array:
    return jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(key, stream)))(ids)


def turn_keys(keys: jax.Array, turn: int) -> jax.Array:
    """Derive the keys [P] of a turn after the first, which uses the prompts' keys."""
    return jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, _TURN_STREAM), turn))(keys)


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Concatenate chunks or batches; prompts are left-padded to the longest."""
    whole = Rollout(
        [row for part in parts for row in part.rows],
        [group for part in parts for group in part.episodes],
        np.concatenate([part.rewards for part in parts]),
        np.concatenate([part.eval_rewards for part in parts]),
    )
    if parts[0].samples is None:
        return whole

    def aligned(arrays: Sequence[Any]) -> np.ndarray:
        width = max(array.shape[1] for array in arrays)
        return np.concatenate([np.pad(array, ((0, 0), (width - array.shape[1], 0))) for array in arrays])

    counts = [len(part.rows) for part in parts]
    names = sorted({name for part in parts for name in part.pictures})
    pictures = {name: joined_some([part.pictures.get(name) for part in parts], counts) for name in names}
    stages = {name for part in parts for name in part.seconds}
    return whole._replace(
        samples=jax.tree.map(lambda *arrays: np.concatenate(arrays), *[part.samples for part in parts]),
        prompt_tokens=aligned([part.prompt_tokens for part in parts]),
        prompt_mask=aligned([part.prompt_mask for part in parts]),
        pictures={name: array for name, array in pictures.items() if array is not None},
        seconds={name: sum(part.seconds.get(name, 0.0) for part in parts) for name in stages},
    )


def join_turns(samples: Sequence[Samples], observed: Sequence[Encoded], length: int, pad_id: int) -> Samples:
    """Join each completion's turns and observations to one stream without gaps, [P, G, length].

    `mask` is true for the policy's tokens, `present` for all tokens of a row. `turn` is a token's turn from 0; an
    observation has the turn before it. A completion is truncated if any of its turns is. `samples` has each turn,
    [P, G, T] on the host, and is shorter if all episodes ended early.
    """
    parts = []
    for turn, one in enumerate(samples):
        number, kept = np.full_like(one.tokens, turn), [] if one.kept is None else [one.kept]
        parts.append((one.tokens, one.mask, one.mask, one.logprobs, one.sampler_logprobs, number, *kept))
        if turn + 1 < len(samples):
            tokens, there = observed[turn].tokens, observed[turn].mask
            nothing, number = np.zeros(there.shape, np.float32), np.full_like(tokens, turn)
            kept = [np.full((*there.shape, array.shape[-1]), -1, array.dtype) for array in kept]
            parts.append((tokens, there, np.zeros_like(there), nothing, nothing, number, *kept))
    whole = [np.concatenate(arrays, axis=2) for arrays in zip(*parts, strict=True)]
    order = np.argsort(~whole[1], axis=-1, kind="stable")

    def filled(array: np.ndarray, fill: int = 0) -> np.ndarray:
        """Move a row's tokens to its front, and fill the rest up to `length`."""
        rest = (1,) * (array.ndim - 3)
        array = np.take_along_axis(array, order.reshape(*order.shape, *rest), axis=2)
        array = np.where(present.reshape(*order.shape, *rest), array, fill).astype(array.dtype)[:, :, :length]
        widths = [(0, 0), (0, 0), (0, length - array.shape[2]), *[(0, 0) for _ in rest]]
        return np.pad(array, widths, constant_values=fill)

    present = np.take_along_axis(whole[1], order, axis=-1)
    tokens, mask, logprobs, sampler_logprobs, turns = filled(whole[0], pad_id), *map(filled, whole[2:6])
    kept = filled(whole[6], -1) if whole[6:] else None
    truncated = np.any([one.truncated for one in samples], axis=0)
    return Samples(tokens, mask, logprobs, sampler_logprobs, truncated, filled(whole[1]), turns, kept)
