"""The protocol of a task: its section of the config, and its data or blocks.

A task is a frozen dataclass that derives from `Task`. Its fields are its config (`--task.FIELD`), with a help line
each in its docstring. A task of language has a `load` that gives its `TaskData`: prompts, rewards, and what belongs
to them. Any other task has `blocks` instead, which run its iterations.

    @dataclass(frozen=True)
    class Countdown(Task):
        \"""Reach a number with the four operations.

        Args:
            largest: Largest number of a puzzle.
        \"""

        largest: int = 20

        def load(self, setup: TaskSetup) -> TaskData:
            return TaskData(make_prompt_set(puzzles(self.largest)), TaskRewards({"right": right}))

`python -m grpo_jax.train --task my_tasks.py:Countdown --task.largest 9 …` trains it (examples/own_task).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from grpo_jax.config.fields import Section
from grpo_jax.config.run import Config
from grpo_jax.rollout.data import PromptSet, Row
from grpo_jax.rollout.env import Env, Observation
from grpo_jax.rollout.reward_registry import TaskRewards
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.rollout.texts import ParsedCompletion, as_is, completion_statistics
from grpo_jax.tasks.display import Display, EpisodeEntry, Findings, GalleryEntry, Table
from grpo_jax.training.estimators import Invalid

if TYPE_CHECKING:
    from grpo_jax.tasks.pictures import RenderedImages

Info = Callable[..., None]
"""info(name, detail) prints a line of a run's opening."""
State = Any
"""The pytree that a program trains."""
Notes = dict[str, Any]
"""Values that every checkpoint keeps, as JSON has it."""


class Choices(NamedTuple):
    """The texts of which each completion is one: a catalogue that the policy ranks by its own likelihood.

    Attributes:
        texts: As `Task.choices` returns them; those that are the same tokens count as the first.
        columns: (rows, numbers int [P, K] of the texts, scores f32 [P, K], best first) → columns {name: P values}
            of each row's ranking, for rewards and measures.
    """

    texts: Sequence[str]
    columns: Callable[[Sequence[Row], np.ndarray, np.ndarray], dict[str, Sequence[object]]]


class TaskSetup(NamedTuple):
    """Arguments of `Task.load`: the run's config, rows in place of data.prompts or None, and `Info`."""

    config: Config
    prompts: PromptSet | None
    info: Info


def oracle_column(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the column "oracle" as the best text there is, where every row has one."""
    if not rows or any(row.columns.get("oracle") is None for row in rows):
        return {}
    return {"oracle": [row.columns["oracle"] for row in rows]}


class TurnEnvironment(NamedTuple):
    """The environment that answers the policy between its turns (sampling.turns).

    Attributes:
        step: (rows, episodes) → an `Observation` of each, a text, or None where the episode is done; None
            for a task in which the policy writes once.
        controls: Environments by name that answer in its place for the measures NAME_CONTROL of held-out prompts.
        shows_pictures: Whether observations hold pictures that no prompt has: the policy then needs its vision tower.
        role: Whose message of the chat template an observation is.
    """

    step: Env | None = None
    controls: Mapping[str, Env] = MappingProxyType({})
    shows_pictures: bool = False
    role: str = "user"


class Vocabulary(NamedTuple):
    """The words of a new policy (policy.path "new").

    Attributes:
        words: () → the words, frequent ones first.
        vectors: Width → first embeddings of some of them, f32 [width] by word; None for random ones.
    """

    words: Callable[[], Sequence[str]]
    vectors: Callable[[int], Mapping[str, np.ndarray]] | None = None


@dataclass(frozen=True)
class TaskReport:
    """A run's results of the task beside its rewards.

    Attributes:
        references: Rows → texts measured in the policy's place, by kind: "unchanged", "oracle".
        statistics: (rows, texts `[P][G]`, valid `[P][G]`) → further metrics of a batch.
        remember: (name, rollouts by kind) → what the findings need of a measurement; goes into checkpoints.
        findings: (remembered, rows) → tables and lines at the end; kinds are in the order they were measured.
        columns: Columns of the rows that the report's table shows: {heading: column}.
    """

    references: Callable[[Sequence[Row]], dict[str, list[str]]] = oracle_column
    statistics: Callable[..., dict[str, float]] = completion_statistics
    remember: Callable[[str, Mapping[str, Rollout]], Notes] = lambda name, rollouts: {}
    findings: Callable[[Notes, Sequence[Row]], Findings] = lambda remembered, rows: Findings()
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskData:
    """A loaded task of language: all but judges and policy, whose weights are loaded last.

    Attributes:
        prompts: Rows to learn from, to choose the best checkpoint on, and to report on.
        rewards: The task's own.
        source: Where the prompts are from, in a word; "" for the name in data.prompts.
        render: render(judges, names of arguments that rewards ask for) → the function (rows, texts `[P][G]`,
            iteration, evaluation) → pictures; None where nothing is drawn.
        environment: Observations between two turns.
        report: Results beside the rewards.
        pairs: () → (prompt, text) pairs that SFT teaches, the prompt a text or, with pictures, one of the
            rows; of episodes (prompt, text, observation, text, …); None if there are none.
        vocabulary: Of a new policy; None if there is none.
        identity: What must be the same when a run is resumed or evaluated, beside the config.
        choices: The list of texts that may be written; None for any text.
        invalid: What a completion earns in training that could not be read.
    """

    prompts: PromptSet
    rewards: TaskRewards = field(default_factory=TaskRewards)
    source: str = ""
    render: Callable[[Mapping[str, object], frozenset[str]], Callable[..., RenderedImages]] | None = None
    environment: TurnEnvironment = field(default_factory=TurnEnvironment)
    report: TaskReport = TaskReport()
    pairs: Callable[[], Sequence[Sequence[str | Row | Observation]]] | None = None
    vocabulary: Vocabulary | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    choices: Choices | None = None
    invalid: Invalid = "prompt"


class Task(Section):
    """What a policy is to learn; derive from it as a frozen dataclass.

    Attributes:
        config: Type of a run's config; its field `task` holds the task.
        defaults: Values of a run's sections that differ from their own defaults, as a YAML file has them.
        default_config: A shipped config that runs where no --config is given; None for the defaults.
        display: How its measures are shown.
        calls_tools: Whether functions that data.tools names are called.
    """

    config: ClassVar[type] = Config
    defaults: ClassVar[Mapping[str, Any]] = {}
    default_config: ClassVar[str | None] = None
    display: ClassVar[Display] = Display()
    calls_tools: ClassVar[bool] = False

    def check(self, config: Config) -> None:
        """Refuse settings that do not go together; called when a config is made.

        Raises:
            UserError: Naming the field.
        """

    def parser(self, config: Config) -> Callable[[str, str], ParsedCompletion]:
        """Return the function (completion, user's prompt) → the text that is judged."""
        return as_is

    def choices(self, config: Config) -> Sequence[str] | None:
        """Return the texts that a completion may be, where the data have `choices`; None for any text.

        It serves questions to a trained policy. A UserError if data are missing or bad.
        """
        return None

    def count_pictures(self, config: Config) -> tuple[int, int]:
        """Return the most pictures of a prompt, and of an observation between two turns, for `--plan`.

        A UserError if data are bad.
        """
        return 0, 0

    def load(self, setup: TaskSetup) -> TaskData:
        """Load the task's data, but no weights; a UserError if they are missing or bad."""
        raise NotImplementedError

    def blocks(self, config: Any, info: Info) -> Blocks:
        """Compile the iterations of a task that is not of language, which has a config type of its own."""
        raise NotImplementedError


class Finished(NamedTuple):
    """Results of a run that are shown at its end.

    Attributes:
        summary: Entries of summary.json.
        lines: For the terminal, below the measures.
        tables: For report.html, the task's own first.
        gallery: Pairs of texts or pictures.
        episodes: As they went.
    """

    summary: dict[str, Any]
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    gallery: Sequence[GalleryEntry] = ()
    episodes: Sequence[EpisodeEntry] = ()


class Blocks(Protocol):
    """Compiled blocks of iterations of a task without prompts (`runs.blocks`). All follows from seed and iteration."""

    start: State
    """The state at the start; its shape is that of every checkpoint."""

    def saved(self, state: State) -> dict[str, State]:
        """Return the parts of a state in a checkpoint; "variables" is what evaluation needs."""
        ...

    def restored(self, saved: Mapping[str, State]) -> State:
        """Invert `saved`."""

    def measure_start(self) -> tuple[Notes, dict[str, float], str]:
        """Measure the start: notes, seconds by stage, and a line to print."""
        ...

    def advance(
        self, state: State, iteration: int, notes: Notes
    ) -> tuple[State, list[dict[str, float]], dict[str, float], Notes]:
        """Take the block after `iteration` iterations; return state, rows of metrics with "step", seconds, notes.

        The state is donated.
        """
        ...

    def finish(self, state: State, iteration: int, seconds: Mapping[str, float], notes: Notes) -> Finished:
        """Measure the end."""
        ...
