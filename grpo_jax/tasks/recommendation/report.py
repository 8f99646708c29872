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
    format_table,
    make_table,
    table_cells,
    table_records,
)

if TYPE_CHECKING:
    from grpo_jax.tasks.recommendation.dataset import Dataset
    from grpo_jax.tasks.recommendation.ranking.prior import Known
    from grpo_jax.tasks.recommendation.retrieval import Ask
    from grpo_jax.tasks.recommendation.task import Recommendation


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
    ask: Ask | None = None,
) -> Findings:
    """The results as tables, lines and records.

    Args:
        task: Its ties, decay and order column.
        dataset: Of the run.
        retriever: As the policy's completions are ranked.
        rows: U rows that were measured.
        policies: Ranks [U] by name.
        known: The prior, a baseline too; None without one.
        ask: As the policy's texts are ranked; None for the retriever's own way.
    """
    table = results_table(task, dataset, retriever, rows, policies, known, ask)
    return Findings(report_tables(table), ("", *format_table(table).split("\n")), table_records(table))


def results_table(
    task: Recommendation,
    dataset: Dataset,
    retriever: Any,
    rows: Sequence[Row],
    policies: Mapping[str, Any],
    known: Known | None = None,
    ask: Ask | None = None,
) -> list[TableRow]:
    """Every baseline and the given policies on the rows, full ranking, ties as retrieval.ties says."""
    # SciPy is needed for nothing else of a run.
    from grpo_jax.tasks.recommendation.baselines import count_baselines, rank_all, title_baselines
    from grpo_jax.tasks.recommendation.table import direction_groups

    catalogue = dataset.catalogue
    ranks = count_baselines(dataset.users, len(catalogue), rows, decay=task.decay, rule=task.retrieval.ties)
    asked = ask if task.writes == "query" and task.prior.used else None
    ranks |= title_baselines(retriever, catalogue, rows, decay=task.decay, ask=asked)
    if known is not None:
        histories = [row.columns["history"] for row in rows]
        ranks["prior alone"] = rank_of(rank_all(lambda start, stop: known(histories[start:stop]), rows))
    ranks |= {f"policy, {name}": np.asarray(values, np.float64) for name, values in policies.items()}
    groups = direction_groups(rows, catalogue, task.order_column) if task.order_column else None
    return make_table(ranks, groups)


def report_tables(rows: Sequence[TableRow]) -> list[Table]:
    """The table for report.html, one for each group of users."""
    note = (
        "Full ranking of the catalogue, the history left out; mean and 95 % interval of a bootstrap over users. The "
        "oracle asks with the target's own title, as the policy does with what it writes."
    )
    return [
        Table(f"Ranking, {title}", ("method", *MEASURES), cells, note if place == 0 else "")
        for place, (title, cells) in enumerate(table_cells(rows))
    ]
