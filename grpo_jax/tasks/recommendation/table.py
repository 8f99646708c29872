"""The table of results: every method by every measure with its interval, for all users and for parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation import metrics
from grpo_jax.tasks.recommendation.catalogue import Catalogue
from grpo_jax.tasks.recommendation.metrics import Interval

CUTOFFS = (5, 10, 20, 50, 100)
MEASURES = (*(f"{name}@{k}" for name in ("HR", "NDCG", "MRR") for k in CUTOFFS), "MRR")
SHOWN = ("HR@5", "HR@10", "NDCG@5", "NDCG@10", "MRR")
"""Those that a terminal has room for."""
ALL = "all"
POPULARITY = {"target ≤ 3": (0, 3), "target 4–10": (4, 10), "target 11–50": (11, 50), "target > 50": (51, None)}
"""Groups of users by how often their target was taken in training, least and most."""


class TableRow(NamedTuple):
    """One method on one group of users.

    Attributes:
        method: Its name.
        group: "all", or a part of the users.
        users: How many were measured.
        missing: How many more have no rank because the retriever failed; they are in no mean.
        measures: Mean and interval of each measure; empty where nobody was measured.
    """

    method: str
    group: str
    users: int
    missing: int
    measures: dict[str, Interval]


def measure_users(rank: np.ndarray) -> np.ndarray:
    """Every measure of MEASURES for every user, f64 [U, 16]; NaN where the rank is."""
    kinds = (metrics.hit, metrics.ndcg, metrics.mrr)
    return np.stack([*(kind(rank, k=k) for kind in kinds for k in CUTOFFS), metrics.mrr(rank)], axis=1)


def make_table(
    ranks: Mapping[str, np.ndarray],
    groups: Mapping[str, np.ndarray] | None = None,
    *,
    level: float = 0.95,
    samples: int = 1000,
    seed: int = 0,
) -> list[TableRow]:
    """Measures every method on all users and on each group.

    Args:
        ranks: For each method the targets' ranks f64 [U] of the same users; NaN where there is none.
        groups: Further groups, bool [U] each.
        level: Of the intervals.
        samples: Draws of the bootstrap.
        seed: Of the draws; methods that miss no user see the same draws.

    Raises:
        ValueError: If lengths differ.
    """
    _check_lengths({**ranks, **(groups or {})})
    values = {method: measure_users(np.asarray(rank, np.float64)) for method, rank in ranks.items()}
    return _rows(values, groups or {}, level=level, samples=samples, seed=seed)


def paired_table(
    ranks: Mapping[str, np.ndarray],
    pairs: Sequence[tuple[str, str]],
    *,
    level: float = 0.95,
    samples: int = 1000,
    seed: int = 0,
) -> list[TableRow]:
    """The differences of two methods, user by user, on the users who have both ranks.

    The bootstrap draws users with both of their values, so that what makes a user hard for both methods is in neither
    end of the interval: it is clear of zero where the intervals of the two methods may well overlap.

    Args:
        ranks: As in `make_table`.
        pairs: (method, method that is taken off it).
        level: Of the intervals.
        samples: Draws of the bootstrap.
        seed: Of the draws.

    Returns:
        A row for each pair, called "method − other".

    Raises:
        ValueError: If lengths differ.
    """
    _check_lengths(ranks)
    values = {name: measure_users(np.asarray(ranks[name], np.float64)) for pair in pairs for name in pair}
    differences = {f"{method} − {other}": values[method] - values[other] for method, other in pairs}
    return _rows(differences, {}, level=level, samples=samples, seed=seed)


def _check_lengths(columns: Mapping[str, np.ndarray]) -> None:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"ranks and groups must be of the same users, got lengths {lengths}")


def _rows(values: Mapping[str, np.ndarray], groups: Mapping[str, np.ndarray], **drawing: Any) -> list[TableRow]:
    """A row for each method's values f64 [U, 16], NaN for users who are missing, and all users and each group."""
    known = {method: np.asarray(~np.isnan(measured).any(axis=1)) for method, measured in values.items()}
    everybody = np.ones(len(next(iter(known.values()), ())), bool)
    parts = {ALL: everybody, **groups}
    intervals: dict[tuple[str, str], list[Interval]] = {}
    for group, members in parts.items():
        # Methods that were measured on the same users are drawn together: draws take longer than their means.
        alike: dict[bytes, list[str]] = {}
        for method in values:
            alike.setdefault((known[method] & members).tobytes(), []).append(method)
        for methods in alike.values():
            counted = known[methods[0]] & members
            if counted.any():
                found = metrics.bootstrap(np.concatenate([values[m][counted] for m in methods], axis=1), **drawing)
                for place, method in enumerate(methods):
                    intervals[method, group] = found[place * len(MEASURES) :][: len(MEASURES)]
    return [
        TableRow(
            method,
            group,
            int((known[method] & members).sum()),
            int((~known[method] & members).sum()),
            dict(zip(MEASURES, intervals.get((method, group), ()), strict=False)),
        )
        for method in values
        for group, members in parts.items()
    ]


def direction_groups(rows: Sequence[Row], catalogue: Catalogue, column: str) -> dict[str, np.ndarray]:
    """Users whose target comes after or before their last item in the order of a catalogue column.

    On Amazon Beauty many reviews of one day are stored in the order of their ASIN, so neighbours have rising ones: a
    method may exploit how the file was written. Figures for both groups show it.

    Args:
        rows: U examples.
        catalogue: Items.
        column: Of the catalogue, compared as text; equal values are in neither group.

    Returns:
        {"rising": bool [U], "falling": bool [U]}.

    Raises:
        ValueError: If the catalogue has no such column.
    """
    if column not in catalogue.columns:
        raise ValueError(f"column must be one of {list(catalogue.columns)}, got {column!r}")
    keys = catalogue.columns[column]
    pairs = [(keys[row.columns["history"][-1]], keys[row.columns["target_row"]]) for row in rows]
    rising = np.array([last < target for last, target in pairs], bool)
    falling = np.array([last > target for last, target in pairs], bool)
    return {"rising": rising, "falling": falling}


def popularity_groups(rows: Sequence[Row], counts: np.ndarray) -> dict[str, np.ndarray]:
    """Users by how often their target was taken in training: what a method knows of rare items, and of common ones.

    Args:
        rows: U examples.
        counts: [I], how many users took each item in training (`baselines.taken_counts`).

    Returns:
        The groups of POPULARITY that have a user, bool [U] each; a user is in one of them.
    """
    taken = np.array([counts[row.columns["target_row"]] for row in rows])
    groups = {
        name: (taken >= least) & (taken <= (np.inf if most is None else most))
        for name, (least, most) in POPULARITY.items()
    }
    return {name: members for name, members in groups.items() if members.any()}


def table_records(rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    """The table as plain values, for JSON."""
    return [
        {
            "method": row.method,
            "group": row.group,
            "users": row.users,
            "missing": row.missing,
            **{name: interval._asdict() for name, interval in row.measures.items()},
        }
        for row in rows
    ]


def format_table(rows: Sequence[TableRow], *, signed: bool = False) -> str:
    """The measures of SHOWN of all users as text; arguments as in `table_cells`."""
    everybody = [row for row in rows if row.group == ALL]
    ((title, cells),) = table_cells(everybody, SHOWN, signed=signed)
    return aligned([[title, *SHOWN], *cells])


def format_groups(rows: Sequence[TableRow], measure: str = "NDCG@10") -> str:
    """One measure of every method on every group of users as text, means alone; "" where there are no groups."""
    groups = {row.group: row.users + row.missing for row in rows if row.group != ALL}
    if not groups:
        return ""
    found = {(row.method, row.group): row.measures.get(measure) for row in rows}
    lines = [[f"{measure} by group", *(f"{group} ({users})" for group, users in groups.items())]]
    for method in dict.fromkeys(row.method for row in rows):
        means = (found[method, group] for group in groups)
        lines.append([method, *("–" if one is None else f"{one.mean:.4f}" for one in means)])
    return aligned(lines)


def table_cells(
    rows: Sequence[TableRow], measures: Sequence[str] = MEASURES, *, signed: bool = False
) -> list[tuple[str, list[list[str]]]]:
    """Each group's heading, and for each of its methods the name and a text for each measure, intervals in brackets.

    Args:
        rows: Of a table.
        measures: Which.
        signed: Differences: with their sign, and a star where the interval is clear of zero.
    """
    groups = []
    for group in dict.fromkeys(row.group for row in rows):
        part = [row for row in rows if row.group == group]
        heading = f"{group}: {max(row.users + row.missing for row in part)} users"
        cells = [[_label(row), *(_cell(row.measures.get(name), signed) for name in measures)] for row in part]
        groups.append((heading, cells))
    return groups


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as text in columns, two spaces between."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


def _label(row: TableRow) -> str:
    return f"{row.method} ({row.missing} without a rank)" if row.missing else row.method


def _cell(interval: Interval | None, signed: bool) -> str:
    if interval is None:
        return "–"
    sign = "+" if signed else ""
    mean, low, high = (format(value, f"{sign}.4f") for value in interval)
    return f"{mean} [{low}, {high}]{'*' if signed and interval.clear_of_zero else ''}"
