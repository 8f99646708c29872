"""Two kinds of classes as an `Env`, one object for each episode: with `reset` and `step`, or TRL's (`data.tools`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from grpo_jax.config.copies import own_copy
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError, failures_as, one_line, raised_by_user_code, short_repr
from grpo_jax.models.hf.chat import PICTURE, Message
from grpo_jax.rollout.data import PICTURE_MARK, Row, as_chat_messages
from grpo_jax.rollout.env import Episode, Observation
from grpo_jax.rollout.prompts import read_content
from grpo_jax.rollout.reward_registry import TaskRewards
from grpo_jax.rollout.rewards import Columns
from grpo_jax.rollout.tools import Toolbox, ToolEpisode
from grpo_jax.rollout.user_code import BadReturn, all_finished, as_number, call_async


class Step(NamedTuple):
    """The result of a step; a class may return it as a plain tuple."""

    observation: str | Observation | None
    reward: float | None
    done: bool


@dataclass
class _Play:
    """An episode's environment, once it is made, and the results of its steps so far."""

    environment: Any = None
    steps: list[Step | BaseException] = field(default_factory=list)


class EnvRunner:
    """Steps one environment for each episode of a rollout; `step` is an `Env`.

    An environment has reset(seed) → the prompt, a text or chat messages, which the seed alone determines, and step(text
    of a completion) → a `Step`. Both may be `async def`. The episode keeps it (`Episode.memory`), so that nothing is
    shared with another episode, iteration or evaluation. An environment that raises fails only its own episode: the
    exception replaces its observation and its reward.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Any]],  # by kind, which is the rows' column "environment"
        seed: str = "seed",  # name of the column of seeds
        # (environment, completion, whether no further turn can follow it) → its `Step`
        step: Callable[[Any, str, bool], object] = lambda environment, text, final: environment.step(text),
    ):
        self._makers, self._seed, self._step = makers, seed, step
        self._prompts: dict[tuple[str, int], str] = {}  # `_words` by kind and seed

    def prompt(self, kind: str, seed: int, method: str) -> Any:
        """Return the prompt of a seed; UserError, which names the `method`, if reset fails."""

        def describe(error: BaseException) -> UserError:
            raised = f"raised {type(error).__name__}: {one_line(error, 100)}"
            return UserError(f"{method} {error if isinstance(error, BadReturn) else raised}")

        with failures_as(describe):
            environment = self._makers[kind]()
            first = environment.first_prompt if isinstance(environment, ToolEpisode) else environment.reset
            (prompt,) = all_finished([call_async(first, seed)])
        self._prompts[kind, seed] = _words(prompt)
        return own_copy(prompt)  # the next one may be drawn into the same array

    def step(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Observation | str | BaseException | None]:
        """Return the observation after each episode's last completion; None if it is done."""
        starts = [(row.columns["environment"], row.columns[self._seed]) for row in rows]
        steps = [play.steps[-1] for play in all_finished(map(self._run_episode, starts, episodes))]
        return [step if isinstance(step, BaseException) else None if step.done else step.observation for step in steps]

    def reward(self, **columns: Any) -> list[float | BaseException | None]:
        """Return the environment's reward of each last completion, without earlier turns."""
        steps = [play.steps[-1] for play in self.plays(columns)]
        return [step if isinstance(step, BaseException) else step.reward for step in steps]

    def rewards(self, kinds: Sequence[str]) -> TaskRewards:
        """Return the reward of these kinds of environment, and one for each if there are several."""
        if not kinds:
            return TaskRewards()
        alone = {f"reward_{kind}": functools.partial(self._reward_of, kind) for kind in kinds} if len(kinds) > 1 else {}
        return TaskRewards(
            {"reward": self.reward, **alone}, defaults=(RewardSection(name="reward"),), eval_always=tuple(alone)
        )

    def _reward_of(self, kind: str, /, **columns: Any) -> list[float | BaseException | None]:
        values = self.reward(**columns)
        return [value if own == kind else None for value, own in zip(values, columns["environment"], strict=True)]

    def plays(self, columns: Columns) -> list[_Play]:
        """Step the episodes among a reward's arguments, up to their last completions."""
        starts = zip(columns["environment"], columns[self._seed], strict=True)
        return all_finished(map(self._run_episode, starts, columns["episodes"]))

    async def _run_episode(self, start: tuple[str, int], episode: Episode) -> _Play:
        """Step an episode's environment up to its last completion."""
        play: Any = episode.memory.setdefault(self, _Play())
        texts = episode.completions
        for text in texts[len(play.steps) :]:
            if play.steps and isinstance(play.steps[-1], BaseException):
                break
            final = episode.final and len(play.steps) + 1 == len(texts)
            try:
                if play.environment is None:
                    play.environment = await call_async(self._makers[start[0]])
                    self._check_prompt(start, await call_async(play.environment.reset, start[1]))
                step = _checked(await call_async(self._step, play.environment, text, final))
            except BaseException as error:
                if not raised_by_user_code(error):
                    raise
                step = error
            play.steps.append(step)
        return play

    def _check_prompt(self, start: tuple[str, int], prompt: object) -> None:
        """Raise BadReturn if the words of an episode's reset are not those that the policy reads."""
        shown = self._prompts.get(start, words := _words(prompt))
        if shown != words:
            raise BadReturn(
                f"reset of {start[0]} returned {one_line(shown, 60)!r} for the prompt and {one_line(words, 60)!r} for "
                "an episode of it: it must depend on its arguments and on Python's random alone"
            )


def _words(prompt: object) -> str:
    """Return the text of a prompt: of a text, of messages or of their parts, without pictures."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("content", prompt.get("text", ""))
    return "".join(map(_words, prompt)) if isinstance(prompt, list | tuple) else str(prompt)


def _checked(returned: object) -> Step:
    """Return the result of a step; BadReturn unless it is (observation, reward, done)."""
    observation, reward, done = returned if isinstance(returned, tuple) and len(returned) == 3 else (None, None, False)
    number = None if reward is None else as_number(reward)
    if number is None and reward is not None:
        raise BadReturn(f"its reward must be a finite number or None, got {one_line(repr(reward), 60)}")
    if observation is None and not done:
        expected = "(observation, reward, done), the observation no None unless it is done"
        raise BadReturn(f"step must return {expected}, got {one_line(repr(returned), 60)}")
    return Step(observation, number, bool(done))


_ID = "row_id"  # column that identifies a row's episodes


class ToolEpisodes:
    """Episodes of tool classes: prompts, observations, rewards."""

    def __init__(self, boxes: Mapping[str, Toolbox], *, by_row: bool = False):
        """Take tools with a class by name; with `by_row` the rows' column "environment" chooses."""
        self._rows: dict[int, Columns] = {}
        self.boxes, self._by_row = boxes, by_row
        makers = {name: functools.partial(ToolEpisode, box, self._rows) for name, box in boxes.items()}
        self.runner = EnvRunner(makers, seed=_ID, step=ToolEpisode.step)

    def rewards(self) -> TaskRewards:
        """Return the reward of the classes with `get_reward`, and the column `environments`."""
        judged = self.runner.rewards([name for name, box in self.boxes.items() if hasattr(box.kind, "get_reward")])
        return replace(judged, columns=self.environments, column_names=("environments",))

    def start_episode(self, row: Row) -> Row:
        """Return a row whose prompt ends with the text and the pictures of its object's `reset`."""
        kind = self._kind_of(row)
        columns = {name: value for name, value in row.columns.items() if name != "environment"}
        self._rows[row.id] = {**columns, "prompt": as_chat_messages(row) if row.messages else row.prompt}
        content = self.runner.prompt(kind, row.id, f"data.tools: {kind}.reset")
        parts, sources = read_content(content)
        messages, mark, start = row.messages, PICTURE_MARK, ""
        if messages and content:
            messages, mark = (*messages[:-1], Message(messages[-1].role, (*messages[-1].parts, *parts))), ""
        elif sources and mark not in row.prompt:
            start = mark * len(row.pictures)
        return replace(
            row,
            prompt="".join([start, row.prompt, *(mark if part is PICTURE else str(part) for part in parts)]),
            messages=messages,
            pictures=(*row.pictures, *sources),
            columns={**columns, "environment": kind, _ID: row.id},
        )

    def _kind_of(self, row: Row) -> str:
        """Return the name of a row's class; UserError for another name, or for a column that tools use."""
        chosen = row.columns.get("environment")
        if self._by_row and chosen not in [*self.boxes]:
            expected = f"one of {', '.join(self.boxes)}, the classes in data.tools"
            raise UserError(f"row {row.id}: column 'environment': expected {expected}, got {short_repr(chosen)}")
        for name in (_ID, "environments", *(() if self._by_row else ("environment",))):
            if name in row.columns:
                raise UserError(f"row {row.id}: column {name!r} is a name that tools use: rename it")
        return str(chosen) if self._by_row else next(iter(self.boxes))

    def make_row(self, number: int) -> dict[str, object]:
        """Return a row whose prompt is the content of its object's `reset`; UserError if that fails or is empty."""
        (kind,) = self.boxes
        content = self.runner.prompt(kind, number, f"data.tools: {kind}.reset")
        if isinstance(content, str) and not content.strip():
            raise UserError(
                f"data.tools: {kind}.reset returned no text for a prompt: let it return one, or name a file of prompts "
                "in data.prompts"
            )
        prompt = content if isinstance(content, str) else [{"role": "user", "content": content}]
        return {"prompt": prompt, "environment": kind, _ID: number}

    def environments(self, completions: Sequence[str], columns: Columns) -> Columns:
        """Return the column `environments` for rewards: each episode's object, None if it could not be made."""
        made = [play.environment for play in self.runner.plays(columns)]
        return {"environments": [episode and episode.object for episode in made]}
