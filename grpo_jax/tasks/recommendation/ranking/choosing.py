"""Choosing the weights of a trained policy's prior: `python -m grpo_jax.recommend --run DIR --choose_prior`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation import metrics
from grpo_jax.tasks.recommendation.dataset import load_dataset
from grpo_jax.tasks.recommendation.ranking.prior import Parts, PriorSection, fused_scores, make_parts
from grpo_jax.tasks.recommendation.ranking.recommending import policy_ranking

HISTORY, TOGETHER, DECAYS = (0.0, 2.0, 5.0, 10.0, 20.0), (0.0, 5.0, 10.0, 20.0, 40.0), (0.5, 0.7, 0.9)


class Weighed(NamedTuple):
    """A point of the grid, and the mean NDCG@10 and HR@10 that it earns."""

    prior: PriorSection
    ndcg: float
    hit: float


def grid() -> list[PriorSection]:
    """The points that are tried; the policy alone is the first."""
    every = itertools.product(HISTORY, TOGETHER, DECAYS)
    points = [PriorSection(history=history, together=together, decay=decay) for history, together, decay in every]
    return [PriorSection(), *(point for point in points if point.used)]


def weigh(
    score: Callable[[int, int], np.ndarray],
    parts: Parts,
    rows: Sequence[Row],
    points: Sequence[PriorSection],
    *,
    items: int,
) -> list[Weighed]:
    """What each point earns on the same rows, best first; of equal ones the earlier.

    Histories are left out and ties count against the target, as in `items.ranking_columns`. What a decay costs is
    computed once for all its points.

    Args:
        score: score(start, stop) → f32 [B, I], the policy's own scores of all items for the rows start … stop-1.
        parts: Of `prior.make_parts`.
        rows: U examples with the columns "target_row" and "history".
        points: Weights to try.
        items: I.

    Raises:
        ValueError: If there are no rows.
    """
    if not rows:
        raise ValueError("rows must be at least one")
    ranks, block = np.empty((len(points), len(rows))), metrics.users_at_once(items)
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        histories = [row.columns["history"] for row in part]
        targets = np.array([row.columns["target_row"] for row in part])
        own = score(start, start + len(part))
        for decay in dict.fromkeys(point.decay for point in points):
            resembling, together = (made() for made in parts(histories, decay))
            for place, point in enumerate(points):
                if point.decay == decay:
                    known = np.float32(point.history) * resembling + np.float32(point.together) * together
                    found = metrics.count_better(own + known, targets, histories)
                    ranks[place, start : start + len(part)] = metrics.rank_of(found)
    earned = [Weighed(point, *_means(rank)) for point, rank in zip(points, ranks, strict=True)]
    return sorted(earned, key=lambda one: -one.ndcg)


def _means(rank: np.ndarray) -> tuple[float, float]:
    return float(metrics.ndcg(rank, k=10).mean()), float(metrics.hit(rank, k=10).mean())


# ------------------------------------------------------------------------------------------------------------- choosing


_SHOWN = 10


class ChosenPrior(NamedTuple):
    """What came of it.

    Attributes:
        lines: To print: the best priors, the run's own and none at all; and what to write into a config.
        records: For each prior that was tried, best first: its weights, "ndcg@10" and "hr@10".
    """

    lines: list[str]
    records: list[dict[str, float]]


def choose_prior(config: Any, policy: Any, *, users: int | None = None) -> ChosenPrior:
    """What every prior of a grid earns beside the policy's own scores on validation users, best first.

    Args:
        config: Of the run.
        policy: `functions`, `variables` and `loaded` (tokenizer, special ids, config), as it was trained.
        users: How many validation users; None for `evaluation.validation_prompts`. They are in the order of a hash, so
            that the first few are a fair sample.

    Raises:
        UserError: The policy writes queries, there is no validation user, or data are bad.
    """
    if config.task.writes == "query":
        raise UserError(
            "task.writes: expected title, item or ids, since what a query finds has no log-probability; got query"
        )
    wanted = config.evaluation.validation_prompts if users is None else users
    dataset = load_dataset(config.task, held_out=config.data.held_out, columns=config.data.columns)
    rows, catalogue = dataset.prompts.validation[:wanted], dataset.catalogue
    if not rows:
        raise UserError(f"--users: expected a number >= 1, and data with validation users, got {wanted}")
    listed, scores = policy_ranking(config, policy, catalogue, rows)(rows)

    def own(start: int, stop: int) -> np.ndarray:
        nothing = np.zeros((stop - start, len(catalogue)), np.float32)
        return fused_scores(listed[start:stop], scores[start:stop], nothing)

    configured = config.task.prior
    points = grid() + [configured] * (configured.used and configured not in grid())
    earned = weigh(own, make_parts(catalogue.titles, dataset.known), rows, points, items=len(catalogue))
    records = [{**vars(one.prior), "ndcg@10": one.ndcg, "hr@10": one.hit} for one in earned]
    return ChosenPrior(_lines(earned, len(rows), configured), records)


def _lines(earned: Sequence[Weighed], users: int, configured: PriorSection) -> list[str]:
    names = {configured: "the run's", PriorSection(): "the policy alone"}
    lines = [
        f"{one.ndcg:7.4f}  {one.hit:6.4f}  {one.prior.history:7g}  {one.prior.together:8g}  {one.prior.decay:5g}  "
        f"{names.get(one.prior, '')}".rstrip()
        for place, one in enumerate(earned)
        if place < _SHOWN or one.prior in names
    ]
    best = earned[0].prior
    most = {"history": max(HISTORY), "together": max(TOGETHER)}
    edge = [
        f"{name} {limit:g} is the most that was tried" for name, limit in most.items() if getattr(best, name) >= limit
    ]
    return [
        f"{users:,} validation users, {len(earned)} priors; no test user was looked at",
        f"{'NDCG@10':>7}  {'HR@10':>6}  {'history':>7}  {'together':>8}  {'decay':>5}",
        *lines,
        "for the config, under task:",
        f"  prior: {{history: {best.history:g}, together: {best.together:g}, decay: {best.decay:g}}}",
        *edge,
    ]
