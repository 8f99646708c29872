"""The table of a recommendation run: the policy before and after, beside what needs no policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from grpo_jax.reports.page import Table
from grpo_jax.tasks.recommendation.parts import RANK
from grpo_jax.tasks.recommendation.table import MEASURES, TableRow, make_table, table_cells

if TYPE_CHECKING:
    from grpo_jax.evaluate import Evaluation
    from grpo_jax.runs.parts import Parts


def policy_ranks(name: str, evaluations: Mapping[str, Evaluation]) -> dict[str, np.ndarray]:
    """The target's rank for each row, f32 [U], NaN where there is none: of greedy texts, and sampled ones if measured.

    Args:
        name: What the table calls this policy.
        evaluations: Of one text per row, by kind.
    """
    kinds = {"greedy": name, "sampled": f"{name}, sampled"}
    return {kinds[kind]: found.judgement.watched[:, 0, -1] for kind, found in evaluations.items() if kind in kinds}


def results_table(parts: Parts, policies: Mapping[str, Sequence[float]]) -> list[TableRow]:
    """Every baseline and the given policies on the run's test rows, full ranking, ties as retrieval.ties says.

    Args:
        parts: A recommendation run's.
        policies: Ranks f [U] of the test rows by name.
    """
    # SciPy is needed for nothing else of a run.
    from grpo_jax.tasks.recommendation.baselines import count_baselines, title_baselines
    from grpo_jax.tasks.recommendation.table import direction_groups

    assert parts.environment.watch_names[-1] == RANK
    dataset, section, rows = parts.task.dataset, parts.config.recommendation, parts.test_rows
    ties = parts.config.retrieval.ties
    ranks = count_baselines(dataset.users, len(dataset.catalogue), rows, decay=section.decay, rule=ties)
    ranks |= title_baselines(parts.task.retriever, dataset.catalogue, rows, decay=section.decay)
    ranks |= {f"policy, {name}": np.asarray(values, np.float64) for name, values in policies.items()}
    groups = direction_groups(rows, dataset.catalogue, section.order_column) if section.order_column else None
    return make_table(ranks, groups)


def report_tables(rows: Sequence[TableRow]) -> list[Table]:
    """The table for report.html, one for each group of users."""
    note = (
        "Full ranking of the catalogue, the history left out; mean and 95 % interval of a bootstrap over users. The "
        "oracle asks with the target's own title: no text can do better."
    )
    return [
        Table(f"Ranking, {title}", ("method", *MEASURES), cells, note if place == 0 else "")
        for place, (title, cells) in enumerate(table_cells(rows))
    ]
