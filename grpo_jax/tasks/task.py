"""The protocol of a task: its section of the config, and its data.

A task derives from `Task`. Its fields are its config (`--task.FIELD`), each with a docstring as help. Its `load`
returns `TaskData`: prompts, rewards and related data.

    class Countdown(Task):
        \"""Reach a number with the four operations.\"""

        largest: int = 20
        \"""Largest number of a puzzle.\"""

        def load(self, setup: TaskSetup) -> TaskData:
            return TaskData(make_prompt_set(puzzles(self.largest)), TaskRewards({"right": right}))

`python -m grpo_jax.train --task my_tasks.py:Countdown --task.largest 9 …` trains it (examples/own_task).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from grpo_jax.config.fields import Section, require
from grpo_jax.config.run import Config
from grpo_jax.rollout.data import PromptSet, Row
from grpo_jax.rollout.encoding import ParsedCompletion, as_is, completion_statistics
from grpo_jax.rollout.env import Env, Observation
from grpo_jax.rollout.pictures import RenderedImages
from grpo_jax.rollout.reward_registry import TaskRewards
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.training.estimators import Invalid

Info = Callable[..., None]
"""info(name, detail) prints a line of a run's opening."""
Notes = dict[str, Any]
"""JSON values that every checkpoint keeps."""
_TURN_MEASURE = re.compile(r"(.+)_(turn_\d+|peak|kept|gain)")


class Choices(NamedTuple):
    """The allowed completions: a catalogue that the policy ranks by its own likelihood."""

    texts: Sequence[str]  # result of `Task.choices`; of texts with the same tokens, the first counts
    # (rows, indices int [P, K] of the texts, scores f32 [P, K], best first) → columns {name: P values} of each row's
    # ranking, for rewards and measures
    columns: Callable[[Sequence[Row], np.ndarray, np.ndarray], dict[str, Sequence[object]]]


class TaskSetup(NamedTuple):
    """Arguments of `Task.load`: the run's config, rows that replace data.prompts or None, and `Info`."""

    config: Config
    prompts: PromptSet | None
    info: Info


def oracle_column(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the column "oracle" as the best possible texts, if every row has one."""
    if not rows or any(row.columns.get("oracle") is None for row in rows):
        return {}
    return {"oracle": [row.columns["oracle"] for row in rows]}


class TurnEnvironment(NamedTuple):
    """The environment between the policy's turns (sampling.turns)."""

    step: Env | None = None  # None for a single-turn task
    # control environments by name, which replace it for the measures NAME_CONTROL of held-out prompts
    controls: Mapping[str, Env] = MappingProxyType({})
    shows_pictures: bool = False  # whether observations need the policy's vision tower although prompts do not
    role: str = "user"  # of an observation in the chat template
    # row of a typed prompt → the row of its episode; UserError if the environment makes all prompts
    start_episode: Callable[[Row], Row] = lambda row: row


class Curve(NamedTuple):
    """A metric, by its key in metrics.jsonl, over the iterations, with its label in the legend.

    A sparse metric is not measured at each iteration, and is drawn with dots.
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
    """Display settings of a task's measures."""

    headline: tuple[str, ...] = ()  # measures for the headline of the report; the first available one is used
    live: tuple[tuple[str, str], ...] = ()  # (metric, label) on the terminal during a run, beside those of all tasks
    charts: tuple[Chart, ...] = ()  # the first charts; later charts omit their metrics
    hidden: tuple[str, ...] = ()  # measures that no chart shows
    digits: Mapping[str, int] = {}  # decimals by measure, without its "@…"; 3 for others

    def digits_of(self, measure: str) -> int:
        """Return the decimals of a measure."""
        return self.digits.get(measure.partition("@")[0], 3)


class Table(NamedTuple):
    """Rows under column names, with a note above."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def lines(self) -> list[str]:
        """Return note and aligned columns as lines of text."""
        cells = [tuple(map(str, row)) for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
        return [*filter(None, [self.note]), *(line.rstrip() for line in lines)]


class GalleryEntry(NamedTuple):
    """A prompt and the trained policy's completion."""

    prompt: str
    completion: str
    before: np.ndarray | None = None  # the picture of the unchanged prompt, uint8 [H, W, 3], or None
    after: np.ndarray | None = None  # that of the completion, from the same noise
    scores: Mapping[str, tuple[float | None, float | None]] = {}  # both texts' values by name
    shown: Sequence[np.ndarray] = ()  # the prompt's own pictures
    between: np.ndarray | None = None  # that of the completion by the renderer before its training, or None


class ShownTurn(NamedTuple):
    """A turn of a shown episode, with its parsed completion."""

    completion: str
    scores: Mapping[str, float | None] = {}  # rewards and eval rewards by name, NaN if missing
    image: np.ndarray | None = None  # the rendered picture, uint8 [H, W, 3], or None
    observation: str | None = None  # the environment's text; None if the episode ended
    pictures: Sequence[np.ndarray] = ()  # the observation's pictures, uint8 [H, W, 3]


class EpisodeEntry(NamedTuple):
    """A shown episode: its prompt, the prompt's pictures uint8 [H, W, 3], its turns, and an optional title."""

    prompt: str
    turns: Sequence[ShownTurn]
    pictures: Sequence[np.ndarray] = ()
    title: str = ""


class Findings(NamedTuple):
    """A task's further results of held-out evaluations, beside the means of every run."""

    tables: Sequence[Table] = ()  # tables for report.html
    lines: Sequence[str] = ()  # lines for the terminal
    # further entries of summary.json by name, such as "table"; empty ones are omitted
    records: Mapping[str, Sequence[Mapping[str, Any]]] = {}

    @property
    def entries(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return the non-empty records."""
        return {name: list(records) for name, records in self.records.items() if records}


def of_turns(name: str, names: Collection[str]) -> bool:
    """Return whether a measure belongs to another measure's turns, among these names.

    Multi-turn runs measure NAME_turn_1 for every NAME; without it, NAME_gain is the name of another reward.
    """
    match = _TURN_MEASURE.fullmatch(name)
    return match is not None and match[1] in names and f"{match[1]}_turn_1" in names


class Vocabulary(NamedTuple):
    """The words of a new policy (policy.path "new")."""

    words: Callable[[], Sequence[str]]  # () → the words, most frequent first
    # width → initial embeddings of some words, f32 [width] by word; None for random ones
    vectors: Callable[[int], Mapping[str, np.ndarray]] | None = None


@dataclass(frozen=True)
class TaskReport:
    """A task's results of a run, beside its rewards."""

    # rows → baseline texts to evaluate, by kind: "unchanged", "oracle"
    references: Callable[[Sequence[Row]], dict[str, list[str]]] = oracle_column
    # (prompts, texts `[P][G]`, valid `[P][G]`) → further metrics of a batch
    statistics: Callable[..., dict[str, float]] = completion_statistics
    # (name, rollouts by kind) → data of an evaluation for the findings; stored in checkpoints
    remember: Callable[[str, Mapping[str, Rollout]], Notes] = lambda name, rollouts: {}
    # (remembered, rows) → tables and lines at the end; kinds are in the order of evaluation
    findings: Callable[[Notes, Sequence[Row]], Findings] = lambda remembered, rows: Findings()
    columns: Mapping[str, str] = field(default_factory=dict)  # of the rows, for the report's table: {heading: column}


@dataclass(frozen=True)
class TaskData:
    """A loaded task, without judges and policy, whose weights are loaded last."""

    prompts: PromptSet
    rewards: TaskRewards = field(default_factory=TaskRewards)
    source: str = ""  # origin of the prompts, in one word; "" for the name in data.prompts
    # (judges, names of the rewards' arguments) → the function (rows, texts `[P][G]`, iteration, evaluation) → pictures;
    # None without a renderer
    render: Callable[[Mapping[str, object], frozenset[str]], Callable[..., RenderedImages]] | None = None
    # (renderer, rollout, iteration, weights=, conditions=, key=) → metrics: an update of judges.renderer
    # (`tasks.renderer.learn_pictures`); None for a task whose renderer cannot be trained
    learn: Callable[..., dict[str, float]] | None = None
    environment: TurnEnvironment = field(default_factory=TurnEnvironment)
    report: TaskReport = TaskReport()
    # () → (prompt, completion) pairs for SFT. The prompt is a string or, with pictures, a row. Episodes are (prompt,
    # completion, observation, completion, …). None takes the rows with a `completion`.
    pairs: Callable[[], Sequence[Sequence[str | Row | Observation]]] | None = None
    vocabulary: Vocabulary | None = None  # of a new policy
    # values besides the config that must not change when a run is resumed or evaluated
    identity: Mapping[str, str] = field(default_factory=dict)
    choices: Choices | None = None  # the allowed completions; None for any text
    invalid: Invalid = "prompt"  # rewards of an invalid completion in training


class Task(Section):
    """A task of a policy."""

    defaults: ClassVar[Mapping[str, Any]] = {}  # for the run's sections, as in a YAML file
    default_config: ClassVar[str | None] = None  # a shipped config to use without --config; None for the defaults
    display: ClassVar[Display] = Display()  # of its measures

    def check(self, config: Config) -> None:
        """Refuse incompatible settings by UserError, such as functions in data.tools; called when a config is made."""
        tools = config.data.tool_names
        require(not tools, "data.tools", "JSON schemas with this task, which calls no functions", tools)

    def parser(self, config: Config) -> Callable[[str, str], ParsedCompletion]:
        """Return the parser (completion, user's prompt) → the text for the rewards."""
        return as_is

    def choices(self, config: Config) -> Sequence[str] | None:
        """Return the allowed completions, if the data have `choices`; None for any text.

        It is used to query a trained policy. UserError if data are missing or invalid.
        """
        return None

    def load(self, setup: TaskSetup) -> TaskData:
        """Load the task's data, but no weights; UserError if they are missing or invalid."""
        raise NotImplementedError


class Finished(NamedTuple):
    """Results of a run that are shown at its end."""

    summary: dict[str, Any]  # entries of summary.json
    lines: Sequence[str] = ()  # lines for the terminal, below the measures
    tables: Sequence[Table] = ()  # tables for report.html, the task's own first
    gallery: Sequence[GalleryEntry] = ()  # pairs of texts or pictures
    episodes: Sequence[EpisodeEntry] = ()  # held-out episodes
