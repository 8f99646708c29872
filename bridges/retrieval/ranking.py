"""The exact rank of one item among all: a count of the items that score at least as high.

A rank needs neither top-k nor sorting: only the target's score, and the number of other items not below it. Such
counts, and the log-sum-exp of the softmax probability, add up over any partition of the catalogue.

Scores are cosine similarities. Two that differ by at most TOLERANCE are a tie: rounding must not rank equal titles, or
sums in another order. Ties count against the target.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

from bridges.retrieval.encoders import BATCH, Encoder, Index, Vectors, directions, load_encoder, open_index
from grpo_jax.config.sections import RetrievalSection

_BLOCK = 65536  # items per block
TEMPERATURE = 0.05  # of the softmax over the similarities
TOLERANCE = 1e-6


class Counts(NamedTuple):
    """Counts of a part of the catalogue for each query's target; excluded items and the target do not count."""

    before: np.ndarray  # i64 [B], items with a higher score than the target, or a tie
    log_sum: np.ndarray  # f64 [B], log Σ exp(score / TEMPERATURE) of the other items; -inf if there are none
    score: np.ndarray  # f64 [B], the target's score


class Ranks(NamedTuple):
    """Ranks of the targets."""

    rank: np.ndarray  # f64 [B], 1 is best
    probability: np.ndarray  # f32 [B], the target's probability in the softmax over all items that are not excluded


def ranks_of(counts: Counts) -> Ranks:
    r"""Return rank = 1 + before, and probability = exp(s/τ) / (exp(s/τ) + Σ_others exp(s_j/τ))."""
    scores = counts.score / TEMPERATURE
    probability = np.exp(scores - np.logaddexp(scores, counts.log_sum))
    return Ranks(1.0 + counts.before, probability.astype(np.float32))


def count_scores(scores: np.ndarray, target: np.ndarray, out: np.ndarray) -> Counts:
    """Count scores f32 [B, M], which are overwritten, against those of targets f64 [B], without the columns `out`."""
    leave_out(scores, out)
    before = np.count_nonzero(scores >= target[:, None].astype(scores.dtype) - np.float32(TOLERANCE), axis=1)
    top = np.maximum(scores.max(1, keepdims=True), np.float32(-1))
    scores -= top
    scores *= np.float32(1 / TEMPERATURE)
    np.exp(scores, out=scores)
    with np.errstate(divide="ignore"):  # if a block's items are all excluded, its sum is 0
        log_sum = np.log(scores.sum(1, dtype=np.float64)) + top[:, 0] / TEMPERATURE
    return Counts(before, log_sum, target)


def leave_out(scores: np.ndarray, out: np.ndarray) -> None:
    """Set -inf in the columns `out` [B, X] of scores [B, M]; ignore columns outside."""
    inside = (out >= 0) & (out < scores.shape[1])
    scores[np.nonzero(inside)[0], out[inside]] = -np.inf


class History(NamedTuple):
    """Previously taken items, as a part of queries: q = unit(unit(text) + a · unit(e ⊙ Σ_i decay^age(i) v_i)).

    v_i are the vectors of the items' titles, and e is the encoder's emphasis (for TF-IDF a second idf factor per word).
    If the text is the zero vector, the query is only its history.
    """

    rows: Sequence[Sequence[int]]  # B lists of rows of the catalogue, oldest first; the newest has age 0
    weight: float  # a, at least 0
    decay: float  # in [0, 1]


class Queries(NamedTuple):
    """Up to BATCH queries."""

    texts: Sequence[str]  # B texts
    targets: np.ndarray  # i32 [B], rows; -1 if no rank is needed
    exclude: np.ndarray  # i32 [B, X], excluded rows, padded with -1; never the target
    history: History | None  # histories of the queries; None for texts only


def make_queries(
    texts: Sequence[str],
    targets: Sequence[int] | None,
    exclude: Sequence[Sequence[int]],
    history: History | None = None,
) -> list[Queries]:
    """Return a call in parts of BATCH queries; `targets` is None if no rank is needed."""
    rows = np.full(len(texts), -1) if targets is None else np.asarray(targets, np.int64)
    parts = []
    for start in range(0, len(texts), BATCH):
        part = slice(start, start + BATCH)
        others = [sorted({*out} - {int(row)}) for out, row in zip(exclude[part], rows[part], strict=True)]
        padded = np.full((len(others), max(map(len, others))), -1, np.int32)
        for line, out in zip(padded, others, strict=True):
            line[: len(out)] = out
        taken = history and history._replace(rows=history.rows[part])
        parts.append(Queries(texts[part], rows[part].astype(np.int32), padded, taken))
    return parts


class LocalBackend:
    """An encoder and the catalogue's unit vectors on the CPU, sparse ones (TF-IDF) or dense ones.

    See `bridges.retrieval.Backend`. Products of sparse vectors are sparse, so inverted lists beat dense ones by far.
    """

    def __init__(self, encoder: Encoder, index: Index, *, block: int = _BLOCK):
        """Take an encoder and its index; the block size does not change results."""
        self._encoder, self._vectors, self.fingerprint = encoder, index.vectors, index.fingerprint
        starts = range(0, index.vectors.shape[0], block)
        columns = [index.vectors[start : start + block].T for start in starts]
        columns = [items.tocsr() if sparse.issparse(items) else items for items in columns]
        self._blocks = list(zip(starts, columns, strict=True))

    def count(self, parts: Sequence[Queries]) -> list[Counts]:
        """See `bridges.retrieval.Backend`."""
        return [self._count(part) for part in parts]

    def _count(self, queries: Queries) -> Counts:
        vectors, own = self._query_vectors(queries), self._vectors[queries.targets]
        products = vectors.multiply(own) if sparse.issparse(vectors) else vectors * own
        score = np.asarray(products.sum(1), np.float64).reshape(-1)
        out = np.concatenate([queries.targets[:, None], queries.exclude], axis=1)
        parts = [count_scores(_dense(vectors @ items), score, out - first) for first, items in self._blocks]
        before, log_sums, scores = zip(*parts, strict=True)  # the target's score is the same in all
        return Counts(np.sum(before, axis=0), np.logaddexp.reduce(log_sums, axis=0), scores[0])

    def nearest(
        self, texts: Sequence[str], count: int, exclude: Sequence[Sequence[int]], history: History | None = None
    ) -> list[list[tuple[int, float]]]:
        """Return the rows most similar to each text and their cosines, best first; ties by row.

        Rows in `exclude` are not listed. There are fewer than `count` if fewer remain.
        """
        listed = []
        for queries in make_queries(texts, None, exclude, history):
            vectors = self._query_vectors(queries)
            scores = np.concatenate([_dense(vectors @ items) for _, items in self._blocks], axis=1)
            leave_out(scores, queries.exclude)
            best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
            pairs = zip(best.tolist(), np.take_along_axis(scores, best, axis=1).tolist(), strict=True)
            listed += [[pair for pair in zip(*both, strict=True) if pair[1] > -np.inf] for both in pairs]
        return listed

    def _query_vectors(self, queries: Queries) -> Vectors:
        """Return unit(text), or unit(unit(text) + a · unit(history)) with a history: f32 [B, E]."""
        vectors = directions(self._encoder.encode(queries.texts))
        if queries.history is None:
            return vectors
        rows, weight, decay = queries.history
        lengths = [len(one) for one in rows]
        shares = np.power(decay, np.concatenate([np.arange(length)[::-1] for length in lengths])).astype(np.float32)
        places = (np.repeat(np.arange(len(rows)), lengths), np.array([row for one in rows for row in one], np.int64))
        weights = sparse.csr_matrix((shares, places), (len(rows), self._vectors.shape[0]))
        taken = weights @ self._vectors
        if self._encoder.emphasis is not None:
            taken = sparse.csr_matrix(taken.multiply(self._encoder.emphasis))
        return directions(vectors + weight * directions(taken))


def _dense(scores: Vectors) -> np.ndarray:
    return scores.toarray() if sparse.issparse(scores) else np.asarray(scores)


def local_backend(titles: Sequence[str], section: RetrievalSection = RetrievalSection()) -> LocalBackend:
    """Load the encoder, and make or load the catalogue's vectors."""
    encoder = load_encoder(section.encoder, titles, device=section.device)
    return LocalBackend(encoder, open_index(titles, encoder, section.cache))
