"""Asking a trained run for items: a history of titles in, the best items out, each with why."""

from __future__ import annotations

import dataclasses
import difflib
import heapq
import itertools
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config.named import own_package
from grpo_jax.errors import UserError, one_line
from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation import metrics
from grpo_jax.tasks.recommendation.baselines import Parts, fused_scores, make_parts, make_prior
from grpo_jax.tasks.recommendation.catalogue import Catalogue, UserSequence, items_of, plain, read_catalogue
from grpo_jax.tasks.recommendation.dataset import Dataset, HistoryTemplate, load_dataset
from grpo_jax.tasks.recommendation.loading import open_retriever, prior_history
from grpo_jax.tasks.recommendation.task import PriorSection


class Recommended(NamedTuple):
    """One item.

    Attributes:
        item: Its id in the catalogue.
        title: As there.
        score: Higher is better; of one answer's items alone.
        words: Words that its title shares with those of the history, rarest first.
        together: Titles of the history that the same users took, those of most of them first.
    """

    item: str
    title: str
    score: float
    words: tuple[str, ...]
    together: tuple[str, ...]


Recommender = Callable[[Sequence[str], int], list[Recommended]]
MakeWriter = Callable[[Sequence[Row]], Callable[[str], str]]
"""Rows whose longest prompt sets the width of all → prompt → what the policy writes greedily."""


def make_recommender(config: Any, policy: Any, writer: MakeWriter, *, catalogue: str | None = None) -> Recommender:
    """recommend(titles of a history, oldest first, k) → the k best items, or as many as a ranking lists.

    An item that stands several times in a history counts once, in its last place. All questions have the width of the
    run's longest test prompt, so that the first one compiles and a longer history does not compile again.

    Items of the history are among them only where the run's own rankings have them (`task.exclude_history`).

    A policy that ranks the catalogue itself is asked for its best items, with the run's prior; one that writes queries
    for a query, by which the run's encoder ranks the catalogue.

    Args:
        config: Of the run.
        policy: `functions`, `variables` and `loaded` (tokenizer, special ids, config), as it was trained.
        writer: Makes what asks a policy that writes queries.
        catalogue: Another catalogue's file; its items are ranked at once where the policy writes queries or titles.

    Raises:
        UserError: Data are bad, or the policy cannot name the items of another catalogue.
    """
    task, data = config.task, config.data
    dataset = load_dataset(task, held_out=data.held_out, columns=data.columns)
    items = dataset.catalogue
    if catalogue is not None:
        if items.names:
            raise UserError(f"catalogue: expected the run's, whose items are the policy's own words; got {catalogue}")
        items = read_catalogue(catalogue, blank_titles=task.blank_titles, columns=data.columns)
        dataset = dataset._replace(catalogue=items, known=_carried_over(dataset, items))
    template = HistoryTemplate(task.template, task.history_items, task.title_characters, task.separator)
    if task.writes == "query":
        best = _by_query(config, items, writer(dataset.prompts.test))
    else:
        best = _by_policy(config, policy, items, dataset)
    explain, row_of = _explanations(items, dataset.known), _names(items)

    def recommend(history: Sequence[str], k: int = 10) -> list[Recommended]:
        rows = list(dict.fromkeys(row_of(title) for title in reversed(history)))[::-1]
        if not rows:
            raise UserError("history: expected at least one title, got none")
        names = [items.names[place] for place in rows] if items.names else ()
        row = Row(0, template.prompt([items.titles[place] for place in rows], names), {"history": tuple(rows)})
        left_out = set(rows) if task.exclude_history else set()
        found = [(place, score) for place, score in best(row, k + len(left_out)) if place not in left_out][:k]
        return [
            Recommended(items.ids[place], items.titles[place], score, *explain(place, rows)) for place, score in found
        ]

    return recommend


def _carried_over(dataset: Dataset, items: Catalogue) -> tuple[UserSequence, ...]:
    """The users' sequences of those items that another catalogue has too, by their ids."""
    row_of = {row: items.rows[name] for name, row in dataset.catalogue.rows.items() if name in items.rows}
    kept = (tuple(row_of[item] for item in user.items if item in row_of) for user in dataset.known)
    return tuple(UserSequence(user.user, rows) for user, rows in zip(dataset.known, kept, strict=True))


def _names(catalogue: Catalogue) -> Callable[[str], int]:
    """title or id → the item of that name, the first of several.

    It raises UserError where there is none, with the nearest.
    """
    ids = {_composed(name): place for place, name in reversed(list(enumerate(catalogue.ids)))} | catalogue.rows
    known = {_spelled(name): place for place, name in reversed(list(enumerate(catalogue.titles)))}
    known.pop("", None)

    def row_of(title: str) -> int:
        name, spelled = _composed(title), _spelled(title)
        if title in ids or name in ids:
            return ids[title] if title in ids else ids[name]
        if spelled in known:
            return known[spelled]
        near = difflib.get_close_matches(spelled, _alike(spelled, known), n=1, cutoff=0.3)
        hint = f"; the nearest is {one_line(repr(catalogue.titles[known[near[0]]]), 80)}" if near else ""
        raise UserError(f"history: no item is called {one_line(repr(title), 80)}{hint}")

    return row_of


def _alike(title: str, known: Iterable[str]) -> list[str]:
    """The few titles that share the most pairs of letters with one; comparing it with all would take seconds."""
    pairs = set(itertools.pairwise(title))

    def shared(name: str) -> float:
        return len(pairs.intersection(itertools.pairwise(name))) / (len(title) + len(name))

    return heapq.nlargest(_COMPARED, known, key=shared)


_COMPARED = 50


def _composed(name: str) -> str:
    """An id in one form: a letter and its accent may be written as one character or as two."""
    return unicodedata.normalize("NFC", name)


def _spelled(title: str) -> str:
    """A title without what does not tell titles apart: case, marks, and forms of one character."""
    return plain(unicodedata.normalize("NFKC", title))


def policy_ranking(
    config: Any, policy: Any, catalogue: Catalogue, prompts: Sequence[Row]
) -> Callable[[Sequence[Row]], tuple[np.ndarray, np.ndarray]]:
    """rows → int [P, K], the rows of the catalogue that the policy lists, best first, and f32 [P, K], their scores.

    Args:
        config: Of the run.
        policy: As of `make_recommender`.
        catalogue: What is listed.
        prompts: Rows whose longest prompt sets the width of all.
    """
    from grpo_jax.core.trie import text_count
    from grpo_jax.rollout.encoding import make_encode
    from grpo_jax.rollout.texts import policy_choices
    from grpo_jax.sampling.ranking import make_ranker

    task, loaded = config.task, policy.folder
    items = items_of(catalogue.names or catalogue.titles)
    trie = policy_choices(config, items.texts, loaded)
    assert trie is not None
    rank = make_ranker(policy, min(task.listed, text_count(trie)), pad_id=loaded.pad_id, trie=trie)
    size = loaded.config.vocab_size
    encode = make_encode(loaded.tokenizer, config.data, pad_id=loaded.pad_id, vocab_size=size, rows=prompts)

    def ranked(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        asked = encode(rows)
        found = rank(policy.variables, asked.tokens, asked.mask)
        return items.rows[np.asarray(found.texts)], np.asarray(found.scores)

    return ranked


def _by_policy(config: Any, policy: Any, catalogue: Catalogue, dataset: Any) -> Callable[[Row, int], list[Any]]:
    task, ranked = config.task, policy_ranking(config, policy, catalogue, dataset.prompts.test)
    known = make_prior(task.prior, catalogue.titles, dataset.known) if task.prior.used else None

    def best(row: Row, count: int) -> list[Any]:
        numbers, scores = ranked([row])
        if known is not None:
            fused = fused_scores(numbers, scores, known([row.columns["history"]]))
            numbers = np.argsort(-fused, axis=1, kind="stable")
            scores = np.take_along_axis(fused, numbers, axis=1)
        return list(zip(numbers[0, :count].tolist(), scores[0, :count].tolist(), strict=True))

    return best


def _by_query(config: Any, catalogue: Catalogue, write: Callable[[str], str]) -> Callable[[Row, int], list[Any]]:
    section, prior = config.task.retrieval, config.task.prior
    retrieval = own_package("bridges", "retrieval")
    local = dataclasses.replace(section, backend="local")  # a question needs no service; equal results
    retriever, _ = open_retriever(local, catalogue.titles, retrieval)

    def best(row: Row, count: int) -> list[Any]:
        taken = [row.columns["history"]]
        return retriever.nearest([write(row.prompt)], count, taken, prior_history(prior, taken, retrieval))[0]

    return best


def _explanations(catalogue: Catalogue, users: Sequence[Any]) -> Callable[[int, Sequence[int]], tuple[Any, Any]]:
    """(item, history) → the words its title shares with the history's, and the titles of the history taken with it."""
    from collections import Counter

    from grpo_jax.tasks.recommendation.baselines import item_similarity

    counts = Counter(word for title in catalogue.titles for word in set(plain(title).split()))
    together = item_similarity(users, len(catalogue)).tocsr() if users else None

    def explain(place: int, history: Sequence[int]) -> tuple[Any, Any]:
        said = {word for item in history for word in plain(catalogue.titles[item]).split()}
        shared = sorted(said & set(plain(catalogue.titles[place]).split()), key=lambda word: (counts[word], word))
        if together is None:
            return tuple(shared), ()
        near = {item: float(together[place, item]) for item in dict.fromkeys(history)}
        taken = sorted((item for item, value in near.items() if value > 0), key=lambda item: -near[item])
        return tuple(shared), tuple(catalogue.titles[item] for item in taken)

    return explain


# --- choosing


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
