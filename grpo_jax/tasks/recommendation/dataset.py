"""Everything that the task's fields name, read or generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grpo_jax.errors import UserError
from grpo_jax.rollout.data import PromptSet, Row
from grpo_jax.tasks.recommendation.catalogue import Catalogue, read_catalogue
from grpo_jax.tasks.recommendation.dummy import make_world
from grpo_jax.tasks.recommendation.examples import HistoryTemplate, by_user, leave_one_out, taught_rows
from grpo_jax.tasks.recommendation.sequences import (
    Sequences,
    UserSequence,
    read_ratings,
    read_sequences,
    read_user_prompts,
)

if TYPE_CHECKING:
    from grpo_jax.tasks.recommendation.task import Recommendation


class Dataset(NamedTuple):
    """What the task works on.

    Attributes:
        catalogue: Items and titles.
        users: All sequences.
        prompts: Examples for training, validation and test.
        taught: Examples of a warm start; those of training, or what stands before them.
        notes: In plain words, what a rule left out or changed.
    """

    catalogue: Catalogue
    users: tuple[UserSequence, ...]
    prompts: PromptSet
    taught: Sequence[Row]
    notes: tuple[str, ...]


def load_dataset(task: Recommendation, *, held_out: int | float = 0.2) -> Dataset:
    """Reads or generates the data of a run.

    Args:
        task: Names it.
        held_out: Share or number of users kept for testing, where prompts are given by user; otherwise each user's
            last item is the test (`leave_one_out`).

    Raises:
        UserError: If files are missing or bad (all bad lines at once), or a field of the task is out of range.
    """
    try:
        template = HistoryTemplate(task.template, task.history_items, task.title_characters, task.separator)
        catalogue, sequences = _load(task)
        if task.order_column is not None and task.order_column not in catalogue.columns:
            raise ValueError(f"order_column must be one of {list(catalogue.columns)}, got {task.order_column!r}")
        if task.prompts:
            texts = read_user_prompts(task.prompts, sequences.users)
            prompts = by_user(sequences.users, catalogue, texts, held_out=held_out)
            taught: Sequence[Row] = prompts.train
        else:
            prompts = leave_one_out(sequences.users, catalogue, template, training_targets=task.training_targets)
            apart = task.training_targets == "apart"
            taught = taught_rows(sequences.users, catalogue, template) if apart else prompts.train
    except ValueError as error:
        raise UserError(f"task: {error}") from error
    return Dataset(catalogue, sequences.users, prompts, taught, (*sequences.notes, *_notes(catalogue)))


def _load(task: Recommendation) -> tuple[Catalogue, Sequences]:
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
        raise UserError(f"task.source: expected dummy, a .txt of sequences or a .csv of ratings, got {kind!r}")
    catalogue = read_catalogue(task.catalogue or "", blank_titles=task.blank_titles)
    if kind == ".txt":
        return catalogue, read_sequences(task.source, catalogue)
    ratings = read_ratings(task.source, catalogue, minimum_rating=task.minimum_rating, minimum_items=task.minimum_items)
    return catalogue, ratings


def _notes(catalogue: Catalogue) -> list[str]:
    notes, blank = [], len(catalogue.blank)
    if blank:
        notes.append(f"{blank} items without a title are kept; no query resembles them")
    shared = len(catalogue) - blank - len({title for title in catalogue.titles if title})
    if shared:
        notes.append(f"{shared} items share another's title; no query can tell them apart")
    return notes
