"""Queries of a backend: texts in batches, weights, targets, histories."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

from bridges.retrieval.encoders import batches

_NONE = -1  # no row


class History(NamedTuple):
    """Items taken before, as a part of queries: q = unit(unit(text) + a · unit(e ⊙ Σ_i decay^age(i) v_i)).

    v_i are the vectors of the items' titles and e the encoder's emphasis (for TF-IDF each word's idf, once more).
    A query whose text is the zero vector is its history alone.

    Attributes:
        rows: B lists of rows of the catalogue, oldest first; the newest has age 0.
        weight: a, at least 0.
        decay: In [0, 1].
    """

    rows: Sequence[Sequence[int]]
    weight: float
    decay: float


class Queries(NamedTuple):
    """Queries of a backend.

    Attributes:
        texts: Distinct, in the batches in which they are to be encoded.
        mix: f32 [B, U], weights of the U texts in each query.
        targets: i32 [B], rows; -1 where no item's rank is asked for.
        exclude: i32 [B, X], rows that are not ranked, padded with -1; never the target.
        taken: f32 [B, N], weights of the items in each query's history; None without histories.
        weight: Of the history beside the text.
    """

    texts: list[list[str]]
    mix: sparse.csr_matrix
    targets: np.ndarray
    exclude: np.ndarray
    taken: sparse.csr_matrix | None = None
    weight: float = 0.0


def make_queries(
    texts: Sequence[Sequence[str]],
    weights: Sequence[Sequence[float]],
    targets: Sequence[int] | None,
    exclude: Sequence[Sequence[int]],
    items: int,
    history: History | None = None,
) -> Queries:
    """Bring the arguments of `Retriever.score_mixed_ranks` into a backend's form.

    `targets` is None where no item's rank is asked for; `items` is the catalogue's number.
    """
    count = len(texts)
    rows = np.full(count, _NONE) if targets is None else np.asarray(targets, np.int64)
    others = [sorted({int(row) for row in out} - {int(target)}) for out, target in zip(exclude, rows, strict=True)]
    named = [*(row for out in others for row in out), *(() if targets is None else rows.tolist())]
    _require_rows("targets and exclude", named, items)
    padded = np.full((count, max(map(len, others), default=0)), _NONE, np.int32)
    for i, row in enumerate(others):
        padded[i, : len(row)] = row
    groups = batches(text for query in texts for text in query) or [[""]]  # an encoder is never asked for nothing
    queries = Queries(groups, _mix(groups, texts, weights), rows.astype(np.int32), padded)
    if history is None:
        return queries
    return queries._replace(taken=_taken(history, count, items), weight=float(history.weight))


def of_rows(queries: Queries, rows: slice) -> Queries:
    """Return some of the queries, with the batches of texts that they mix: each is encoded as it was before."""
    mix, first, batches_kept, columns = queries.mix[rows], 0, [], []
    used = {0, *mix.indices.tolist()}  # 0: an encoder is never asked for nothing
    for batch in queries.texts:
        own = range(first, first := first + len(batch))
        if not used.isdisjoint(own):
            batches_kept.append(batch)
            columns += own
    taken = None if queries.taken is None else queries.taken[rows]
    parts = {"mix": mix[:, columns], "targets": queries.targets[rows], "exclude": queries.exclude[rows]}
    return queries._replace(texts=batches_kept, taken=taken, **parts)


def _require_rows(name: str, rows: Sequence[int], items: int) -> None:
    wrong = [row for row in rows if not 0 <= row < items]
    if wrong:
        raise ValueError(f"{name}: expected rows of the catalogue (0 to {items}, excluded), got {wrong[0]}")


def _taken(history: History, count: int, items: int) -> sparse.csr_matrix:
    """Weights f32 [B, N] of the items in each query's history."""
    rows = [row for one in history.rows for row in one]
    _require_rows("history.rows", rows, items)
    lengths = [len(one) for one in history.rows]
    ages = np.concatenate([np.arange(length)[::-1] for length in lengths] or [[]])
    values = np.power(history.decay, ages).astype(np.float32)
    lines = np.repeat(np.arange(count), lengths)
    return sparse.csr_matrix((values, (lines, np.array(rows, np.int64))), shape=(count, items))


def _mix(
    groups: list[list[str]], texts: Sequence[Sequence[str]], weights: Sequence[Sequence[float]]
) -> sparse.csr_matrix:
    """Weights f32 [B, U] of the distinct texts; a text that a query names twice counts twice."""
    place = {text: i for i, text in enumerate(text for group in groups for text in group)}
    flat = np.array([value for values in weights for value in values], np.float32)
    lines = np.repeat(np.arange(len(texts)), [len(query) for query in texts])
    columns = np.array([place[text] for query in texts for text in query], np.int64)
    return sparse.csr_matrix((flat, (lines, columns)), shape=(len(texts), len(place)))
