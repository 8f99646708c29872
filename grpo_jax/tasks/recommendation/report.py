"""Tables of a recommendation run: the policy before and after training, and the baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.core.pass_at_k import Interval, mean_interval
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.tasks.recommendation.baselines import Ask, Gain, Prior, count_baselines, gain, rank_all, title_baselines
from grpo_jax.tasks.recommendation.dataset import Dataset
from grpo_jax.tasks.task import Findings, Table

CUTOFFS = (5, 10, 20, 50, 100)
MEASURES = (*(f"{name}@{k}" for name in ("HR", "NDCG", "MRR") for k in CUTOFFS), "MRR")
SHOWN = ("HR@5", "HR@10", "NDCG@5", "NDCG@10", "MRR")
"""Measures shown on a terminal."""
PRIOR = "prior alone"


class TableRow(NamedTuple):
    """A method, or a difference of two: mean and interval of each measure over the users."""

    method: str
    users: int
    measures: dict[str, Interval]


def measure_users(rank: np.ndarray) -> np.ndarray:
    """Return every measure of MEASURES for every user, f64 [U, 16]."""
    kinds: tuple[Gain, ...] = ("hit", "ndcg", "mrr")
    return np.stack([*(gain(kind, rank, k=k) for kind in kinds for k in CUTOFFS), gain("mrr", rank)], axis=1)


def make_table(ranks: Mapping[str, np.ndarray]) -> list[TableRow]:
    """Measure every method's ranks f64 [U]."""
    return _rows({method: measure_users(rank) for method, rank in ranks.items()})


def paired_table(ranks: Mapping[str, np.ndarray], pairs: Sequence[tuple[str, str]]) -> list[TableRow]:
    """Measure the paired differences of two methods over users.

    A user who is hard for both methods does not widen the interval. It may thus exclude zero although the intervals of
    the two methods overlap. A pair is (method, subtracted method), and its row is called "method − other".
    """
    values = {name: measure_users(ranks[name]) for pair in pairs for name in pair}
    return _rows({f"{method} − {other}": values[method] - values[other] for method, other in pairs})


def _rows(values: Mapping[str, np.ndarray]) -> list[TableRow]:
    """Return a row for each method's values f64 [U, 16]."""
    return [
        TableRow(method, len(measured), dict(zip(MEASURES, map(mean_interval, measured.T), strict=True)))
        for method, measured in values.items()
    ]


def table_records(rows: Sequence[TableRow]) -> list[dict[str, object]]:
    """Return the table as plain values, for JSON."""
    return [
        {"method": row.method, "users": row.users, **{name: one._asdict() for name, one in row.measures.items()}}
        for row in rows
    ]


def format_table(rows: Sequence[TableRow], *, signed: bool = False) -> str:
    """Return the measures of SHOWN as text; differences are `signed`, with a star if the interval excludes zero."""
    title = f"{rows[0].users} users"
    return "\n".join(Table(title, (title, *SHOWN), _cells(rows, SHOWN, signed)).lines())


def _cells(rows: Sequence[TableRow], measures: Sequence[str], signed: bool) -> list[list[str]]:
    """Return each method's name and measures as text, intervals in brackets."""
    return [[row.method, *(_cell(row.measures[name], signed) for name in measures)] for row in rows]


def _cell(interval: Interval, signed: bool) -> str:
    star = "*" if signed and (interval.low > 0 or interval.high < 0) else ""
    mean, low, high = (format(value, "+.4f" if signed else ".4f") for value in interval)
    return f"{mean} [{low}, {high}]{star}"


def policy_ranks(name: str, rollouts: Mapping[str, Rollout], *, fused: bool = False) -> dict[str, list[float]]:
    """Return the ranks of a policy's greedy completions or rankings, and of its sampled ones, by the table's names.

    The last eval reward is the rank; with `fused` the one before it is the rank with the prior.
    """
    kinds = {"greedy": name, "sampled": f"{name}, sampled"}
    eval_rewards = {kind: one.final_eval_rewards[:, 0] for kind, one in rollouts.items()}
    ranks = {kinds[kind]: values[:, -1].tolist() for kind, values in eval_rewards.items() if kind in kinds}
    if fused and "greedy" in eval_rewards:
        ranks[f"{name} + prior"] = eval_rewards["greedy"][:, -2].tolist()
    return ranks


def findings(
    dataset: Dataset,
    rows: Sequence[Row],
    policies: Mapping[str, list[float]],
    *,
    ask: Ask,
    mixed: Ask | None = None,
    prior: Prior | None = None,
) -> Findings:
    """Return the evaluated rows' ranks by every baseline and policy, as tables, lines and records.

    `policies` has the results of `policy_ranks` by name; `ask` and `mixed` are those of `title_baselines`.
    """
    histories = [row.columns["history"] for row in rows]
    scores = count_baselines(dataset.known, len(dataset.catalogue), rows)
    if prior is not None:
        scores[PRIOR] = lambda start, stop: prior(histories[start:stop])
    ranks = {name: rank_all(score, rows, items=len(dataset.catalogue)) for name, score in scores.items()}
    ranks |= title_baselines(ask, rows, mixed=mixed)
    ranks |= {f"policy, {name}": np.asarray(one, np.float64) for name, one in policies.items()}
    table, paired = make_table(ranks), paired_table(ranks, _compared(list(ranks)))
    texts = [format_table(table)]
    if paired:
        texts.append(f"Paired differences (* the 95 % interval excludes zero)\n{format_table(paired, signed=True)}")
    records = {"table": table_records(table), "differences": table_records(paired)}
    lines = [line for text in texts for line in ("", *text.split("\n"))]
    return Findings(_report_tables(table, paired), lines, records)


def _compared(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of methods to compare: the effect of training, and the policy's beside the prior."""
    trained = [(name, name.replace("policy, after", "policy, before", 1)) for name in names if "policy, after" in name]
    fused = [(name, PRIOR) for name in names if name.endswith(" + prior")]
    return [pair for pair in (*trained, *fused) if pair[1] in names]


def _report_tables(table: Sequence[TableRow], paired: Sequence[TableRow]) -> list[Table]:
    """Return the table of all methods, and paired differences if there are any."""
    columns = ("method", *MEASURES)
    note = (
        "Full ranking of the catalogue, without each user's history; mean and 95 % interval over users. The oracle's "
        "query is the target's own title."
    )
    paired_note = (
        "Differences per user, with the 95 % interval; * if it excludes zero. After − before is the gain by GRPO; "
        "+ prior − prior alone is the gain by the policy."
    )
    tables = [Table(f"Ranking, {table[0].users} users", columns, _cells(table, MEASURES, signed=False), note)]
    differences = Table("Paired differences", columns, _cells(paired, MEASURES, signed=True), paired_note)
    return tables + [differences] * bool(paired)
