"""Everything a config's recommendation section names, read or generated."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from grpo_jax.errors import UserError
from grpo_jax.rollout.data import PromptSet
from grpo_jax.tasks.recommendation.catalogue import Catalogue, read_catalogue
from grpo_jax.tasks.recommendation.dummy import make_world
from grpo_jax.tasks.recommendation.examples import HistoryTemplate, by_user, leave_one_out
from grpo_jax.tasks.recommendation.section import RecommendationSection
from grpo_jax.tasks.recommendation.sequences import (
    Sequences,
    UserSequence,
    read_ratings,
    read_sequences,
    read_user_prompts,
)


class Dataset(NamedTuple):
    """What the task works on.

    Attributes:
        catalogue: Items and titles.
        users: All sequences.
        prompts: Examples for training, validation and test.
        notes: In plain words, what a rule left out or changed.
    """

    catalogue: Catalogue
    users: tuple[UserSequence, ...]
    prompts: PromptSet
    notes: tuple[str, ...]


def load_dataset(section: RecommendationSection, *, held_out: int | float = 0.2) -> Dataset:
    """Reads or generates the data of a run.

    Args:
        section: Names it.
        held_out: Share or number of users kept for testing, where prompts are given by user; otherwise each user's
            last item is the test (`leave_one_out`).

    Raises:
        UserError: If files are missing or bad (all bad lines at once), or a field of the section is out of range.
    """
    try:
        template = HistoryTemplate(section.template, section.history_items, section.title_characters, section.separator)
        catalogue, sequences = _load(section)
        if section.order_column is not None and section.order_column not in catalogue.columns:
            raise ValueError(f"order_column must be one of {list(catalogue.columns)}, got {section.order_column!r}")
        if section.prompts:
            texts = read_user_prompts(section.prompts, sequences.users)
            prompts = by_user(sequences.users, catalogue, texts, held_out=held_out)
        else:
            prompts = leave_one_out(sequences.users, catalogue, template, training_targets=section.training_targets)
    except ValueError as error:
        raise UserError(f"recommendation: {error}") from error
    return Dataset(catalogue, sequences.users, prompts, (*sequences.notes, *_notes(catalogue)))


def _load(section: RecommendationSection) -> tuple[Catalogue, Sequences]:
    if section.source == "dummy":
        world = make_world(
            users=section.dummy_users,
            items=section.dummy_items,
            length=section.dummy_length,
            fickle=section.dummy_fickle,
            noise=section.dummy_noise,
            seed=section.dummy_seed,
        )
        return world.catalogue, world.sequences
    kind = Path(section.source).suffix.lower()
    if kind not in (".txt", ".csv"):
        raise UserError(
            f"recommendation.source: expected dummy, a .txt of sequences or a .csv of ratings, got {kind!r}"
        )
    catalogue = read_catalogue(section.catalogue or "", blank_titles=section.blank_titles)
    if kind == ".txt":
        return catalogue, read_sequences(section.source, catalogue)
    ratings = read_ratings(
        section.source, catalogue, minimum_rating=section.minimum_rating, minimum_items=section.minimum_items
    )
    return catalogue, ratings


def _notes(catalogue: Catalogue) -> list[str]:
    notes, blank = [], len(catalogue.blank)
    if blank:
        notes.append(f"{blank} items without a title are kept; no query resembles them")
    shared = len(catalogue) - blank - len({title for title in catalogue.titles if title})
    if shared:
        notes.append(f"{shared} items share another's title; no query can tell them apart")
    return notes
