"""Items from a trained run: `python -m grpo_jax.recommend`."""

from __future__ import annotations

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
from grpo_jax.tasks.recommendation.baselines import (
    item_scores,
    levelled,
    make_prior,
    taken_counts,
)
from grpo_jax.tasks.recommendation.catalogue import Catalogue, items_of, plain
from grpo_jax.tasks.recommendation.dataset import Dataset, history_prompt, load_dataset


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


def make_recommender(config: Config, policy: Policy, writer: MakeWriter) -> Recommender:
    """Return recommend(history, k, exclude=…, note=…) of a trained policy.

    A policy that ranks the catalogue is asked for its best items, with the run's prior; one that writes queries for a
    query, by which the run's encoder ranks the catalogue. All questions have the width of the run's longest test
    prompt: the first one compiles, a longer history does not compile again.

    The history and `exclude` are titles or ids, the history oldest first. An item that stands several times counts
    once, in its last place, and is not recommended. `note` gets a line on each name outside the catalogue, which is
    skipped, and where no item is left, so that the most popular are the answer.
    """
    task = config.task
    dataset = load_dataset(task, config.data.columns)
    items = dataset.catalogue
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
    backend = retrieval.local_backend(catalogue.titles, config.task.retrieval)  # a question needs no service
    prior = config.task.prior

    def best(row: Row, count: int) -> list[tuple[int, float]]:
        histories = [row.columns["history"]]
        history = retrieval.History(histories, prior.history, prior.decay) if prior.history else None
        return backend.nearest([write(row.prompt)], count, histories, history)[0]

    return best
