"""Episodes through the pipeline: sample, render, score and respond, turn after turn, chunk by chunk.

    chunk i:  sample ─► render ─► score ─► respond ─► sample 2 ─► render 2 ─► score 2 ─► …

A completion whose episode has ended takes no part in what comes after. What lies on the policy's device between two
turns, caches above all, is bounded: `IN_FLIGHT` chunks are on their way at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.rollout.answers import Answering, Said, reply
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.environment import Environment
from grpo_jax.rollout.episodes import AnswerError, Episode, Turn, remembered
from grpo_jax.rollout.inputs.encoding import Encoded
from grpo_jax.rollout.pipeline import Stage
from grpo_jax.sampling.writing import Samples

IN_FLIGHT = 2
"""Chunks of episodes between their first turn and their last judgement."""
_TURNS = 2**31 - 7  # folded into a prompt's key for the turns after the first


class Play(NamedTuple):
    """A chunk of episodes on its way; each stage adds what it makes.

    Attributes:
        place: The chunk's first row in the batch and the one behind its last.
        rows: p prompts.
        episodes: `[p][G]`, as far as they have come.
        active: bool [p, G], the completions that this turn is about.
        failed: bool [p, G], those that the environment failed to answer.
        carried: What the sampler goes on from.
        samples: Of each turn, on the host.
        said: What stands between them.
        prompt: The prompts as the policy reads them, with their pictures as the update takes them.
        answers: Pictures [p, G, I, ..] in each of `said`, as the update takes them, or None.
        pictures: What the renderer made of this turn's texts, or None.
        rewards: f32 [p, G, U, N]; NaN where a turn does not exist.
        watched: f32 [p, G, U, W].
    """

    place: tuple[int, int]
    rows: Sequence[Row]
    episodes: list[list[Episode]]
    active: np.ndarray
    failed: np.ndarray
    carried: Any
    samples: tuple[Samples, ...]
    said: tuple[Said, ...]
    prompt: Encoded
    answers: tuple[Any, ...]
    pictures: Any
    rewards: np.ndarray
    watched: np.ndarray

    @property
    def places(self) -> list[tuple[int, int]]:
        """(p, g) of the active completions, in order."""
        return [(int(p), int(g)) for p, g in np.argwhere(self.active)]

    def judged(self) -> tuple[Sequence[Row], list[list[Episode]]]:
        """Rows and groups of what is active: whole groups where all are, else each completion by itself."""
        if self.active.all():
            return self.rows, self.episodes
        return [self.rows[p] for p, _ in self.places], [[self.episodes[p][g]] for p, g in self.places]

    def with_episodes(self, change: Callable[[int, Episode], Episode], **others: Any) -> Play:
        """With the active completions' episodes changed: change(its number among them, episode)."""
        episodes = [list(group) for group in self.episodes]
        for number, (p, g) in enumerate(self.places):
            episodes[p][g] = change(number, episodes[p][g])
        return self._replace(episodes=episodes, **others)


@dataclass
class Clock:
    """The sampler's seconds, whichever turns' threads it works in; it works in one at a time.

    Two of its programs at once would need the memory of both.
    """

    seconds: float = 0.0
    _lock: Any = field(default_factory=threading.Lock)

    def run(self, function: Callable[..., tuple[Samples, Any]], *arguments: Any) -> tuple[Samples, Any]:
        """What the function gives, its samples fetched."""
        with self._lock:
            started = time.perf_counter()
            samples, carried = function(*arguments)
            samples = jax.device_get(samples)
            self.seconds += time.perf_counter() - started
        return samples, carried


@dataclass(frozen=True)
class Episodes:
    """A batch of episodes that is to be played.

    Attributes:
        environment: With `answering`.
        sampler: `EpisodeSampler` of the policy.
        variables: The policy's.
        rows: P prompts.
        keys: [P].
        see: (variables, `Pictures`) → their `PictureStates`, and what the update takes; None for a policy that sees
            none.
        iteration: For the renderer.
        evaluation: Likewise.
        shown: How many of the first rows keep the pictures of their episodes.
        clock: Takes the sampler's seconds.
    """

    environment: Environment
    sampler: Any
    variables: Any
    rows: Sequence[Row]
    keys: jax.Array
    see: Callable[[Any, Any], tuple[Any, Any]] | None
    iteration: int
    evaluation: bool
    shown: int
    clock: Clock = field(default_factory=Clock)

    @property
    def answering(self) -> Answering:
        """What stands between two turns."""
        assert self.environment.answering is not None  # else nothing is played
        return self.environment.answering

    @property
    def turns(self) -> int:
        """U."""
        return self.answering.turns

    def stages(self) -> list[Stage]:
        """From (first row, row behind the last) to a `Play`."""
        stages = []
        for turn in range(self.turns):
            write = partial(self.go_on, turn) if turn else self.begin
            stages.append(Stage(_named("sample", turn), write, timed=False))
            if self.environment.render is not None:
                stages.append(Stage(_named("render", turn), self.draw))
            stages.append(Stage(_named("score", turn), partial(self.score, turn)))
            if turn + 1 < self.turns:
                stages.append(Stage(_named("respond", turn), self.respond))
        return stages

    def begin(self, place: tuple[int, int]) -> Play:
        """The first turn."""
        part, environment = slice(*place), self.environment
        prompt = environment.encode(self.rows[part])
        states, kept = self._seen(prompt.pictures)
        given = prompt.tokens, prompt.mask, self.keys[part], states
        samples, carried = self.clock.run(self.sampler.begin, self.variables, *given)
        shape = samples.truncated.shape
        judged = [
            np.full((*shape, self.turns, len(names)), np.nan, np.float32)
            for names in (environment.reward_names, environment.watch_names)
        ]
        empty = [[Episode(())] * shape[1] for _ in range(shape[0])]
        active, failed = np.ones(shape, bool), np.zeros(shape, bool)
        prompt, rows = prompt._replace(pictures=kept), self.rows[part]
        play = Play(place, rows, empty, active, failed, carried, (samples,), (), prompt, (), None, *judged)
        return self._read(play)

    def _seen(self, pictures: Any) -> tuple[Any, Any]:
        """The states of pictures, and what the update takes of them; of evaluation, nothing."""
        if pictures is None:
            return None, None
        if self.see is None:  # it must not answer with what nobody looks at
            raise AnswerError("it answered with a picture, and the policy's vision tower is not loaded (task.pictures)")
        states, kept = self.see(self.variables, pictures)
        return states, None if self.evaluation else kept

    def go_on(self, turn: int, play: Play) -> Play:
        """A further turn of what is active."""
        if not play.active.any():
            return play._replace(carried=None)
        said, keys = play.said[-1], turn_keys(self.keys[slice(*play.place)], turn)
        states, kept = self._seen(said.pictures)
        heard = said.tokens, said.mask, keys, play.active, states
        samples, carried = self.clock.run(self.sampler.go_on, self.variables, play.carried, *heard)
        carried, answers = carried if turn + 1 < self.turns else None, (*play.answers, kept)
        return self._read(play._replace(carried=carried, samples=(*play.samples, samples), answers=answers))

    def _read(self, play: Play) -> Play:
        """The turn's tokens as text."""
        samples, places = play.samples[-1], play.places

        def turned(number: int, episode: Episode) -> Episode:
            p, g = places[number]
            tokens = np.asarray(samples.tokens[p, g])[samples.mask[p, g]]
            written, text, usable = self.environment.decode(tokens, play.rows[p].prompt)
            return Episode((*episode.turns, Turn(text, written, usable, bool(samples.truncated[p, g]))))

        return play.with_episodes(turned, pictures=None)

    def draw(self, play: Play) -> Play:
        """What the renderer makes of the turn's texts."""
        render = self.environment.render
        if render is None or not play.active.any():
            return play
        rows, episodes = play.judged()
        pictures = render(rows, _texts(episodes), self.iteration, self.evaluation)
        images = getattr(pictures, "images", None)
        if images is None:  # it failed, and may
            return play._replace(pictures=pictures)
        return play.with_episodes(lambda number, episode: episode.with_last(image=images[number]), pictures=pictures)

    def score(self, turn: int, play: Play) -> Play:
        """What the turn's texts are worth."""
        environment = self.environment
        if play.active.any():
            rows, episodes = play.judged()
            tokens = written_tokens(play.samples[-1])
            tokens = tokens if play.active.all() else [[tokens[p][g]] for p, g in play.places]
            judged = environment.score(rows, _texts(episodes), play.pictures, episodes=episodes, tokens=tokens)
            rewards, watched = (np.array(array) for array in (play.rewards, play.watched))
            for array, values in zip((rewards, watched), judged, strict=True):
                array[play.active, turn] = values.reshape(len(play.places), values.shape[-1])
            names = (*environment.reward_names, *environment.watch_names)
            values = np.concatenate([rewards, watched], axis=-1)[play.active, turn].tolist()

            def valued(number: int, episode: Episode) -> Episode:
                return episode.with_last(rewards=dict(zip(names, values[number], strict=True)))

            play = play.with_episodes(valued, pictures=None, rewards=rewards, watched=watched)
        return play if turn + 1 < self.turns else self._remembered(play)

    def _remembered(self, play: Play) -> Play:
        """The end of the episodes, without the pictures that nobody will look at."""
        episodes = [
            [remembered(episode, pictures=row < self.shown) for episode in group]
            for row, group in enumerate(play.episodes, play.place[0])
        ]
        return play._replace(episodes=episodes)

    def respond(self, play: Play) -> Play:
        """What the environment says to each active completion; those that go on are active then."""
        if not play.active.any():
            return play
        places, samples = play.places, play.samples[-1]
        asked = [play.rows[p] for p, _ in places], [play.episodes[p][g] for p, g in places]
        ended = [samples.tokens[place][samples.mask[place]][-1] in self.answering.eos_ids for place in places]
        replies = reply(self.answering, self.environment.prepare, *asked, ended, places, play.active.shape)
        active, failed = np.zeros_like(play.active), play.failed.copy()
        for number, place in enumerate(places):
            active[place], failed[place] = replies.going[number], replies.failed[number]
        play = play.with_episodes(lambda number, episode: episode.with_last(answer=replies.answers[number]))
        return play._replace(active=active, failed=failed, said=(*play.said, replies.said))

    def seconds(self, by_stage: dict[str, float]) -> dict[str, float]:
        """Seconds of all turns together by stage; the sampler's without its waiting for itself."""
        total: dict[str, float] = {}
        for name, value in by_stage.items():
            stage = name.partition(" ")[0]
            total[stage] = total.get(stage, 0.0) + value
        return total | {"sample": self.clock.seconds}


def turn_keys(keys: jax.Array, turn: int) -> jax.Array:
    """Keys [P] of a turn, from 0; the first has the prompts' own."""
    if turn == 0:
        return keys
    return jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, _TURNS), turn))(keys)


def _named(stage: str, turn: int) -> str:
    return stage if turn == 0 else f"{stage} {turn + 1}"


def written_tokens(samples: Samples) -> list[list[list[int]]]:
    """What the policy wrote, `[P][G]`, of samples on the host."""
    return [
        [np.asarray(row)[there].tolist() for row, there in zip(*group, strict=True)]
        for group in zip(samples.tokens, samples.mask, strict=True)
    ]


def _texts(episodes: list[list[Episode]]) -> list[list[str]]:
    return [[episode.last.text for episode in group] for group in episodes]


# --------------------------------------------------------------------------------------------------------- one stream


def stream(samples: Sequence[Samples], said: Sequence[Said], length: int, pad_id: int) -> Samples:
    """All turns of each completion and what was said between them, one behind the other without holes.

    Args:
        samples: Of each turn, [P, G, T] on the host; fewer than there may be where all episodes ended.
        said: What stands behind each turn; behind the last of them nothing is read.
        length: Tokens that a stream may have.
        pad_id: Fills up.

    Returns:
        Arrays [P, G, length] on the host: `mask` is what the policy wrote, `present` the first places of each row,
        `turn` a token's turn from 0, or the turn that it answers. Truncated is a completion any turn of which was.
    """
    parts = []
    for turn, one in enumerate(samples):
        number = np.full_like(one.tokens, turn)
        parts.append((one.tokens, one.mask, one.mask, one.logprobs, one.sampler_logprobs, number))
        if turn + 1 < len(samples):
            tokens, there = said[turn].tokens, said[turn].mask
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
