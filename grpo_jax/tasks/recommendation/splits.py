"""What training knows, and who is asked about which item: three ways to hold interactions out.

*last* (leave-one-out): each user's last item is the test target, the one before it the validation target, and what
precedes them is known. *items*: some items are held out of training altogether, and users whose last item is one of
them are asked about it. *time*: what happened before a moment is known, and users are asked about what they took after
it. Whatever learns or counts is given `Split.known` and nothing else, so that no way of splitting can leak.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from grpo_jax.errors import UserError
from grpo_jax.tasks.recommendation.sequences import UserSequence

HELD_OUT = 2
"""Items at the end of a sequence that training does not know with leave-one-out: the validation and the test target."""


class Target(NamedTuple):
    """An item to be predicted.

    Attributes:
        user: Who took it.
        history: Rows of the catalogue that are told, oldest first; at least one.
        item: The row of what came next.
        id: A number of its own: the items of the file up to it.
    """

    user: str
    history: tuple[int, ...]
    item: int
    id: int


class Split(NamedTuple):
    """Interactions that training knows, and targets that it does not.

    Attributes:
        starts: How many items the file has before each user.
        known: What training knows of each user, perhaps nothing; in the order of the file.
        validation: Targets to choose a checkpoint on.
        test: Targets to report on.
        notes: In plain words, what was held out.
    """

    starts: tuple[int, ...]
    known: tuple[UserSequence, ...]
    validation: tuple[Target, ...]
    test: tuple[Target, ...]
    notes: tuple[str, ...] = ()


def last_split(users: Sequence[UserSequence]) -> Split:
    """With items x1 … xn: x1 … xn-2 are known, xn-1 is the validation target (from three items on), xn the test target.

    The history of a target is all that stands before it.
    """
    starts = _starts(users)
    places = [(start, user, len(user.items) - 1) for start, user in zip(starts, users, strict=True)]
    validation = [_target(start, user, last - 1) for start, user, last in places if last >= 2]
    test = [_target(*place) for place in places]
    return Split(starts, tuple(_first(user, len(user.items) - HELD_OUT) for user in users), (*validation,), (*test,))


def items_split(users: Sequence[UserSequence], ids: Sequence[str], share: float) -> Split:
    """Cold start: items that training has never seen, neither as targets nor in histories.

    A hash of its id says whether an item is held out for testing (a share of `share`), for validation (as many) or
    known; other items of the catalogue change nothing about it. All interactions with known items are known, and no
    others. Users whose last item is held out are asked about it, with their known items before it as the history: so
    held-out items that a user took earlier are neither told nor left out of the ranking.

    Args:
        users: Sequences.
        ids: Of the catalogue's items.
        share: In (0, 0.5).

    Raises:
        UserError: If no user is left to ask.
    """
    places = [int.from_bytes(hashlib.sha256(f"held out {name}".encode()).digest()[:8]) / 2**64 for name in ids]
    starts, known = _starts(users), []
    validation: list[Target] = []
    test: list[Target] = []
    for start, (user, items, times) in zip(starts, users, strict=True):
        kept = [index for index, item in enumerate(items) if places[item] >= 2 * share]
        left = UserSequence(user, tuple(items[i] for i in kept), tuple(times[i] for i in kept) if times else ())
        known.append(left)
        drawn = places[items[-1]]
        if drawn < 2 * share and left.items:
            target = Target(user, left.items, items[-1], start + len(items) - 1)
            (test if drawn < share else validation).append(target)
    if not test:
        raise UserError(
            f"task.held_out_items: no user's last item is held out with {share:g}; a larger share is needed"
        )
    count = [sum(low <= place < high for place in places) for low, high in ((0, share), (share, 2 * share))]
    note = f"{count[0]} items are held out for testing ({len(test)} users) and {count[1]} for validation"
    return Split(starts, tuple(known), tuple(validation), tuple(test), (note,))


def time_split(users: Sequence[UserSequence], share: float) -> Split:
    """A global temporal split: nothing that training knows is later than anything that is asked.

    The interactions of all users in the order of time are cut twice: the first `share` of them are known, half of the
    rest is for validation, the last half for testing; interactions of one second stay on one side. In each of the two
    parts a user is asked about the last item of theirs in it, if any stands before that; the history is all that does,
    known to training or not, as it would be at that moment. Users who came after the cut are asked too.

    Args:
        users: Sequences with times, oldest first.
        share: In (0, 1).

    Raises:
        ValueError: If a sequence has no times.
        UserError: If no user is left to ask.
    """
    if any(len(user.times) != len(user.items) for user in users):
        raise ValueError("users must have times, one for each item")
    ordered = sorted(time for user in users for time in user.times)
    begin, middle = (ordered[min(int(part * len(ordered)), len(ordered) - 1)] for part in (share, (1 + share) / 2))
    starts, known = _starts(users), []
    validation: list[Target] = []
    test: list[Target] = []
    for start, user in zip(starts, users, strict=True):
        before, between = (sum(time < cut for time in user.times) for cut in (begin, middle))
        known.append(_first(user, before))
        if between - 1 >= max(before, 1):
            validation.append(_target(start, user, between - 1))
        if len(user.items) - 1 >= max(between, 1):
            test.append(_target(start, user, len(user.items) - 1))
    if not test:
        raise UserError(f"task.time_share: nobody is left to ask about what came after {share:g} of all; take less")
    share_of = f"{sum(len(user.items) for user in known):,} of {len(ordered):,} interactions"
    note = f"{share_of} are before the cut; {len(validation)} users are asked for validation, {len(test)} for testing"
    return Split(starts, tuple(known), tuple(validation), tuple(test), (note,))


def known_targets(split: Split, which: Literal["every", "last", "but last"] = "every") -> list[Target]:
    """What there is to learn of the known interactions: each user's items but the first, given what stands before them.

    Args:
        split: Known sequences y1 … ym.
        which: All of y2 … ym, ym alone, or y2 … ym-1.
    """
    chosen = {
        "every": lambda count: range(1, count),
        "last": lambda count: range(max(count - 1, 1), count),
        "but last": lambda count: range(1, count - 1),
    }[which]
    pairs = zip(split.starts, split.known, strict=True)
    return [_target(start, user, place) for start, user in pairs for place in chosen(len(user.items))]


def _target(start: int, user: UserSequence, place: int) -> Target:
    return Target(user.user, user.items[:place], user.items[place], start + place)


def _first(user: UserSequence, count: int) -> UserSequence:
    return UserSequence(user.user, user.items[: max(count, 0)], user.times[: max(count, 0)])


def _starts(users: Iterable[UserSequence]) -> tuple[int, ...]:
    """How many items stand before each user: with a place within the sequence, a number for every item of a file."""
    starts, count = [], 0
    for user in users:
        starts.append(count)
        count += len(user.items)
    return tuple(starts)
