"""Scores that differ from one ranking of the catalogue in few places, counted and listed without the other places.

A baseline that counts knows some hundreds of items beside a history and says of all others what it says to everybody:
nothing, or how popular they are. Ranks and lists are those of the whole arrays, to the bit; what they cost grows with
what is known, not with the catalogue. Axes: B users, I items, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

from grpo_jax.tasks.recommendation.metrics import RankCounts


class Base(NamedTuple):
    """What everybody is told of the items.

    Attributes:
        scores: f64 [I].
        rising: f64 [I], the same in order.
        best: i64 [I], items by their scores in float32, highest first; of equal ones the first of the catalogue.
    """

    scores: np.ndarray
    rising: np.ndarray
    best: np.ndarray


def make_base(scores: np.ndarray) -> Base:
    """The base of these scores.

    Raises:
        ValueError: If one is NaN.
    """
    if np.isnan(scores).any():
        raise ValueError("scores must not be NaN")
    return Base(scores, np.sort(scores), np.argsort(-scores.astype(np.float32), kind="stable"))


class SparseScores(NamedTuple):
    """Scores of all items for some users: those of a base, and what is added to them.

    Attributes:
        base: Of all users.
        more: Sparse f64 [B, I].
    """

    base: Base
    more: sparse.csr_array

    @property
    def shape(self) -> tuple[int, int]:
        """(B, I)."""
        return self.more.shape

    def count_better(
        self, targets: np.ndarray, exclude: Sequence[Sequence[int]], *, tolerance: float = 0.0
    ) -> RankCounts:
        """As `metrics.count_better` of the whole array."""
        users, items = self.shape
        scores, rising, _ = self.base
        lines, columns, values = _entries(self)
        keys = lines * items + columns

        def at(users: np.ndarray, columns: np.ndarray) -> np.ndarray:
            wanted, found = users * items + columns, scores[columns]
            places = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
            known = keys[places] == wanted if len(keys) else np.zeros(len(wanted), bool)
            found[known] = values[places[known]]
            return found

        own = at(np.arange(users), np.asarray(targets, np.int64))
        left_out = [set(rows) - {int(target)} for rows, target in zip(exclude, targets, strict=True)]
        away = np.repeat(np.arange(users), [len(rows) for rows in left_out])
        away_scores = at(away, np.fromiter((row for rows in left_out for row in rows), np.int64, len(away)))

        def counted(of_base: np.ndarray, compare: np.ufunc, edge: np.ndarray) -> np.ndarray:
            changed = compare(values, edge[lines]).astype(np.int64) - compare(scores[columns], edge[lines])
            gone = np.bincount(away, compare(away_scores, edge[away]), users)
            return of_base + np.bincount(lines, changed, users).astype(np.int64) - gone.astype(np.int64)

        high, low = own + tolerance, own - tolerance
        better = counted(items - np.searchsorted(rising, high, side="right"), np.greater, high)
        worse = counted(np.searchsorted(rising, low, side="left"), np.less, low)
        others = items - 1 - np.bincount(away, minlength=users)
        return RankCounts(better, others - better - worse)

    def first_items(self, exclude: Sequence[Sequence[int]], *, k: int) -> list[np.ndarray]:
        """As `metrics.first_items` of the whole array."""
        _, columns, values = _entries(self)
        # Items that are known of, or left out, are none that the base lists; one array serves all users.
        apart, found = np.zeros(self.shape[1], bool), []
        ends = self.more.indptr
        for line, rows in enumerate(exclude):
            here = columns[ends[line] : ends[line + 1]]
            away = np.asarray(list(rows), np.int64)
            apart[here] = apart[away] = True
            further = _first(self.base.best, apart, k)
            apart[here] = False
            apart[away] = True
            stays = ~apart[here]
            apart[away] = False
            items = np.concatenate([here[stays], further])
            scores = np.concatenate([values[ends[line] : ends[line + 1]][stays], self.base.scores[further]])
            found.append(_best(items, scores.astype(np.float32), k))
        return found


def _entries(scores: SparseScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The users, items and scores of the entries, i64 [E], i64 [E] and f64 [E], in order."""
    more = scores.more
    more.sort_indices()
    if np.isnan(more.data).any():
        raise ValueError("scores must not be NaN")
    lines = np.repeat(np.arange(more.shape[0]), np.diff(more.indptr))
    columns = more.indices.astype(np.int64)
    return lines, columns, more.data + scores.base.scores[columns]


def _first(order: np.ndarray, apart: np.ndarray, k: int) -> np.ndarray:
    """The first k items of an order that are not apart."""
    size = 4 * k
    while True:
        kept = order[:size][~apart[order[:size]]]
        if len(kept) >= k or size >= len(order):
            return kept[:k]
        size *= 4


def _best(items: np.ndarray, scores: np.ndarray, k: int) -> np.ndarray:
    """The k items with the highest scores, in the order of the catalogue; of equal ones its first."""
    listed = scores > -np.inf
    items, scores = items[listed], scores[listed]
    if len(items) > k:
        near = scores >= np.partition(scores, -k)[-k]
        items, scores = items[near], scores[near]
    return np.sort(items[np.lexsort((items, -scores))[:k]])
