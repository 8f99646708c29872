"""The table of a recommendation run: the policy before and after, beside what needs no policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.rollout.rollout import Judgement
from grpo_jax.tasks.display import Findings, Table
from grpo_jax.tasks.recommendation.metrics import RECOMMENDED, coverage, gini, rank_of, users_at_once
from grpo_jax.tasks.recommendation.ranking.items import FUSED_FIRST, LISTED_FIRST
from grpo_jax.tasks.recommendation.table import (
    MEASURES,
    TableRow,
    aligned,
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
    from grpo_jax.tasks.recommendation.baselines import Scores
    from grpo_jax.tasks.recommendation.dataset import Dataset
    from grpo_jax.tasks.recommendation.ranking.prior import Known
    from grpo_jax.tasks.recommendation.retrieval import Ask
    from grpo_jax.tasks.recommendation.task import Recommendation


PRIOR = "prior alone"
_SPREAD = ("method", f"coverage@{RECOMMENDED}", f"Gini@{RECOMMENDED}")


class Measured(NamedTuple):
    """Methods by name, as they were measured on the same users.

    Attributes:
        ranks: The target's rank f64 [U] for each, NaN where there is none.
        recommended: How often each item is among the first ten of a ranking, i64 [I]; of the methods that list items.
    """

    ranks: dict[str, np.ndarray]
    recommended: dict[str, np.ndarray]


def policy_ranks(name: str, judgements: Mapping[str, Judgement], *, fused: bool = False) -> dict[str, dict[str, Any]]:
    """What the findings need of a policy's greedy texts or rankings, and of its sampled texts.

    Args:
        name: What the table calls this policy.
        judgements: Of one text per row, by kind; their last watched measure is the rank.
        fused: Whether the measure before it is the rank with the prior.

    Returns:
        By name {"rank": the target's for each row, NaN where there is none}; where rankings list items also
        "recommended", those that are among somebody's first, and "times", how often each of them is.
    """
    kinds = {"greedy": name, "sampled": f"{name}, sampled"}
    found = {kinds[kind]: _remembered(one, -1, LISTED_FIRST) for kind, one in judgements.items() if kind in kinds}
    if fused and "greedy" in judgements:
        found[f"{name} + prior"] = _remembered(judgements["greedy"], -2, FUSED_FIRST)
    return found


def _remembered(judgement: Judgement, measure: int, column: str) -> dict[str, Any]:
    ranks = judgement.watched[:, 0, measure].tolist()
    if column not in judgement.columns:
        return {"rank": ranks}
    items, times = np.unique([item for first in judgement.columns[column] for item in first], return_counts=True)
    return {"rank": ranks, "recommended": items.astype(int).tolist(), "times": times.tolist()}


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
        policies: By name what `policy_ranks` gave.
        known: The prior, a baseline too; None without one.
        ask: As the policy's texts are ranked; None for the retriever's own way.
    """
    ranks, recommended = measure_methods(task, dataset, retriever, rows, policies, known, ask)
    groups = user_groups(task, dataset, rows)
    table, paired = make_table(ranks, groups), paired_table(ranks, compared(list(ranks)))
    texts = [format_table(table), format_groups(table)]
    if paired:
        texts.append(f"Paired differences (* the 95 % interval is clear of zero)\n{format_table(paired, signed=True)}")
    spread = spread_records(recommended)
    texts.append(aligned([list(_SPREAD), *([name, *(f"{value:.4f}" for value in values)] for name, *values in spread)]))
    lines = [line for text in texts if text for line in ("", *text.split("\n"))]
    records = {
        "table": table_records(table),
        "differences": table_records(paired),
        "recommended": [dict(zip(_SPREAD, row, strict=True)) for row in spread],
    }
    tables = [*report_tables(table, task.exclude_history), *paired_tables(paired), _spread_table(spread)]
    return Findings(tables, lines, records)


def user_groups(task: Recommendation, dataset: Dataset, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Parts of the users that are told apart: by the order of a column, and by how common their target is."""
    from grpo_jax.tasks.recommendation.baselines import taken_counts

    column, counts = task.order_column, taken_counts(dataset.known, len(dataset.catalogue))
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


def measure_methods(
    task: Recommendation,
    dataset: Dataset,
    retriever: Any,
    rows: Sequence[Row],
    policies: Mapping[str, Any],
    known: Known | None = None,
    ask: Ask | None = None,
) -> Measured:
    """Every baseline and the given policies, full ranking, ties as retrieval.ties says; arguments as in `findings`."""
    # SciPy is needed for nothing else of a run.
    from grpo_jax.tasks.recommendation.baselines import (
        SPARSE_BLOCK,
        count_baselines,
        rank_and_recommend,
        title_baselines,
    )
    from grpo_jax.tasks.recommendation.ranking.prior import fusion_baseline

    items, ranks, recommended = len(dataset.catalogue), {}, {}
    histories = [row.columns["history"] for row in rows]

    def measure(scores: Mapping[str, Scores], block: int) -> None:
        for name, score in scores.items():
            counts, recommended[name] = rank_and_recommend(score, rows, block=block)
            ranks[name] = rank_of(counts, rule=task.retrieval.ties)

    def of_histories(prior: Known) -> Scores:
        return lambda start, stop: prior(histories[start:stop])

    # One after the other: each holds how alike the items are, of many items the most of a run's memory.
    measure(count_baselines(dataset.known, items, rows, decay=task.decay), SPARSE_BLOCK)
    fusion = fusion_baseline(dataset.catalogue.titles, dataset.known, decay=task.decay)
    measure({"titles + item-kNN": of_histories(fusion)}, users_at_once(items))
    if known is not None:
        measure({PRIOR: of_histories(known)}, users_at_once(items))
    asked = ask if task.writes == "query" and task.prior.used else None
    ranks |= title_baselines(retriever, dataset.catalogue, rows, decay=task.decay, ask=asked)
    for name, found in policies.items():
        ranks[f"policy, {name}"] = np.asarray(found["rank"], np.float64)
        if "recommended" in found:
            recommended[f"policy, {name}"] = np.zeros(items, np.int64)
            recommended[f"policy, {name}"][found["recommended"]] = found["times"]
    return Measured(ranks, recommended)


def spread_records(recommended: Mapping[str, np.ndarray]) -> list[tuple[str, float, float]]:
    """Of each method the share of items that it recommends to somebody, and how unequally it does."""
    return [(name, coverage(counts), gini(counts)) for name, counts in recommended.items()]


def _spread_table(rows: Sequence[Sequence[Any]]) -> Table:
    note = (
        f"The first {RECOMMENDED} items of each user's ranking: the share of the catalogue that is recommended to "
        "somebody, and the Gini coefficient of how often each item is (0: all alike, 1: always the same ones). Of "
        "methods that rank the items themselves; a text's ranking is the retriever's."
    )
    return Table("What is recommended", _SPREAD, rows, note)


def report_tables(rows: Sequence[TableRow], excluded: bool) -> list[Table]:
    """The table for report.html, one for each group of users; the note says whether histories are left out."""
    left_out = "each user's history left out" if excluded else "items of the user's history among the others"
    note = (
        f"Full ranking of the catalogue, {left_out}; mean and 95 % interval of a bootstrap over users. The "
        "oracle asks with the target's own title, as the policy does with what it writes. Targets are told apart by "
        "how many users took them in training."
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
