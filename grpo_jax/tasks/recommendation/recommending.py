"""Items from a trained run, and the choice of its prior: `python -m grpo_jax.recommend`."""

from __future__ import annotations

import functools
import itertools
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError, one_line
from grpo_jax.models.policy import Policy
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.encoding import make_encode
from grpo_jax.rollout.texts import listed_trie
from grpo_jax.sampling.ranking import make_ranker
from grpo_jax.tasks.recommendation import metrics
from grpo_jax.tasks.recommendation.baselines import (
    PriorParts,
    item_scores,
    levelled,
    make_parts,
    make_prior,
    taken_counts,
    weighted,
)
from grpo_jax.tasks.recommendation.catalogue import Catalogue, UserSequence, items_of, plain, read_catalogue
from grpo_jax.tasks.recommendation.dataset import Dataset, history_prompt, load_dataset
from grpo_jax.tasks.recommendation.loading import open_retriever, prior_history
from grpo_jax.tasks.recommendation.task import PriorSection


class Recommended(NamedTuple):
    """One item, by its id in the catalogue; scores compare within one answer, higher is better."""

    item: str
    title: str
    score: float


Recommender = Callable[..., list[Recommended]]
"""recommend(history, k=10, *, exclude=(), note=warnings.warn) → the k best items, or as many as there are."""
MakeWriter = Callable[[Sequence[Row]], Callable[[str], str]]
"""Rows whose longest prompt sets the width of all → prompt → what the policy writes greedily."""
BestItems = Callable[[Row, int], list[tuple[int, float]]]
"""A row and how many → the best rows of the catalogue and their scores."""


def make_recommender(
    config: Config, policy: Policy, writer: MakeWriter, *, catalogue: str | None = None
) -> Recommender:
    """Return recommend(history, k, exclude=…, note=…) of a trained policy.

    A policy that ranks the catalogue is asked for its best items, with the run's prior; one that writes queries for a
    query, by which the run's encoder ranks the catalogue. Items of another catalogue's file are ranked at once where
    the policy writes queries or titles; a UserError otherwise. All questions have the width of the run's longest test
    prompt: the first one compiles, a longer history does not compile again.

    The history and `exclude` are titles or ids, the history oldest first. An item that stands several times counts
    once, in its last place, and is not recommended. `note` gets a line on each name outside the catalogue, which is
    skipped, and where no item is left, so that the most popular are the answer.
    """
    task = config.task
    dataset = load_dataset(task, held_out=config.data.held_out, columns=config.data.columns)
    items = dataset.catalogue
    if catalogue is not None:
        if items.names:
            raise UserError(f"catalogue: expected the run's, whose items are the policy's own words; got {catalogue}")
        items = read_catalogue(catalogue, blank_titles=task.blank_titles, columns=config.data.columns)
        dataset = dataset._replace(catalogue=items, known=_carried_over(dataset, items))
    if task.writes == "query":
        best = _by_query(config, items, writer(dataset.prompts.test))
    else:
        best = _by_policy(config, policy, dataset)
    popular = taken_counts(dataset.known, len(items))
    most_popular = [(row, float(popular[row])) for row in np.argsort(-popular, kind="stable").tolist()]
    row_of = _names(items)

    def rows_of(where: str, names: Sequence[str], note: Callable[[str], None]) -> list[int]:
        rows = []
        for name in names:
            try:
                rows.append(row_of(name))
            except UserError as error:
                note(f"{where}: {error}")
        return rows

    def recommend(
        history: Sequence[str],
        k: int = 10,
        *,
        exclude: Sequence[str] = (),
        note: Callable[[str], None] = warnings.warn,
    ) -> list[Recommended]:
        rows = list(dict.fromkeys(reversed(rows_of("history", history, note))))[::-1]
        left_out = {*rows, *rows_of("exclude", exclude, note)}
        if rows:
            names = [items.names[row] for row in rows] if items.names else ()
            prompt = history_prompt(task, [items.titles[row] for row in rows], names)
            ranked = best(Row(0, prompt, {"history": tuple(rows)}), k + len(left_out))
        else:
            note("history: no item of the catalogue is in it; these are the most popular")
            ranked = most_popular
        chosen = [pair for pair in ranked if pair[0] not in left_out][:k]
        return [Recommended(items.ids[row], items.titles[row], score) for row, score in chosen]

    return recommend


def _carried_over(dataset: Dataset, items: Catalogue) -> tuple[UserSequence, ...]:
    """Return the users' sequences of those items that another catalogue has too, by their ids."""
    row_of = {row: items.rows[name] for name, row in dataset.catalogue.rows.items() if name in items.rows}
    return tuple(
        UserSequence(user.user, tuple(row_of[item] for item in user.items if item in row_of)) for user in dataset.known
    )


def _names(catalogue: Catalogue) -> Callable[[str], int]:
    """Return title or id → the first item of that name; a UserError where there is none.

    A letter and its accent may be written as one character or as two; case and marks of titles do not matter.
    """

    def composed(name: str) -> str:
        return unicodedata.normalize("NFC", name)

    def spelled(title: str) -> str:
        return plain(unicodedata.normalize("NFKC", title))

    ids = {composed(name): row for row, name in reversed(list(enumerate(catalogue.ids)))} | catalogue.rows
    titles = {spelled(name): row for row, name in reversed(list(enumerate(catalogue.titles)))}
    titles.pop("", None)

    def row_of(title: str) -> int:
        row = ids.get(title, ids.get(composed(title), titles.get(spelled(title))))
        if row is None:
            raise UserError(f"no item is called {one_line(repr(title), 80)}")
        return row

    return row_of


def policy_ranking(
    config: Config, policy: Policy, catalogue: Catalogue, prompts: Sequence[Row]
) -> Callable[[Sequence[Row]], np.ndarray]:
    """Return rows → the policy's log-probability of each item, f32 [P, I]; the longest prompt sets the width of all."""
    folder = policy.folder
    items = items_of(catalogue.written)
    rank = make_ranker(policy, pad_id=folder.pad_id, trie=listed_trie(config, items.texts, folder))
    size = folder.config.vocab_size
    encode = make_encode(folder.tokenizer, config.data, pad_id=folder.pad_id, vocab_size=size, rows=prompts)

    def scores(rows: Sequence[Row]) -> np.ndarray:
        encoded = encode(rows)
        ranking = rank(policy.variables, encoded.tokens, encoded.mask)
        return item_scores(items.rows[np.asarray(ranking.texts)], np.asarray(ranking.scores), len(catalogue))

    return scores


def _by_policy(config: Config, policy: Policy, dataset: Dataset) -> BestItems:
    section = config.task.prior
    scores_of = policy_ranking(config, policy, dataset.catalogue, dataset.prompts.test)
    prior = make_prior(section, dataset.catalogue.titles, dataset.known) if section.used else None

    def best(row: Row, count: int) -> list[tuple[int, float]]:
        (scores,) = scores_of([row])
        if prior is not None:
            scores = levelled(scores[None])[0] + prior([row.columns["history"]])[0]
        order = np.argsort(-scores, kind="stable")[:count]
        return list(zip(order.tolist(), scores[order].tolist(), strict=True))

    return best


def _by_query(config: Config, catalogue: Catalogue, write: Callable[[str], str]) -> BestItems:
    retrieval = own_package("bridges", "retrieval")
    local = config.task.retrieval.replace(backend="local")  # a question needs no service; equal results
    retriever, _ = open_retriever(local, catalogue.titles, retrieval)

    def best(row: Row, count: int) -> list[tuple[int, float]]:
        histories = [row.columns["history"]]
        history = prior_history(config.task.prior, histories, retrieval)
        return retriever.nearest([write(row.prompt)], count, histories, history)[0]

    return best


HISTORY, TOGETHER, DECAYS = (0.0, 2.0, 5.0, 10.0, 20.0), (0.0, 5.0, 10.0, 20.0, 40.0), (0.5, 0.7, 0.9)
FOLLOWING = (0.0, 2.0, 5.0, 10.0, 20.0, 40.0)
"""Tried beside the best of the others."""
_PRINTED = 10


class Weighed(NamedTuple):
    """A point of the grid, and the mean NDCG@10 and HR@10 that it earns."""

    prior: PriorSection
    ndcg: float
    hit: float


class ChosenPrior(NamedTuple):
    """Lines to print, and a record of each prior that was tried, best first: its weights, "ndcg@10" and "hr@10"."""

    lines: list[str]
    records: list[dict[str, float]]


def grid() -> list[PriorSection]:
    """Return the points that are tried; the policy alone is the first."""
    points = [
        PriorSection(history=history, together=together, decay=decay)
        for history, together, decay in itertools.product(HISTORY, TOGETHER, DECAYS)
    ]
    return [PriorSection(), *(point for point in points if point.used)]


def weigh(scores: np.ndarray, parts: PriorParts, rows: Sequence[Row], points: Sequence[PriorSection]) -> list[Weighed]:
    """Measure each point on U rows (at least one) with the policy's scores f32 [U, I], best first; ties by their order.

    Histories are left out and ties count against the target.
    """
    ranks = np.empty((len(points), len(rows)))
    block = metrics.users_at_once(scores.shape[1])
    for start in range(0, len(rows), block):
        users = slice(start, start + block)
        histories = [row.columns["history"] for row in rows[users]]
        targets = np.array([row.columns["target_row"] for row in rows[users]])
        term = functools.cache(functools.partial(parts.term, histories))
        for place, point in enumerate(points):
            fused = scores[users] + weighted(point, term)
            ranks[place, users] = metrics.rank_of(metrics.count_better(fused, targets, histories))
    ndcg, hit = metrics.ndcg(ranks, k=10).mean(1).tolist(), metrics.hit(ranks, k=10).mean(1).tolist()
    return sorted(map(Weighed, points, ndcg, hit), key=lambda one: -one.ndcg)


def choose_prior(config: Config, policy: Policy, *, users: int | None = None) -> ChosenPrior:
    """Measure every prior of a grid beside the policy's own scores on validation users, best first.

    The `users` validation users, `evaluation.validation_prompts` by default, are in the order of a hash, so that the
    first few are a fair sample.
    """
    task = config.task
    if task.writes == "query":
        raise UserError(
            "task.writes: expected title or item, whose rankings have log-probabilities to add a prior to; got query"
        )
    count = config.evaluation.validation_prompts if users is None else users
    dataset = load_dataset(task, held_out=config.data.held_out, columns=config.data.columns)
    rows, catalogue = dataset.prompts.validation[:count], dataset.catalogue
    if not rows:
        raise UserError(f"--users: expected a number >= 1, and data with validation users, got {count}")
    scores = levelled(policy_ranking(config, policy, catalogue, rows)(rows))
    measured = functools.partial(weigh, scores, make_parts(catalogue.titles, dataset.known), rows)
    earned = measured(list(dict.fromkeys([*grid(), task.prior])))
    near = [earned[0].prior.replace(following=weight) for weight in FOLLOWING]
    tried = {one.prior for one in earned}
    earned = sorted([*earned, *measured([one for one in near if one not in tried])], key=lambda one: -one.ndcg)
    records = [{**vars(one.prior), "ndcg@10": one.ndcg, "hr@10": one.hit} for one in earned]
    return ChosenPrior(_prior_lines(earned, len(rows), task.prior), records)


def _prior_lines(earned: Sequence[Weighed], users: int, configured: PriorSection) -> list[str]:
    names = {configured: "the run's", PriorSection(): "the policy alone"}
    lines = [
        f"{users:,} validation users, {len(earned)} priors; no test user was looked at",
        f"{'NDCG@10':>7}  {'HR@10':>6}  " + "  ".join(vars(PriorSection())),
    ]
    for place, (prior, ndcg, hit) in enumerate(earned):
        if place < _PRINTED or prior in names:
            weights = "  ".join(f"{weight:{len(name)}g}" for name, weight in vars(prior).items())
            lines.append(f"{ndcg:7.4f}  {hit:6.4f}  {weights}  {names.get(prior, '')}".rstrip())
    best = ", ".join(f"{name}: {weight:g}" for name, weight in vars(earned[0].prior).items())
    return [*lines, "for the config, under task:", f"  prior: {{{best}}}"]
