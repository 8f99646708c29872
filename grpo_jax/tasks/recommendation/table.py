"""The table of results: every method by every measure with its interval, for all users and for parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation import metrics
from grpo_jax.tasks.recommendation.catalogue import Catalogue
from grpo_jax.tasks.recommendation.metrics import Interval

MEASURES = ("HR@5", "HR@10", "NDCG@5", "NDCG@10", "MRR")
ALL = "all"


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
    """Every measure of MEASURES for every user, f64 [U, 5]; NaN where the rank is."""
    columns = [metrics.hit(rank, k=5), metrics.hit(rank, k=10), metrics.ndcg(rank, k=5), metrics.ndcg(rank, k=10)]
    return np.stack([*columns, metrics.mrr(rank)], axis=1)


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
    lengths = {name: len(values) for name, values in {**ranks, **(groups or {})}.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"ranks and groups must be of the same users, got lengths {lengths}")
    rows = []
    for method, rank in ranks.items():
        rank = np.asarray(rank, np.float64)
        values, known = measure_users(rank), ~np.isnan(rank)
        for group, members in {ALL: np.ones(len(rank), bool), **(groups or {})}.items():
            counted = known & members
            intervals: list[Interval] = []
            if counted.any():
                intervals = metrics.bootstrap(values[counted], level=level, samples=samples, seed=seed)
            missing = int((members & ~known).sum())
            named: dict[str, Interval] = dict(zip(MEASURES, intervals, strict=False))
            rows.append(TableRow(method, group, int(counted.sum()), missing, named))
    return rows


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


def format_table(rows: Sequence[TableRow]) -> str:
    """The table as text, a block for each group; intervals in brackets."""
    blocks = []
    for title, cells in table_cells(rows):
        lines = [[title, *MEASURES], *cells]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        blocks.append("\n".join(_aligned(line, widths) for line in lines))
    return "\n\n".join(blocks)


def table_cells(rows: Sequence[TableRow]) -> list[tuple[str, list[list[str]]]]:
    """Each group's heading, and for each of its methods the name and a text for each measure."""
    groups = []
    for group in dict.fromkeys(row.group for row in rows):
        part = [row for row in rows if row.group == group]
        heading = f"{group}: {max(row.users + row.missing for row in part)} users"
        groups.append((heading, [[_label(row), *(_cell(row.measures.get(name)) for name in MEASURES)] for row in part]))
    return groups


def _label(row: TableRow) -> str:
    return f"{row.method} ({row.missing} without a rank)" if row.missing else row.method


def _cell(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    return f"{interval.mean:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (text.ljust(width) for text, width in zip(line, widths, strict=True))
    return "  ".join([first, *rest]).rstrip()
