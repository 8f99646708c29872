"""Everything that the task's fields name, read or generated."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import PromptSet, Row, split_rows
from grpo_jax.tasks.recommendation.baselines import item_similarity
from grpo_jax.tasks.recommendation.catalogue import Catalogue, read_catalogue
from grpo_jax.tasks.recommendation.dummy import make_world
from grpo_jax.tasks.recommendation.ranking.items import item_word
from grpo_jax.tasks.recommendation.ranking.semantic_ids import read_ids
from grpo_jax.tasks.recommendation.sequences import (
    Sequences,
    Split,
    Target,
    UserSequence,
    items_split,
    known_targets,
    last_split,
    read_ratings,
    read_sequences,
    read_user_prompts,
    time_split,
)
from grpo_jax.tasks.recommendation.task import PLACES, Recommendation

NO_TITLE = "(no title)"
"""What a prompt says of an item whose title is blank."""

TrainingTargets = Literal["every", "last", "apart"]


@dataclass(frozen=True)
class HistoryTemplate:
    """How a history becomes a prompt.

    Attributes:
        text: The prompt; "{history}" stands for the titles, "{last}" for the newest one, "{items}" for the items' own
            words; other braces mean nothing.
        items: How many of the newest items are listed, oldest first.
        characters: Titles are cut to so many characters, at a space where there is one; 0 for never.
        separator: What stands between two titles.
    """

    text: str = "{history}"
    items: int = 5
    characters: int = 60
    separator: str = "\n"

    def __post_init__(self) -> None:
        """Refuses a template that says nothing of the history."""
        if not any(place in self.text for place in PLACES):
            raise ValueError(f"text must contain one of {', '.join(PLACES)}, got {self.text!r}")
        if self.items < 1:
            raise ValueError(f"items must be at least 1, got {self.items}")
        if self.characters < 0:
            raise ValueError(f"characters must be at least 0, got {self.characters}")

    def prompt(self, titles: Sequence[str], names: Sequence[str] = ()) -> str:
        """The prompt of a history, its titles and the items' own words, oldest first."""
        words = " ".join(names[-self.items :])
        cut = [cut_title(title, self.characters) or NO_TITLE for title in titles[-self.items :]]
        # {last} is filled in first: a title is data, and what looks like a placeholder in it stays as it is.
        text = self.text.replace("{items}", words)
        before, found, after = text.replace("{last}", "\0").partition("{history}")
        listed = self.separator.join(cut) if found else ""
        return before.replace("\0", cut[-1]) + listed + after.replace("\0", cut[-1])


def cut_title(title: str, characters: int) -> str:
    """A title's beginning of at most so many characters; a broken last word goes, unless it is the only one."""
    if not characters or len(title) <= characters:
        return title
    head = title[:characters]
    if not title[characters].isspace() and " " in head:
        head = head.rpartition(" ")[0]
    return head.rstrip(" ,;:-&(/")


def split_examples(
    split: Split, catalogue: Catalogue, template: HistoryTemplate, *, training_targets: TrainingTargets = "every"
) -> PromptSet:
    """Examples of a split's targets.

    Validation and test rows are ordered by a hash of the user's name, so that the first few are a fair sample.

    Args:
        split: What is known and what is asked.
        catalogue: Titles.
        template: Makes prompts.
        training_targets: "every" known item or each user's "last"; "apart" is the last one too (`taught_rows`).

    Returns:
        Rows with the columns of `example_columns`. A row's id counts the items of the file up to its target.

    Raises:
        UserError: If there is nothing to train on.
        ValueError: If training_targets is another word.
    """
    if training_targets not in ("every", "last", "apart"):
        raise ValueError(f'training_targets must be "every", "last" or "apart", got {training_targets!r}')
    train = known_targets(split, "every" if training_targets == "every" else "last")
    if not train:
        raise UserError("no user has four items, or two that training may know: a history and a target")
    parts = [[_example(catalogue, template, one) for one in part] for part in (train, split.validation, split.test)]
    return PromptSet(tuple(parts[0]), tuple(_shuffled(parts[1])), tuple(_shuffled(parts[2])))


def leave_one_out(
    users: Sequence[UserSequence],
    catalogue: Catalogue,
    template: HistoryTemplate,
    *,
    training_targets: TrainingTargets = "every",
) -> PromptSet:
    """`split_examples` of each user's last item and the one before it (`splits.last_split`)."""
    return split_examples(last_split(users), catalogue, template, training_targets=training_targets)


def taught_rows(split: Split, catalogue: Catalogue, template: HistoryTemplate) -> list[Row]:
    """What is taught where each user's last training target is kept for reinforcement: those before it."""
    return [_example(catalogue, template, target) for target in known_targets(split, "but last")]


def _example(catalogue: Catalogue, template: HistoryTemplate, target: Target) -> Row:
    listed = target.history[-template.items :]
    names = [catalogue.names[item] for item in listed] if catalogue.names else ()
    columns = example_columns(target.user, target.history, target.item, catalogue)
    return Row(target.id, template.prompt([catalogue.titles[item] for item in listed], names), columns)


def by_user(
    users: Sequence[UserSequence], catalogue: Catalogue, prompts: Mapping[str, str], *, held_out: int | float = 0.2
) -> PromptSet:
    """One example for each user: the given prompt, and the last item as the target.

    Users are held out by a hash of their prompt, which depends on no order and no seed (`split_rows`); users with the
    same prompt stay together.

    Args:
        users: Sequences.
        catalogue: Titles.
        prompts: A prompt for each user.
        held_out: How many prompts, or which share, the test part gets; validation gets as many.

    Raises:
        UserError: If nothing would be left to train on.
    """
    rows = []
    for user, history, item, number in last_split(users).test:
        rows.append(Row(number, prompts[user], example_columns(user, history, item, catalogue)))
    train, validation, test = split_rows(rows, held_out=held_out)
    return PromptSet(train, tuple(_shuffled(validation)), tuple(_shuffled(test)))


def example_columns(user: str, history: Sequence[int], target: int, catalogue: Catalogue) -> dict[str, object]:
    """What rewards are told of an example, beside the target's rank.

    Returns:
        "user", "target" (the item's id), "target_title", "last_title"; and as catalogue rows "target_row", "history"
        (all of it, oldest first), and "excluded", what rankings leave out: the history (but see `ranking_everything`).
    """
    return {
        "user": user,
        "target": catalogue.ids[target],
        "target_title": catalogue.titles[target],
        "last_title": catalogue.titles[history[-1]],
        "target_row": target,
        "history": tuple(history),
        "excluded": tuple(history),
    }


def ranking_everything(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The examples with nothing left out of their rankings, so that items of the history compete with the target."""
    return tuple(replace(row, columns={**row.columns, "excluded": ()}) for row in rows)


def title_pairs(rows: Sequence[Row], *, characters: int = 0) -> list[tuple[str, str]]:
    """(prompt, title of the next item) for a supervised warm start; targets without a title have none to teach.

    Args:
        rows: Training rows.
        characters: Titles are cut to so many characters; 0 for never.
    """
    pairs = [(row.prompt, cut_title(row.columns["target_title"], characters)) for row in rows]
    return [(prompt, title) for prompt, title in pairs if title]


def asking_pairs(rows: Sequence[Row], *, characters: int = 0, seed: int = 0) -> list[tuple[str, str]]:
    """(prompt, text) in three forms of asking, so that a group of samples holds all of them.

    The text is the last title, the next item's title, or the last title and then the next, one in three each, drawn
    by a hash of the seed and the row's id. Which form pays is left to reinforcement learning.

    Args:
        rows: Training rows.
        characters: Titles are cut to so many characters; 0 for never.
        seed: Of the draw.
    """
    pairs = []
    for row in rows:
        last, following = (cut_title(row.columns[name], characters) for name in ("last_title", "target_title"))
        forms = (last, following, f"{last} {following}")
        drawn = hashlib.sha256(f"{seed} {row.id}".encode()).digest()[0] % len(forms)
        pairs.append((row.prompt, forms[drawn].strip()))
    return [(prompt, text) for prompt, text in pairs if text]


def together_pairs(
    rows: Sequence[Row], catalogue: Catalogue, users: Sequence[UserSequence], *, characters: int = 0
) -> list[tuple[str, str]]:
    """(prompt, title of what is most often taken together with the history's last item), the history left out.

    What came next is one of many items and a guess at it is mostly wrong; what is taken together with an item is the
    same for every user who took it. Rows whose last item was taken with nothing else have none to teach, and items
    without a title neither.

    Args:
        rows: Training rows.
        catalogue: Titles.
        users: Sequences that are counted (`baselines.item_similarity`): what training knows.
        characters: Titles are cut to so many characters; 0 for never.
    """
    similarity = item_similarity(users, len(catalogue)).tocsr()
    ordered: dict[int, list[int]] = {}
    pairs = []
    for row in rows:
        history = row.columns["history"]
        last, taken = history[-1], set(history)
        if last not in ordered:
            others = similarity[[last]]
            best = np.lexsort((others.indices, -others.data))
            ordered[last] = [int(others.indices[place]) for place in best if others.data[place] > 0]
        found = next((item for item in ordered[last] if item not in taken), None)
        pairs.append((row.prompt, "" if found is None else cut_title(catalogue.titles[found], characters)))
    return [(prompt, title) for prompt, title in pairs if title]


def _shuffled(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: hashlib.sha256(str(row.columns["user"]).encode()).digest())


# -------------------------------------------------------------------------------------------------------------- dataset


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
