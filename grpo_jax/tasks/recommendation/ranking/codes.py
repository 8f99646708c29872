"""Codes of items by residual quantisation of their vectors: items that resemble each other share their first codes.

The first code is the cluster (k-means) of an item's vector, the second the cluster of what the centre of the first
leaves of it, and so on; one more tells items apart whose codes are the same. After TIGER (Rajput et al. 2023,
https://arxiv.org/abs/2305.05065), with k-means in place of the codebooks of an autoencoder.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import NamedTuple

import numpy as np


class Codes(NamedTuple):
    """What items are called, and how well that describes them.

    Attributes:
        codes: int32 [I, L + 1], no two rows alike; the last is how many earlier items have the same L codes.
        sizes: Codes in use of each of the L + 1 levels.
        shared: Share of the items whose L codes another item has too.
        left: Of each of the L levels, Σ‖what is left of a vector‖² / Σ‖vector‖² behind it.
    """

    codes: np.ndarray
    sizes: tuple[int, ...]
    shared: float
    left: tuple[float, ...]


def residual_codes(vectors: np.ndarray, *, levels: int, size: int, seed: int) -> Codes:
    """Quantises vectors level by level.

    With r₀ the vectors and c(r) the centre nearest to r among those that k-means finds for all of the level's r:
    code_l = index of c(r_l), r_{l+1} = r_l − c(r_l).

    Args:
        vectors: f32 [I, D].
        levels: L.
        size: Codes of a level at most; fewer where fewer vectors differ.
        seed: Of the first centres. One thread computes: the same seed gives the same codes.

    Raises:
        ValueError: An argument is out of range.
    """
    if vectors.ndim != 2 or not len(vectors):
        raise ValueError(f"vectors must be [I, D] with at least one item, got {list(vectors.shape)}")
    if levels < 1 or size < 1:
        raise ValueError(f"levels and size must be at least 1, got {levels} and {size}")
    rest, columns, left = vectors.astype(np.float32), [], []
    whole = max(float(np.square(rest, dtype=np.float64).sum()), 1e-30)
    for level in range(levels):
        labels, centres = _clusters(rest, size, seed + level)
        rest = rest - centres[labels]
        columns.append(labels)
        left.append(float(np.square(rest, dtype=np.float64).sum()) / whole)
    codes = np.stack(columns, axis=1)
    _, groups, counts = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    groups = groups.reshape(-1)
    codes = np.column_stack([codes, _earlier(groups)]).astype(np.int32)
    sizes = tuple(len(np.unique(column)) for column in codes.T)
    return Codes(codes, sizes, float((counts[groups] > 1).mean()), tuple(left))


def _clusters(vectors: np.ndarray, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Cluster of each vector, int [I], and the clusters' centres, f32 [size, D]."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    different = len(np.unique(vectors.round(6), axis=0))
    with threadpool_limits(1), warnings.catch_warnings():
        # Of vectors that differ in their last bits alone.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = KMeans(min(size, different), random_state=seed).fit(vectors)
    return np.asarray(found.labels_), np.asarray(found.cluster_centers_, np.float32)


def _earlier(groups: np.ndarray) -> np.ndarray:
    """How many items before each are of its group, int [I]."""
    seen: Counter[int] = Counter()
    counts = []
    for group in groups.tolist():
        counts.append(seen[group])
        seen[group] += 1
    return np.array(counts)
