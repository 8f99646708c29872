"""Examples to learn from and to be measured on: a history as a prompt, and the item that came next.

Two ways to hold users out. *Leave-one-out*, where prompts are built from titles: each user's last item is the test
target, the one before it the validation target, and what precedes is for training. *By user*, where prompts were
written by hand, one for each user: a prompt belongs to one history, so some users are for testing alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grpo_jax.errors import UserError
from grpo_jax.rollout.data import PromptSet, Row, split_rows
from grpo_jax.tasks.recommendation.catalogue import Catalogue
from grpo_jax.tasks.recommendation.ranking.items import item_word
from grpo_jax.tasks.recommendation.sequences import UserSequence

NO_TITLE = "(no title)"
"""What a prompt says of an item whose title is blank."""

TrainingTargets = Literal["every", "last", "apart"]
HELD_OUT = 2
"""Items at the end of a sequence that training does not know: the validation and the test target."""
PLACES = ("{history}", "{last}", "{items}")
"""What a template says of a history; one of them at least."""


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
        """Refuses a template that says nothing of the history.

        Raises:
            ValueError: A field is out of range; the message names it.
        """
        if not any(place in self.text for place in PLACES):
            raise ValueError(f"text must contain one of {', '.join(PLACES)}, got {self.text!r}")
        if self.items < 1:
            raise ValueError(f"items must be at least 1, got {self.items}")
        if self.characters < 0:
            raise ValueError(f"characters must be at least 0, got {self.characters}")

    def prompt(self, titles: Sequence[str], items: Sequence[int] = ()) -> str:
        """The prompt of a history, its titles and rows of the catalogue, oldest first."""
        words = " ".join(item_word(item) for item in items[-self.items :])
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


def leave_one_out(
    users: Sequence[UserSequence],
    catalogue: Catalogue,
    template: HistoryTemplate,
    *,
    training_targets: TrainingTargets = "every",
) -> PromptSet:
    """Examples of each user's items in time order.

    With items x1 … xn: xn is the test target given x1 … xn-1; xn-1 the validation target (from three items on); each
    of x2 … xn-2 a training target given what stands before it (from four items on), or xn-2 alone with
    ``training_targets="last"``. No training example knows of a validation or test item.

    Validation and test rows are ordered by a hash of the user's name, so that the first few are a fair sample.

    Args:
        users: Sequences.
        catalogue: Titles.
        template: Makes prompts.
        training_targets: "every" position or the "last" one; "apart" is the last one too (`taught_rows`).

    Returns:
        Rows with the columns of `example_columns`. A row's id counts the items of the file up to its target.

    Raises:
        UserError: If no user has the four items that a training example takes.
        ValueError: If training_targets is another word.
    """
    if training_targets not in ("every", "last", "apart"):
        raise ValueError(f'training_targets must be "every", "last" or "apart", got {training_targets!r}')
    train, validation, test = [], [], []
    for offset, sequence in _with_offsets(users):
        n = len(sequence.items)
        example = functools.partial(_example, catalogue, template, offset, sequence)
        test.append(example(n - 1))
        if n >= 3:
            validation.append(example(n - 2))
        first = 1 if training_targets == "every" else max(n - 3, 1)
        train += [example(position) for position in range(first, n - 2)]
    if not train:
        raise UserError("no user has four items, which a training example takes (history, target, two held out)")
    return PromptSet(tuple(train), tuple(_shuffled(validation)), tuple(_shuffled(test)))


def taught_rows(users: Sequence[UserSequence], catalogue: Catalogue, template: HistoryTemplate) -> list[Row]:
    """What is taught where the last training target is kept for reinforcement: the targets x2 … xn-3 of each user."""
    return [
        _example(catalogue, template, offset, sequence, position)
        for offset, sequence in _with_offsets(users)
        for position in range(1, len(sequence.items) - HELD_OUT - 1)
    ]


def _example(
    catalogue: Catalogue, template: HistoryTemplate, offset: int, sequence: UserSequence, position: int
) -> Row:
    history = sequence.items[:position]
    prompt = template.prompt([catalogue.titles[item] for item in history[-template.items :]], history)
    columns = example_columns(sequence.user, history, sequence.items[position], catalogue)
    return Row(offset + position, prompt, columns)


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
    for offset, sequence in _with_offsets(users):
        columns = example_columns(sequence.user, sequence.items[:-1], sequence.items[-1], catalogue)
        rows.append(Row(offset + len(sequence.items) - 1, prompts[sequence.user], columns))
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


def _with_offsets(users: Sequence[UserSequence]) -> Iterator[tuple[int, UserSequence]]:
    """Each sequence with the number of items before it: a number for every (user, position) of a file."""
    offset = 0
    for sequence in users:
        yield offset, sequence
        offset += len(sequence.items)


def _shuffled(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: hashlib.sha256(str(row.columns["user"]).encode()).digest())
