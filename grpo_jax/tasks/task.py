"""The protocol of a task: its section of the config, and its data or blocks.

A task derives from `Task`. Its fields are its config (`--task.FIELD`), with a help line each below them. The `load` of
a task of language returns its `TaskData`: prompts, rewards, and what belongs to them. That of any other task returns
`Blocks`, compiled iterations.

    class Countdown(Task):
        \"""Reach a number with the four operations.\"""

        largest: int = 20
        \"""Largest number of a puzzle.\"""

        def load(self, setup: TaskSetup) -> TaskData:
            return TaskData(make_prompt_set(puzzles(self.largest)), TaskRewards({"right": right}))

`python -m grpo_jax.train --task my_tasks.py:Countdown --task.largest 9 …` trains it (examples/own_task).
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from pydantic import BeforeValidator

from grpo_jax.config.fields import Section, require
from grpo_jax.config.run import Config
from grpo_jax.rollout.data import PromptSet, Row
from grpo_jax.rollout.encoding import ParsedCompletion, as_is, completion_statistics
from grpo_jax.rollout.env import Env, Observation
from grpo_jax.rollout.reward_registry import TaskRewards
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.training.estimators import Invalid

if TYPE_CHECKING:
    from grpo_jax.tasks.pictures import RenderedImages

Info = Callable[..., None]
"""info(name, detail) prints a line of a run's opening."""
State = Any
"""What `Blocks` change."""
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

    config: Any
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
        step: (rows, episodes) → an `Observation` of each, a text, or None if the episode is done; None
            for a task in which the policy writes once.
        controls: Environments by name that answer in its place for the measures NAME_CONTROL of held-out prompts.
        shows_pictures: Whether observations hold pictures that no prompt has: the policy then needs its vision tower.
        role: Whose message of the chat template an observation is.
    """

    step: Env | None = None
    controls: Mapping[str, Env] = MappingProxyType({})
    shows_pictures: bool = False
    role: str = "user"


def decode_picture(value: object) -> object:
    """Return the picture of a PNG in base64; anything but text as it is. ValueError if it is none."""
    if not isinstance(value, str):
        return value
    from PIL import Image

    try:
        file = io.BytesIO(base64.b64decode(value, validate=True))
        return np.asarray(Image.open(file, formats=["PNG"]).convert("RGB"))
    except Exception as error:  # Pillow raises many kinds, for a picture that is too large too
        raise ValueError("expected a PNG in base64") from error


Picture = Annotated[np.ndarray, BeforeValidator(decode_picture)]
"""A picture, uint8 [H, W, 3]; files hold it as PNG in base64."""


class Curve(NamedTuple):
    """A metric, by its key in metrics.jsonl, over the iterations, with its label in the legend.

    A sparse one is measured now and then rather than at each iteration, and is drawn with dots.
    """

    metric: str
    label: str
    sparse: bool = False


class Chart(NamedTuple):
    """Curves under one title; a chart without a point is left out."""

    title: str
    curves: tuple[Curve, ...]
    note: str = ""


class Display(NamedTuple):
    """How a task's measures are shown.

    Attributes:
        headline: Measures that lead the report, the first that there is.
        live: (metric, label) on the terminal while a run goes on, beside those of all tasks.
        charts: Before all others, which leave their metrics out.
        hidden: Measures that no chart shows.
        digits: Digits behind the point by measure, without its "@…"; 3 for others.
    """

    headline: tuple[str, ...] = ()
    live: tuple[tuple[str, str], ...] = ()
    charts: tuple[Chart, ...] = ()
    hidden: tuple[str, ...] = ()
    digits: Mapping[str, int] = {}

    def digits_of(self, measure: str) -> int:
        """Return the digits behind the point of a measure."""
        return self.digits.get(measure.partition("@")[0], 3)


class Table(NamedTuple):
    """Rows under column names; the note stands above."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


class GalleryEntry(NamedTuple):
    """One prompt before and after training; pictures are uint8 [H, W, 3] or None. `shown` are the prompt's own."""

    prompt: str
    completion: str
    before: Picture | None = None
    after: Picture | None = None
    scores: Mapping[str, tuple[float | None, float | None]] = {}  # name → (before, after)
    shown: Sequence[Picture] = ()


class ShownTurn(NamedTuple):
    """A turn of an episode that is shown, with its parsed completion.

    Attributes:
        scores: Rewards and watched measures by name, NaN where missing.
        image: The picture drawn of it, uint8 [H, W, 3], or None.
        observation: The environment's text; None if the episode ended.
        pictures: The observation's, uint8 [H, W, 3].
    """

    completion: str
    scores: Mapping[str, float | None] = {}
    image: Picture | None = None
    observation: str | None = None
    pictures: Sequence[Picture] = ()


class EpisodeEntry(NamedTuple):
    """An episode as it went, behind its prompt and the pictures of that, uint8 [H, W, 3]; with a title or without."""

    prompt: str
    turns: Sequence[ShownTurn]
    pictures: Sequence[Picture] = ()
    title: str = ""


class Findings(NamedTuple):
    """A task's results of the held-out measurements, beside the means that every run reports.

    Attributes:
        tables: For report.html.
        lines: For the terminal.
        records: Further entries of summary.json by name, such as "table"; empty ones are left out.
    """

    tables: Sequence[Table] = ()
    lines: Sequence[str] = ()
    records: Mapping[str, Sequence[Mapping[str, Any]]] = {}

    @property
    def entries(self) -> dict[str, list[Mapping[str, Any]]]:
        """The records that are not empty."""
        return {name: list(records) for name, records in self.records.items() if records}


_TURN_MEASURE = re.compile(r"(.+)_(turn_\d+|peak|kept|gain)")


def of_turns(name: str, names: Collection[str]) -> bool:
    """Return whether a measure is one of another's turns, of these names.

    Runs of several turns measure NAME_turn_1 of every NAME; without it NAME_gain is another reward's name.
    """
    match = _TURN_MEASURE.fullmatch(name)
    return match is not None and match[1] in names and f"{match[1]}_turn_1" in names


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
        remember: (name, rollouts by kind) → data of a measurement for the findings; goes into checkpoints.
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
        source: Origin of the prompts, in a word; "" for the name in data.prompts.
        render: render(judges, names of arguments that rewards ask for) → the function (rows, texts `[P][G]`,
            iteration, evaluation) → pictures; None if nothing is drawn.
        environment: Observations between two turns.
        report: Results beside the rewards.
        pairs: () → (prompt, text) pairs that SFT teaches, the prompt a text or, with pictures, one of the
            rows; of episodes (prompt, text, observation, text, …); None if there are none.
        vocabulary: Of a new policy; None if there is none.
        identity: Values that must stay the same when a run is resumed or evaluated, besides the config.
        choices: The list of texts that may be written; None for any text.
        invalid: Rewards of an invalid completion in training.
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
    """A task of a policy.

    Attributes:
        config: Type of a run's config; its field `task` holds the task.
        defaults: Values of a run's sections that differ from their own defaults, as a YAML file has them.
        default_config: A shipped config that runs where no --config is given; None for the defaults.
        display: How its measures are shown.
    """

    config: ClassVar[type] = Config
    defaults: ClassVar[Mapping[str, Any]] = {}
    default_config: ClassVar[str | None] = None
    display: ClassVar[Display] = Display()

    def check(self, config: Config) -> None:
        """Refuse settings that do not go together, such as functions in data.tools; called when a config is made.

        Raises:
            UserError: Naming the field.
        """
        tools = config.data.tool_names
        require(not tools, "data.tools", "JSON schemas with this task, which calls no functions", tools)

    def parser(self, config: Config) -> Callable[[str, str], ParsedCompletion]:
        """Return the function (completion, user's prompt) → the text that is judged."""
        return as_is

    def choices(self, config: Config) -> Sequence[str] | None:
        """Return the texts that a completion may be, where the data have `choices`; None for any text.

        It serves questions to a trained policy. A UserError if data are missing or bad.
        """
        return None

    def load(self, setup: TaskSetup) -> TaskData | Blocks:
        """Load the task's data, but no weights; a UserError if they are missing or bad.

        A task that is not of language, which has a config type of its own, returns its compiled iterations.
        """
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
    """Compiled blocks of iterations of a task without prompts. All follows from seed and iteration."""

    start: State
    """The state at the start, a NamedTuple: its fields are the parts of every checkpoint."""

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
