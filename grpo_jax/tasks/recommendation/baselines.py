"""Ranks of targets in the whole catalogue: their measures, baselines and the prior, all without a network.

A rank counts from 1 and excludes the user's history, but never the target. Items that tie with the target rank before
it, so a query that cannot distinguish items earns nothing.

Count baselines (popularity, item-kNN, Markov) are `Scores`; `rank_all` converts them to ranks by block, without a
[U, I] array. Their statistics use only the training histories (`dataset.Split.known`). Title baselines use the
policy's own retriever.

The prior is added to the policy's log-probability of an item:

    score(item) = log p(item) + a · cos(history, title) + b · Σ_{i in history} decay^age(i) · together(i, item)
                + c · Σ_{i in history} decay^age(i) · P(item right after i)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from scipy import sparse

from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation.catalogue import UserSequence
from grpo_jax.tasks.recommendation.sections import PriorSection

Measure = Callable[[np.ndarray], np.ndarray]

Gain = Literal["ndcg", "mrr", "hit"]
_MOST_SCORES, _MOST_USERS = 2**23, 512
DECAY = 0.7
"""Weight of each older item in the decayed baselines."""
Scores = Callable[[int, int], np.ndarray]
"""score(start, stop) → the scores of all items for examples start … stop-1, [B, I]."""
Ask = Callable[[Sequence[str], Sequence[int], Sequence[Sequence[int]]], Any]
"""B texts, target rows and histories (rows, oldest first), which are left out → `bridges.retrieval.ranking.Ranks`: the
targets' ranks and probabilities."""
Prior = Callable[[Sequence[Sequence[int]]], np.ndarray]
"""Histories (rows of the catalogue, oldest first) → f32 [P, I], added to the log-probabilities."""
LISTED = 100
"""Items below this place of a policy's ranking score like the item there: the prior alone orders them."""


def target_ranks(
    scores: np.ndarray, targets: np.ndarray, exclude: Sequence[Sequence[int]], *, tolerance: float = 0.0
) -> np.ndarray:
    """Return the rank f64 [B], from 1, of each row's target among its scores [B, I]; ties rank before it.

    A score may be -inf, but not NaN. `targets` [B] and `exclude` are rows of the catalogue; the target is never
    excluded. Scores that differ by at most `tolerance` are ties, so that rounding does not decide ranks.
    """
    scores = np.asarray(scores)
    worse = scores < scores[np.arange(len(scores)), targets][:, None] - tolerance
    # Subtract excluded items afterwards, which is less work than masking all others.
    left_out = [list(set(rows) - {int(target)}) for rows, target in zip(exclude, targets, strict=True)]
    below = [line.sum() - line[rows].sum() for line, rows in zip(worse, left_out, strict=True)]
    return np.array([scores.shape[1] - len(rows) for rows in left_out], np.float64) - below


def gain(name: Gain, rank: np.ndarray, *, k: int | None = None, items: int = 0) -> np.ndarray:
    """Return a measure of ranks, which count from 1; ranks beyond `k` earn 0.

    "ndcg" is the normalised discounted cumulative gain with one relevant item, 1 / log2(1 + rank) (Järvelin &
    Kekäläinen 2002). "mrr" is the reciprocal rank, "hit" the hit rate. Without a cut-off `k` every ranking is a hit;
    "hit" is then the share of cut-offs from 1 to `items` that find the target, (items - rank + 1) / items.
    """
    rank = np.asarray(rank, np.float64)
    if name == "hit":
        values = (items - rank + 1.0) / items if k is None else np.ones_like(rank)
    else:
        values = 1.0 / (np.log2(1.0 + rank) if name == "ndcg" else rank)
    return values if k is None else np.where(rank > k, 0.0, values)


def rank_all(score: Scores, rows: Sequence[Row], *, items: int) -> np.ndarray:
    """Return the rank f64 [U] of each target.

    Rows, U ≥ 1, have the columns "target_row" and "history". Scores that differ by at most 1e-6 are ties.
    """
    parts = []
    block = max(1, min(_MOST_USERS, _MOST_SCORES // items))  # memory does not grow with the catalogue
    for start in range(0, len(rows), block):
        columns = [row.columns for row in rows[start : start + block]]
        targets = np.array([column["target_row"] for column in columns])
        histories = [column["history"] for column in columns]
        parts.append(target_ranks(score(start, start + len(columns)), targets, histories, tolerance=1e-6))
    return np.concatenate(parts)


def popularity(users: Sequence[UserSequence], items: int) -> Scores:
    """Score every item by its number of users in training."""
    counts = taken_counts(users, items)
    return lambda start, stop: np.broadcast_to(counts, (stop - start, items))


def taken_counts(users: Sequence[UserSequence], items: int) -> np.ndarray:
    """Count the users who took each item in training, f64 [I]."""
    return np.asarray(_taken(users, items).sum(0), np.float64).ravel()


def item_knn(similarity: sparse.csr_array, rows: Sequence[Row], *, decay: float = 1.0) -> Scores:
    """Score items by their summed similarity to the history (Sarwar et al. 2001; Deshpande & Karypis 2004).

    s(u, j) = Σ_{i in history} decay^age(i) · |U_i ∩ U_j| / √(|U_i| |U_j|) for j ≠ i. U_i are the users of item i in
    training, and the newest item has age 0: `decay` 1 counts the whole history equally, 0 only the last item.
    """
    items = similarity.shape[0]
    weights = decayed([row.columns["history"] for row in rows], items, decay=decay)
    return lambda start, stop: (weights[start:stop] @ similarity).toarray()


def item_similarity(users: Sequence[UserSequence], items: int) -> sparse.csr_array:
    """Return |U_i ∩ U_j| / √(|U_i| |U_j|) of the items' users in training, 0 on the diagonal: f64 [I, I]."""
    taken = _taken(users, items)
    norms = np.sqrt(np.asarray(taken.sum(0), np.float64).ravel())
    scale = np.divide(1.0, norms, out=np.zeros(items), where=norms > 0)
    similarity = sparse.csr_array(taken.T @ taken)
    rows = np.repeat(np.arange(items), np.diff(similarity.indptr))
    similarity.data *= scale[rows] * scale[similarity.indices] * (rows != similarity.indices)
    return similarity


def markov(users: Sequence[UserSequence], items: int, rows: Sequence[Row]) -> Scores:
    """Score items by how often they directly followed the last item in training, then by popularity."""
    steps = step_counts(users, items)
    counts = taken_counts(users, items)
    # Below 1, so that popularity decides only between equal step counts.
    fallback = counts / (2.0 * max(counts.max(), 1.0))
    last = np.array([row.columns["history"][-1] for row in rows])
    return lambda start, stop: fallback + steps[last[start:stop]].toarray()


def step_counts(users: Sequence[UserSequence], items: int) -> sparse.csr_array:
    """Count how often each item directly followed each other one in training, f64 [I before, I after]."""
    pairs = [pair for user in users for pair in itertools.pairwise(user.items)]
    before, after = np.array(pairs, np.int64).reshape(-1, 2).T
    return sparse.csr_array((np.ones(len(pairs)), (before, after)), shape=(items, items))


def decayed(histories: Sequence[Sequence[int]], items: int, *, decay: float) -> sparse.csr_array:
    """Return weights decay^age of each history's items, [U, I]; decay 0 keeps only the last item."""
    ages = np.concatenate([np.arange(len(history))[::-1] for history in histories])
    return weights_by_row(histories, np.power(float(decay), ages), items)


def weights_by_row(columns: Sequence[Sequence[int]], values: np.ndarray, items: int) -> sparse.csr_array:
    """Return a matrix f64 [rows, items] from each row's columns and the concatenated values."""
    starts = np.cumsum([0, *(len(entry) for entry in columns)], dtype=np.int32)
    indices = np.fromiter(itertools.chain.from_iterable(columns), np.int32, starts[-1])
    return sparse.csr_array((values, indices, starts), shape=(len(columns), items))


def _taken(users: Sequence[UserSequence], items: int) -> sparse.csr_array:
    """Return 1 if a user took an item in training, [U, I]."""
    taken = [sorted(set(user.items)) for user in users]
    return weights_by_row(taken, np.ones(sum(map(len, taken))), items)


def count_baselines(users: Sequence[UserSequence], items: int, rows: Sequence[Row]) -> dict[str, Scores]:
    """Return popularity, item-kNN and Markov by their names in a report."""
    return {
        "popularity": popularity(users, items),
        f"item-kNN, decay {DECAY:g}": item_knn(item_similarity(users, items), rows, decay=DECAY),
        "Markov-1 + popularity": markov(users, items, rows),
    }


def title_baselines(ask: Ask, rows: Sequence[Row], *, mixed: Ask | None = None) -> dict[str, np.ndarray]:
    """Return the ranks f64 [U] for titles as queries: the last title, and the target's own, the retriever's ceiling.

    `mixed` ranks queries like the policy's. With it, the target's own title is ranked so, and the empty text and the
    last title become further baselines.
    """
    names = ("history", "target_row", "last_title", "target_title")
    histories, targets, last, own_items = ([row.columns[name] for row in rows] for name in names)
    answers = {"last title": ask(last, targets, histories)}
    if mixed is not None:
        answers["prior alone"] = mixed([""] * len(rows), targets, histories)
        answers["last title + prior"] = mixed(last, targets, histories)
    answers["oracle: own title"] = (mixed or ask)(own_items, targets, histories)
    return {name: np.asarray(answer.rank, np.float64) for name, answer in answers.items()}


def make_prior(section: PriorSection, titles: Sequence[str], users: Sequence[UserSequence]) -> Prior:
    """Return the function that scores the catalogue, I titles, for some histories; `users` are the training histories.

    A history's vector is the sum of its titles' TF-IDF vectors, with a second idf factor per word and less weight for
    older titles. `together` is the cosine of item-kNN. P(item right after i) is the share of i's successors in
    training.
    """
    items = len(titles)
    vectors, similarity, steps = title_vectors(titles), item_similarity(users, items), step_counts(users, items)
    successors = sparse.csr_array(sparse.diags_array(1.0 / np.maximum(steps.sum(1), 1.0)) @ steps)

    def prior(histories: Sequence[Sequence[int]]) -> np.ndarray:
        ages = decayed(histories, items, decay=section.decay)
        total = np.zeros((len(histories), items), np.float32)
        if section.history:
            query = ages @ vectors
            length = np.sqrt(np.asarray(query.multiply(query).sum(1))).reshape(-1, 1)
            cosine = (query @ vectors.T).toarray() / np.maximum(length, 1e-9)
            total += np.float32(section.history) * np.asarray(cosine, np.float32)
        for weight, table in ((section.together, similarity), (section.following, successors)):
            if weight:
                total += np.float32(weight) * np.asarray((ages @ table).toarray(), np.float32)
        return total

    return prior


def title_vectors(titles: Sequence[str]) -> sparse.csr_array:
    """Return TF-IDF vectors of the titles with a second idf factor, f32 [I, words], with unit rows.

    A title without a word (letters or digits) is a row of 0.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    # Words may have one character, as in the retriever's encoder.
    vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    try:
        counted: sparse.csr_array = vectorizer.fit_transform(titles)  # pyright: ignore[reportAssignmentType]
    except ValueError:  # no title has a word
        return sparse.csr_array(np.zeros((len(titles), 1), np.float32))
    weighted = normalize(counted @ sparse.diags_array(vectorizer.idf_))
    return sparse.csr_array(weighted, dtype=np.float32)  # pyright: ignore[reportArgumentType, reportCallIssue, reportReturnType]


def item_scores(ranked: np.ndarray, scores: np.ndarray, items: int) -> np.ndarray:
    """Return each item's log-probability f32 [P, I] from rankings, rows int [P, K] and scores [P, K], best first.

    An item with the title of an earlier item is not ranked and gets the lowest score of the ranking.
    """
    by_item = np.repeat(scores[:, -1:], items, axis=1)
    np.put_along_axis(by_item, ranked, scores, axis=1)
    return by_item


def floor_scores(scores: np.ndarray) -> np.ndarray:
    """Raise log-probabilities f32 [P, I] to that of the item at rank LISTED, before a prior is added.

    A prior can then raise items that the policy finds unlikely.
    """
    place = min(LISTED, scores.shape[1])
    return np.maximum(scores, np.partition(scores, -place, axis=1)[:, -place, None])
