"""Everything that the task's fields name, read or generated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grpo_jax.config.fields import require
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import PromptSet, Row
from grpo_jax.tasks.recommendation.catalogue import Catalogue, read_catalogue
from grpo_jax.tasks.recommendation.dummy import make_world
from grpo_jax.tasks.recommendation.examples import (
    HistoryTemplate,
    by_user,
    ranking_everything,
    split_examples,
    taught_rows,
)
from grpo_jax.tasks.recommendation.ranking.ids_file import read_ids
from grpo_jax.tasks.recommendation.ranking.items import item_word
from grpo_jax.tasks.recommendation.sequences import (
    EVENT_COLUMNS,
    Sequences,
    UserSequence,
    read_ratings,
    read_sequences,
    read_user_prompts,
)
from grpo_jax.tasks.recommendation.splits import Split, items_split, last_split, time_split

if TYPE_CHECKING:
    from grpo_jax.tasks.recommendation.task import Recommendation


class Dataset(NamedTuple):
    """What the task works on.

    Attributes:
        catalogue: Items and titles.
        users: All sequences, held-out items too: nothing that learns or counts may look at them.
        known: What training knows of each user (`splits.Split`).
        prompts: Examples for training, validation and test.
        taught: Examples of a warm start; those of training, or what stands before them.
        notes: In plain words, what a rule left out or changed.
    """

    catalogue: Catalogue
    users: tuple[UserSequence, ...]
    known: tuple[UserSequence, ...]
    prompts: PromptSet
    taught: Sequence[Row]
    notes: tuple[str, ...]


def load_dataset(
    task: Recommendation, *, held_out: int | float = 0.2, columns: Mapping[str, str] | None = None
) -> Dataset:
    """Reads or generates the data of a run.

    Args:
        task: Names it.
        held_out: Share or number of users kept for testing, where prompts are given by user; otherwise
            task.split says what is held out.
        columns: What the files call their columns otherwise (`data.columns`).

    Raises:
        UserError: If files are missing or bad (all bad lines at once), or a field of the task is out of range.
    """
    try:
        template = HistoryTemplate(task.template, task.history_items, task.title_characters, task.separator)
        catalogue, sequences = _load(task, columns or {})
        catalogue = dataclasses.replace(catalogue, names=_names(task, catalogue))
        if task.order_column is not None and task.order_column not in catalogue.columns:
            raise ValueError(f"order_column must be one of {list(catalogue.columns)}, got {task.order_column!r}")
        split = _split(task, sequences.users, catalogue)
        if task.prompts:
            texts = read_user_prompts(task.prompts, sequences.users)
            prompts = by_user(sequences.users, catalogue, texts, held_out=held_out)
            taught: Sequence[Row] = prompts.train
        else:
            prompts = split_examples(split, catalogue, template, training_targets=task.training_targets)
            apart = task.training_targets == "apart"
            taught = taught_rows(split, catalogue, template) if apart else prompts.train
    except ValueError as error:
        raise UserError(f"task: {error}") from error
    if not task.exclude_history:
        prompts = PromptSet(*map(ranking_everything, prompts))
    notes = (*sequences.notes, *split.notes, *_notes(catalogue))
    return Dataset(catalogue, sequences.users, split.known, prompts, taught, notes)


def _split(task: Recommendation, users: Sequence[UserSequence], catalogue: Catalogue) -> Split:
    if task.split == "items":
        return items_split(users, catalogue.ids, task.held_out_items)
    return time_split(users, task.time_share) if task.split == "time" else last_split(users)


def over_catalogue(task: Recommendation, path: str, columns: Mapping[str, str]) -> Recommendation:
    """The task over another catalogue: all items of its own, and new ones, which are ranked like the old.

    Raises:
        UserError: The policy cannot name new items, a file is bad, or an item of the task's own is not there.
    """
    require(task.writes not in ("item", "ids"), "catalogue", "the run's, whose items are the policy's own words", path)
    require(task.source != "dummy", "catalogue", "the run's: the dummy world has its own", path)
    read = functools.partial(read_catalogue, blank_titles=task.blank_titles, columns=columns)
    old, new = read(task.catalogue or ""), read(path)
    missing = [name for name in old.ids if name not in new.rows]
    if missing:
        raise UserError(
            f"catalogue: expected all {len(old)} items of {task.catalogue}, "
            f"got {path} without {len(missing)} of them, the first {missing[0]!r}"
        )
    return dataclasses.replace(task, catalogue=path)


def _load(task: Recommendation, columns: Mapping[str, str]) -> tuple[Catalogue, Sequences]:
    if task.source == "dummy":
        world = make_world(
            users=task.dummy_users,
            items=task.dummy_items,
            length=task.dummy_length,
            fickle=task.dummy_fickle,
            noise=task.dummy_noise,
            seed=task.dummy_seed,
        )
        return world.catalogue, world.sequences
    if not task.source:
        both = "--task.source sequential.txt --task.catalogue items.tsv"
        raise UserError(f"task.source: expected your sequences or ratings, and their catalogue: {both}; got nothing")
    kind = Path(task.source).suffix.lower()
    if kind not in (".txt", ".csv"):
        raise UserError(f"task.source: expected dummy, a .txt of sequences or a .csv of events, got {kind!r}")
    catalogue = read_catalogue(task.catalogue or "", blank_titles=task.blank_titles, columns=columns)
    if kind == ".txt":
        return catalogue, read_sequences(task.source, catalogue)
    least = {"minimum_rating": task.minimum_rating, "minimum_items": task.minimum_items}
    return catalogue, read_ratings(task.source, catalogue, **least, columns=columns)


def column_names(task: Recommendation) -> tuple[str, ...]:
    """The columns of the task's files that `data.columns` may name otherwise."""
    if task.source == "dummy":
        return ()
    return ("title", *(EVENT_COLUMNS if Path(task.source).suffix.lower() == ".csv" else ()))


def _names(task: Recommendation, catalogue: Catalogue) -> tuple[str, ...]:
    """What each item is called by a policy that has words of their own for items."""
    if task.writes == "ids":
        return read_ids(task.semantic_ids or "", catalogue)
    return tuple(map(item_word, range(len(catalogue)))) if task.writes == "item" else ()


def _notes(catalogue: Catalogue) -> list[str]:
    notes, blank = [], len(catalogue.blank)
    if blank:
        notes.append(f"{blank} items without a title are kept; no query resembles them")
    shared = len(catalogue) - blank - len({title for title in catalogue.titles if title})
    if shared:
        notes.append(f"{shared} items share another's title; no query can tell them apart")
    return notes
