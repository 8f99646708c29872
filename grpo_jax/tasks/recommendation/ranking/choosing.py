"""Choosing the weights of a trained policy's prior: `python -m grpo_jax.recommend --run DIR --choose_prior`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.tasks.recommendation.dataset import load_dataset
from grpo_jax.tasks.recommendation.ranking.prior import PriorSection, fused_scores, make_parts
from grpo_jax.tasks.recommendation.ranking.recommending import policy_ranking
from grpo_jax.tasks.recommendation.ranking.weights import HISTORY, TOGETHER, Weighed, grid, weigh

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
