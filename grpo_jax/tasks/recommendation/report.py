"""The table of a recommendation run: the policy before and after, beside what needs no policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.rollout.rollout import Judgement
from grpo_jax.tasks.display import Findings, Table
from grpo_jax.tasks.recommendation.metrics import rank_of
from grpo_jax.tasks.recommendation.table import (
    MEASURES,
    TableRow,
    direction_groups,
    format_groups,
    format_table,
    make_table,
    paired_table,
    popularity_groups,
    table_cells,
    table_records,
)

if TYPE_CHECKING:
    from grpo_jax.tasks.recommendation.dataset import Dataset
    from grpo_jax.tasks.recommendation.ranking.prior import Known
    from grpo_jax.tasks.recommendation.task import Recommendation


PRIOR = "prior alone"


def policy_ranks(name: str, judgements: Mapping[str, Judgement], *, fused: bool = False) -> dict[str, list[float]]:
    """The target's rank for each row, NaN where there is none: of greedy texts or rankings, and of sampled texts.

    Args:
        name: What the table calls this policy.
        judgements: Of one text per row, by kind; their last watched measure is the rank.
        fused: Whether the measure before it is the rank with the prior.
    """
    kinds = {"greedy": name, "sampled": f"{name}, sampled"}
    ranks = {kinds[kind]: found.watched[:, 0, -1].tolist() for kind, found in judgements.items() if kind in kinds}
    if fused and "greedy" in judgements:
        ranks[f"{name} + prior"] = judgements["greedy"].watched[:, 0, -2].tolist()
    return ranks


def findings(
    task: Recommendation,
    dataset: Dataset,
    retriever: Any,
    rows: Sequence[Row],
    policies: Mapping[str, Any],
    known: Known | None = None,
) -> Findings:
    """The results as tables, lines and records.

    Args:
        task: Its ties, decay and order column.
        dataset: Of the run.
        retriever: As the policy's completions are ranked.
        rows: U rows that were measured.
        policies: Ranks [U] by name.
        known: The prior, a baseline too; None without one.
    """
    ranks = all_ranks(task, dataset, retriever, rows, policies, known)
    groups = user_groups(task, dataset, rows)
    table, paired = make_table(ranks, groups), paired_table(ranks, compared(list(ranks)))
    texts = [format_table(table), format_groups(table)]
    if paired:
        texts.append(f"Paired differences (* the 95 % interval is clear of zero)\n{format_table(paired, signed=True)}")
    lines = [line for text in texts if text for line in ("", *text.split("\n"))]
    records = {"table": table_records(table), "differences": table_records(paired)}
    return Findings([*report_tables(table), *paired_tables(paired)], lines, records)


def user_groups(task: Recommendation, dataset: Dataset, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Parts of the users that are told apart: by the order of a column, and by how common their target is."""
    from grpo_jax.tasks.recommendation.baselines import taken_counts

    column, counts = task.order_column, taken_counts(dataset.users, len(dataset.catalogue))
    ordered = direction_groups(rows, dataset.catalogue, column) if column else {}
    return ordered | popularity_groups(rows, counts)


def compared(names: Sequence[str]) -> list[tuple[str, str]]:
    """Which methods are told apart user by user.

    A policy after training and before it, in each way of ranking that was measured: what reinforcement brought. And a
    policy with the prior and the prior alone: what the policy adds to it.
    """
    trained = [(name, name.replace("policy, after", "policy, before", 1)) for name in names if "policy, after" in name]
    fused = [(name, PRIOR) for name in names if name.endswith(" + prior")]
    return [pair for pair in (*trained, *fused) if pair[1] in names]


def all_ranks(
    task: Recommendation,
    dataset: Dataset,
    retriever: Any,
    rows: Sequence[Row],
    policies: Mapping[str, Any],
    known: Known | None = None,
) -> dict[str, np.ndarray]:
    """The ranks f64 [U] of every baseline and the given policies, full ranking, ties as retrieval.ties says."""
    # SciPy is needed for nothing else of a run.
    from grpo_jax.tasks.recommendation.baselines import count_baselines, rank_all, title_baselines

    catalogue = dataset.catalogue
    ranks = count_baselines(dataset.users, len(catalogue), rows, decay=task.decay, rule=task.retrieval.ties)
    ranks |= title_baselines(retriever, catalogue, rows, decay=task.decay)
    if known is not None:
        histories = [row.columns["history"] for row in rows]
        ranks[PRIOR] = rank_of(rank_all(lambda start, stop: known(histories[start:stop]), rows))
    return ranks | {f"policy, {name}": np.asarray(values, np.float64) for name, values in policies.items()}


def report_tables(rows: Sequence[TableRow]) -> list[Table]:
    """The table for report.html, one for each group of users."""
    note = (
        "Full ranking of the catalogue, the history left out; mean and 95 % interval of a bootstrap over users. The "
        "oracle asks with the target's own title: no text can do better. Targets are told apart by how many users took "
        "them in training."
    )
    return [
        Table(f"Ranking, {title}", ("method", *MEASURES), cells, note if place == 0 else "")
        for place, (title, cells) in enumerate(table_cells(rows))
    ]


def paired_tables(rows: Sequence[TableRow]) -> list[Table]:
    """Paired differences for report.html; none without any."""
    note = (
        "User by user, with the 95 % interval of a bootstrap over users who have both ranks; * where it is clear of "
        "zero. After − before is what reinforcement brought; + prior − prior alone is what the policy adds."
    )
    return [
        Table("Paired differences", ("method", *MEASURES), cells, note) for _, cells in table_cells(rows, signed=True)
    ]
