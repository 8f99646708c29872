"""Who took what, in which order: sequence files, ratings with a time, and prompts written by hand."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from grpo_jax.errors import UserError, one_line
from grpo_jax.tasks.recommendation.catalogue import Catalogue, Problems, json_pairs, read_table, read_text
from grpo_jax.tasks.recommendation.task import EVENT_COLUMNS


class UserSequence(NamedTuple):
    """One user's items as catalogue rows, oldest first, and when each was taken, where that is known."""

    user: str
    items: tuple[int, ...]
    times: tuple[float, ...] = ()


class Sequences(NamedTuple):
    """All users, in the order of their file, and in plain words whom a rule left out (often nobody)."""

    users: tuple[UserSequence, ...]
    notes: tuple[str, ...] = ()


def read_sequences(path: str | Path, catalogue: Catalogue) -> Sequences:
    """Reads ``sequential.txt``: a line per user, ``user_id item1 … itemN target``, separated by white space.

    Blank lines are skipped. An item may occur more than once in a line. Users with fewer than two items are left out:
    ``notes`` says how many.

    Raises:
        UserError: If the file is missing or empty or has bad lines: an item that is not in the catalogue, a user who
            had a line before. All of them are named at once; where most of the file is bad, the likely reason is said
            instead.
    """
    text = read_text(path, "a line per user: user_id item1 … itemN target")
    problems, lines, users = Problems(path), {}, []
    named: set[str] = set()
    short: list[str] = []  # lines of one item, or none
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        user, *items = line.split()
        named.update(items)
        if len(items) < 2:
            short.append(line.strip())
        if user in lines:
            problems.add(number, f"user {user} occurs twice (first on line {lines[user]})")
            continue
        lines[user] = number
        unknown = [item for item in items if item not in catalogue.rows]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            header = " (a header? this file has none)" if number == 1 and len(unknown) == len(items) else ""
            problems.add(number, f"user {user}: item {unknown[0]}{more} not in the catalogue{header}")
        elif len(items) >= 2:
            users.append(UserSequence(user, tuple(catalogue.rows[item] for item in items)))
    if reason := _short_lines(short, len(lines), len(users)):
        raise UserError(f"{path}: {reason}")
    problems.check(foreign_items(named, catalogue))
    if not users:
        raise UserError(f"{path} has no users: expected a line for each, user_id item1 … itemN target")
    return Sequences(tuple(users), _left_out(len(short), 2))


def _short_lines(short: Sequence[str], users: int, good: int) -> str:
    """The reason why most lines hold no history; "" where they do, or where their users merely took one item."""
    if len(short) <= good:
        return ""
    example, wanted = one_line(repr(short[0]), 60), "a line is user_id item1 … itemN, with white space between them"
    if not short[0].split()[1:]:
        return f"{len(short)} lines hold no item, such as {example}: {wanted}"
    if good and users == good + len(short):
        return ""
    advice = "one line for each user, not for each item" if users < len(short) else "no user has two items"
    return f"{len(short)} lines hold one item, such as {example}: {wanted}; {advice}"


def _left_out(users: int, minimum_items: int) -> tuple[str, ...]:
    return (f"{users} users with fewer than {minimum_items} items are left out",) if users else ()


def foreign_items(named: Collection[str], catalogue: Catalogue) -> str:
    """The likely reason why more than half of the items that a file names are not in the catalogue; else "".

    Args:
        named: Items, each once.
        catalogue: Where they should be.
    """
    unknown = sorted(item for item in named if item not in catalogue.rows)
    if 2 * len(unknown) <= len(named):
        return ""
    examples = " and ".join(one_line(repr(item), 40) for item in unknown[:2])
    others = " and ".join(one_line(repr(item), 40) for item in catalogue.ids[:2])
    counted = f"{len(unknown)} of {len(named)} items are not in the catalogue, such as {examples}; its ids are {others}"
    return f"{counted}, …: {_why_foreign(unknown, catalogue)}"


def _why_foreign(unknown: Sequence[str], catalogue: Catalogue) -> str:
    def most(known: Collection[str]) -> bool:
        return 2 * sum(item in known for item in unknown) > len(unknown)

    for name, values in catalogue.columns.items():
        if most(set(values)):
            return f"they stand in its column {name!r}, which must be the first"
    spaced = next((name for name in catalogue.ids if len(name.split()) > 1), None)
    if spaced is not None:
        return f"write its ids without white space, which separates items ({spaced!r})"
    bare = {_bare(name): name for name in catalogue.ids}
    alike = [item for item in unknown if _bare(item) in bare]
    if 2 * len(alike) > len(unknown):
        return f"write ids alike in both files: {alike[0]!r} here, {bare[_bare(alike[0])]!r} there"
    if most({word for title in catalogue.titles for word in title.split()}):
        return "lines must hold the ids of items, not their titles"
    return "take the catalogue of these items, with their ids in its first column"


def _bare(name: str) -> str:
    """An id's number without leading zeros, or its letters: what is left where it is written in another way."""
    digits = re.sub(r"\D", "", name)
    return digits.lstrip("0") or digits[:1] or re.sub(r"\W", "", name).lower()


def read_ratings(
    path: str | Path,
    catalogue: Catalogue,
    *,
    minimum_rating: float = 0.0,
    minimum_items: int = 2,
    columns: Mapping[str, str] | None = None,
) -> Sequences:
    """Reads events, a CSV with user_id, item_id, timestamp and perhaps a rating, or ratings as MovieLens has them.

    A user's items are sorted by time; events of the same second keep the order of the file. Events with a rating below
    ``minimum_rating`` do not count, of those with the same item a user's first counts, and users with fewer than
    ``minimum_items`` items are left out: ``notes`` says how many of each.

    Args:
        path: The file.
        catalogue: Its items.
        minimum_rating: Above 0 a rating must be there.
        minimum_items: At least 2, a history and a target.
        columns: What the file calls its columns otherwise (`data.columns`).

    Raises:
        UserError: If the file is missing or empty or has bad lines: a rating that is no number, a timestamp that is
            neither a number nor ISO 8601 or not as on the lines before, an item that is not in the catalogue. All of
            them are named at once.
        ValueError: If minimum_items is below 2.
    """
    if minimum_items < 2:
        raise ValueError(f"minimum_items must be at least 2, got {minimum_items}")
    text = read_text(path, "a CSV with user_id, item_id and timestamp")
    columns = columns or {}
    rated = minimum_rating > 0 or "rating" in columns
    rows, problems = read_table(path, text, EVENT_COLUMNS[: 4 if rated else 3], columns=columns)
    events: dict[str, list[tuple[float, int]]] = {}
    below = 0
    named: set[str] = set()
    forms: dict[bool, int] = {}  # the first line whose time is ISO 8601, and the first whose is not
    for line, row in rows:
        user, item = row["user_id"].strip(), row["item_id"].strip()
        named.add(item)
        try:
            rating, (time, iso) = float(row.get("rating", "inf")), _seconds(row["timestamp"])
        except (ValueError, OverflowError):
            given = f", rating {row['rating']!r}" if "rating" in row else ""
            wanted = "expected a timestamp that is a number or ISO 8601, and a rating that is a number"
            problems.add(line, f"{wanted}; got timestamp {row['timestamp']!r}{given}")
            continue
        forms.setdefault(iso, line)
        if not user or rating != rating or time != time:
            problems.add(line, "a blank user or a rating or timestamp that is NaN")
        elif item not in catalogue.rows:
            problems.add(line, f"user {user}: item {item} not in the catalogue")
        else:
            counted = events.setdefault(user, [])
            if rating >= minimum_rating:
                counted.append((time, catalogue.rows[item]))
            else:
                below += 1
    if len(forms) > 1:
        first, other = sorted(forms.values())
        problems.add(other, f"timestamps must be all numbers or all ISO 8601; see line {first}")
    problems.check(foreign_items(named, catalogue))
    return _sorted_sequences(path, events, below, minimum_rating, minimum_items)


def _seconds(text: str) -> tuple[float, bool]:
    """A time as a number, and whether it was ISO 8601: seconds since 1970 then, in UTC where no zone is said."""
    try:
        return float(text), False
    except ValueError:
        time = datetime.fromisoformat(text.strip())
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), True


def _sorted_sequences(
    path: str | Path,
    events: Mapping[str, list[tuple[float, int]]],
    below: int,
    minimum_rating: float,
    minimum_items: int,
) -> Sequences:
    users, repeated = [], 0
    for user, counted in events.items():
        first: dict[int, float] = {}
        for time, item in sorted(counted, key=lambda event: event[0]):  # stable: file order in a tie
            first.setdefault(item, time)
        repeated += len(counted) - len(first)
        if len(first) >= minimum_items:
            users.append(UserSequence(user, tuple(first), tuple(first.values())))
    notes = []
    if below:
        notes.append(f"{below} ratings below {minimum_rating:g} do not count")
    if repeated:
        notes.append(f"{repeated} events repeat an item of the same user and are left out; the first counts")
    notes += _left_out(len(events) - len(users), minimum_items)
    if not users:
        raise UserError(f"{path} has no user with at least {minimum_items} items; {'; '.join(notes) or 'it is empty'}")
    return Sequences(tuple(users), tuple(notes))


def read_user_prompts(path: str | Path, users: Sequence[UserSequence]) -> dict[str, str]:
    """Reads ``prompts.json``, ``{user_id: prompt_text}``: one prompt for each user of the sequence file.

    Raises:
        UserError: If the file is missing or bad: a prompt that is blank or no text, a user who occurs twice, has no
            sequence, or has no prompt. All of them are named at once.
    """
    text = read_text(path, 'an object {"user_id": "prompt text"}')
    problems, prompts = Problems(path), {}
    for user, prompt in json_pairs(text, problems, '{"user_id": "prompt text"}'):
        if user in prompts:
            problems.add(None, f"user {user} occurs twice")
        elif not isinstance(prompt, str):
            problems.add(None, f"the prompt of user {user} must be text, got {type(prompt).__name__}")
        elif not prompt.strip():
            problems.add(None, f"the prompt of user {user} is blank")
        prompts.setdefault(user, prompt)
    if not prompts and not problems.found:
        problems.add(None, "it has no prompts")
    known = dict.fromkeys(user.user for user in users)
    for user in prompts:
        if user not in known:
            problems.add(None, f"user {user} has no sequence")
    for user in known if prompts else ():
        if user not in prompts:
            problems.add(None, f"user {user} has no prompt")
    problems.check()
    return {user: prompt.strip() for user, prompt in prompts.items()}


# ------------------------------------------------------------------------------------------------------------- splits


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
