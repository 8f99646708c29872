"""Rewards of a list as a whole: what it exposes, how much its items differ, and whether it keeps a rule.

They are no labels: what a list earns here depends on all of its items together, and no item is the right one. Where the
target stands in a list is its `rank`, so that `ndcg`, `hit` and the others are rewards of lists too. A reward reads the
column `slate`, each completion's items as rows of the catalogue; place k counts d(k) = 1 / log2(1 + k) where places
count. Axes: S lists, K items of a list, I items of the catalogue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from scipy import sparse

from grpo_jax.rollout.rewards import Maker, Reward
from grpo_jax.tasks.recommendation.baselines import title_vectors, weights_by_row
from grpo_jax.tasks.recommendation.catalogue import Catalogue, Items, plain

Slates = Sequence[tuple[int, ...]]
"""S lists of rows of the catalogue, best first."""
SLATE = "slate"
FIRST_WORD = "first_word"


def slate_of(items: Items, text: str) -> tuple[int, ...]:
    """Return the items that a completion lists."""
    return tuple(row for row in map(items.row_of, text.split()) if row >= 0)


def ranks_of(slates: Slates, targets: Sequence[int], *, items: int) -> np.ndarray:
    """Return where each list has its target, f64 [S], from 1; of `items` the last where it has not."""
    pairs = zip(slates, targets, strict=True)
    return np.array([slate.index(target) + 1 if target in slate else items for slate, target in pairs], np.float64)


def exposure(slates: Slates, wanted: np.ndarray) -> np.ndarray:
    """Return the share of each list's exposure that falls on `wanted` items, bool [I]: Σ d(k) wanted_k / Σ d(k)."""
    discounts = [1.0 / np.log2(2.0 + np.arange(len(slate))) for slate in slates]
    shares = np.concatenate([part / part.sum() for part in discounts])
    return weights_by_row(slates, shares, len(wanted)) @ np.asarray(wanted, np.float64)


def diversity(slates: Slates, vectors: sparse.csr_array) -> np.ndarray:
    """Return 1 less the mean cosine of each list's pairs of items; `vectors` [I, …] are unit rows, or rows of 0.

    The mean over pairs comes from the sum of the list's vectors: Σ_{i≠j} vᵢ·vⱼ = |Σ v|² - Σ |v|².
    """
    members = _members(slates, vectors.shape[0])
    counts = np.asarray(members.sum(1), np.float64).ravel()
    sums = members @ vectors
    alike = sums.multiply(sums).sum(1) - members @ vectors.multiply(vectors).sum(1)
    return 1.0 - alike / np.maximum(counts * (counts - 1), 1)


def within(slates: Slates, groups: sparse.csr_array, most: int) -> np.ndarray:
    """Return the share of each list's items that a rule lets stand: at most so many of each group [I, groups]."""
    members = _members(slates, groups.shape[0])
    taken = (members @ groups).toarray()
    counts = np.asarray(members.sum(1), np.float64).ravel()
    return 1.0 - np.maximum(taken - most, 0).sum(1) / np.maximum(counts, 1)


def _members(slates: Slates, items: int) -> sparse.csr_array:
    return weights_by_row(slates, np.ones(sum(map(len, slates))), items)


def values_of(catalogue: Catalogue, name: str) -> tuple[str, ...]:
    """Return a column of the catalogue; `FIRST_WORD` is a title's, which stands for a brand that no column has."""
    if name == FIRST_WORD:
        return tuple(plain(title).partition(" ")[0] for title in catalogue.titles)
    if name not in catalogue.columns:
        raise ValueError(f"expected one of {', '.join((*catalogue.columns, FIRST_WORD))}, got {name!r}")
    return catalogue.columns[name]


def groups_of(catalogue: Catalogue, name: str) -> sparse.csr_array:
    """Return which value of a column each item has, [I, values]; a blank one is a group of none."""
    values, places = np.unique(values_of(catalogue, name), return_inverse=True)
    rows = [[int(place)] if values[place] else [] for place in places]
    return weights_by_row(rows, np.ones(sum(map(len, rows))), len(values))


def tail_items(counts: np.ndarray, head: float) -> np.ndarray:
    """Return the long tail, bool [I]: all but the share `head` of the items that most users took."""
    tail = np.ones(len(counts), bool)
    tail[np.argsort(-counts, kind="stable")[: round(head * len(counts))]] = False
    return tail


def slate_rewards(catalogue: Catalogue, counts: np.ndarray) -> dict[str, Reward | Maker]:
    """Return the rewards of lists by name; `counts` [I] says how many users took each item in training.

    "tail": exposure of the long tail, all but the share `head` of the items, those that most users took. "new":
    exposure of items that at most `most` users took, by default nobody. "diversity": 1 less the mean resemblance of two
    items, of their titles or by a column (1 where they share its value). "rule": share of items that stand within at
    most `most` of each value of a `column`.
    """

    def tail(head: float = 0.2) -> Reward:
        if not 0 < head < 1:
            raise ValueError(f"head must be a share in (0, 1), got {head!r}")
        return _of_slates(functools.partial(exposure, wanted=tail_items(counts, head)))

    def new(most: int = 0) -> Reward:
        return _of_slates(functools.partial(exposure, wanted=np.asarray(counts) <= most))

    def variety(by: str = "title") -> Reward:
        vectors = title_vectors(catalogue.titles) if by == "title" else groups_of(catalogue, by)
        return _of_slates(functools.partial(diversity, vectors=vectors))

    def rule(column: str, most: int = 2) -> Reward:
        if most < 1:
            raise ValueError(f"most must be a number >= 1, got {most!r}")
        return _of_slates(functools.partial(within, groups=groups_of(catalogue, column), most=most))

    return {"tail": Maker(tail), "new": Maker(new), "diversity": Maker(variety), "rule": Maker(rule)}


def _of_slates(measure: Callable[[Slates], np.ndarray]) -> Reward:
    def reward(slate: Slates, **_: object) -> list[float | None]:
        return [float(value) for value in measure(slate)]

    return reward
