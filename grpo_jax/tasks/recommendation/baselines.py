"""What a policy is compared with: simple rankings of the whole catalogue, exact and without a network.

A baseline is a function ``score(start, stop) -> [B, I]`` of the examples start … stop-1; `rank_all` turns it into
ranks by block, so that no [U, I] array is ever held. Statistics of users are taken from training alone: neither the
validation nor the test item is known to them (the history that is asked with holds the validation item).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from grpo_jax.tasks.prompts import Row
from grpo_jax.tasks.recommendation.metrics import RankCounts, TieRule, count_better, rank_of
from grpo_jax.tasks.recommendation.sequences import UserSequence

Scores = Callable[[int, int], np.ndarray]

HELD_OUT = 2
"""Items at the end of a sequence that training does not know: the validation and the test target."""


def rank_all(score: Scores, rows: Sequence[Row], *, block: int = 512, tolerance: float = 1e-6) -> RankCounts:
    """Counts for each example the items before its target and level with it, its history left out.

    Args:
        score: The baseline.
        rows: U examples with the columns "target_row" and "history".
        block: Examples scored at once.
        tolerance: Scores that differ by no more are ties.
    """
    parts = []
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        targets = np.array([row.columns["target_row"] for row in part])
        scores = score(start, start + len(part))
        parts.append(count_better(scores, targets, [row.columns["history"] for row in part], tolerance=tolerance))
    return RankCounts(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def popularity(users: Sequence[UserSequence], items: int) -> Scores:
    """Every item by how many users took it in training."""
    counts = np.asarray(_taken(users, items).sum(0), np.float64).ravel()
    return lambda start, stop: np.broadcast_to(counts, (stop - start, items))


def item_knn(users: Sequence[UserSequence], items: int, rows: Sequence[Row], *, decay: float = 1.0) -> Scores:
    """Items by their summed similarity to the history (Sarwar et al. 2001; Deshpande & Karypis 2004).

    s(u, j) = Σ_{i in history} decay^age(i) · |U_i ∩ U_j| / √(|U_i| |U_j|) for j ≠ i, where U_i are the users of item i
    in training and the newest item has age 0.

    Args:
        users: Sequences the similarities come from.
        items: I.
        rows: The examples that are scored.
        decay: In [0, 1]; 1 counts the whole history alike, 0 the last item alone.
    """
    taken = _taken(users, items)
    norms = np.sqrt(np.asarray(taken.sum(0), np.float64).ravel())
    scale = sparse.diags_array(np.divide(1.0, norms, out=np.zeros(items), where=norms > 0))
    similarity = sparse.csr_array(scale @ (taken.T @ taken) @ scale)
    similarity.setdiag(0.0)
    weights = history_weights(rows, items, decay=decay)
    return lambda start, stop: (weights[start:stop] @ similarity).toarray()


def markov(users: Sequence[UserSequence], items: int, rows: Sequence[Row]) -> Scores:
    """Items by how often they came right after the last one in training, popularity where that says nothing."""
    pairs = [pair for user in users for pair in _steps(user.items[:-HELD_OUT])]
    before, after = np.array(pairs, np.int64).reshape(-1, 2).T
    steps = sparse.csr_array((np.ones(len(pairs)), (before, after)), shape=(items, items))
    counts = np.asarray(_taken(users, items).sum(0), np.float64).ravel()
    # Below 1, so that it decides only where counts of steps are equal.
    fallback = counts / (2.0 * max(counts.max(), 1.0))
    last = np.array([row.columns["history"][-1] for row in rows])
    return lambda start, stop: steps[last[start:stop]].toarray() + fallback


def titles(vectors: Any, queries: Any) -> Scores:
    """Items by the inner product of their vector with a query's: what a retriever does with a title as the text.

    Args:
        vectors: [I, D] of the catalogue's titles, unit length; an array or a SciPy sparse matrix.
        queries: [U, I] weights of catalogue titles that make each query, as `history_weights` and `own_title` give
            them. (The vector of a weighted bag of titles; its length does not change a ranking.)
    """
    if sparse.issparse(vectors):
        items = sparse.csr_array(vectors)
        back = sparse.csr_array(items.T)
        return lambda start, stop: (queries[start:stop] @ items @ back).toarray()
    array = np.asarray(vectors)
    return lambda start, stop: (queries[start:stop] @ array) @ array.T


def history_weights(rows: Sequence[Row], items: int, *, decay: float) -> sparse.csr_array:
    """Weights decay^age of each example's history, [U, I]; decay 0 is the last item alone.

    Raises:
        ValueError: If decay is outside [0, 1].
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    histories = [row.columns["history"] for row in rows]
    ages = np.concatenate([np.arange(len(history))[::-1] for history in histories])
    return _weights(histories, np.power(float(decay), ages), items)


def own_title(rows: Sequence[Row], items: int) -> sparse.csr_array:
    """Weight 1 on each example's target, [U, I]: the ceiling of a retriever."""
    return _weights([(row.columns["target_row"],) for row in rows], np.ones(len(rows)), items)


def _weights(columns: Sequence[Sequence[int]], values: np.ndarray, items: int) -> sparse.csr_array:
    starts = np.concatenate([[0], np.cumsum([len(entry) for entry in columns])])
    indices = np.fromiter((item for entry in columns for item in entry), np.int64, starts[-1])
    return sparse.csr_array((values, indices, starts), shape=(len(columns), items))


def _taken(users: Sequence[UserSequence], items: int) -> sparse.csr_array:
    """1 where a user took an item in training, [U, I]."""
    known = [sorted(set(user.items[:-HELD_OUT])) for user in users]
    return _weights(known, np.ones(sum(map(len, known))), items)


def _steps(items: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(items))


def standard_baselines(
    users: Sequence[UserSequence], rows: Sequence[Row], vectors: Any, *, decay: float = 0.7, rule: TieRule = "against"
) -> dict[str, np.ndarray]:
    """The ranks f64 [U] of every baseline a report names, ceiling last.

    Args:
        users: All sequences.
        rows: U examples that are measured.
        vectors: [I, D] of the catalogue's titles from the retriever's encoder, unit length.
        decay: Of the decayed ones.
        rule: For ties.
    """
    items = vectors.shape[0]
    scores = {
        "popularity": popularity(users, items),
        "item-kNN": item_knn(users, items, rows),
        f"item-kNN, decay {decay:g}": item_knn(users, items, rows, decay=decay),
        "Markov-1 + popularity": markov(users, items, rows),
        "last title": titles(vectors, history_weights(rows, items, decay=0.0)),
        f"history titles, decay {decay:g}": titles(vectors, history_weights(rows, items, decay=decay)),
        "oracle: own title": titles(vectors, own_title(rows, items)),
    }
    return {name: rank_of(rank_all(score, rows), rule=rule) for name, score in scores.items()}
