"""Two encoders at once: score = cos of the one + w · cos of the other, exactly, in this process.

TF-IDF tells titles apart by their words, a sentence encoder knows words of the same meaning. Each keeps its own index
(and its own folder of the cache). Queries and histories are built in each space separately, so that the lengths of
one do not weigh in the other.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from bridges.retrieval.catalogue import Fingerprint, Index, open_index
from bridges.retrieval.encoders import Encoder, Vectors, load_encoder
from bridges.retrieval.local import asked, encoded
from bridges.retrieval.queries import Queries
from bridges.retrieval.ranking import (
    QUERIES,
    Counts,
    Nearest,
    Scale,
    count_scores,
    joined,
    nearest_of,
)
from bridges.retrieval.retriever import RetrieverSection


class Space(NamedTuple):
    """An encoder, and the catalogue as its vectors."""

    encoder: Encoder
    index: Index

    def similarities(self, queries: Queries, vectors: Vectors) -> np.ndarray:
        """Cosines f32 [B, N] of queries and items, from the vectors of the queries' distinct texts."""
        found: Any = asked(queries, vectors, self.index.vectors, self.encoder.emphasis) @ self.index.vectors.T
        return found.toarray() if sparse.issparse(found) else np.asarray(found)


class HybridBackend:
    """Both spaces in this process; see `retriever.Backend`."""

    def __init__(self, first: Space, second: Space, weight: float):
        """Take two spaces over the same titles; the second's cosine counts `weight` > 0 times."""
        self.items = first.index.vectors.shape[0]
        one, other = first.index.fingerprint, second.index.fingerprint
        self.fingerprint = Fingerprint(one.catalogue, f"{one.encoder} + {weight:g} × {other.encoder}")
        self._spaces, self._weight = (first, second), np.float32(weight)

    def count(self, queries: Queries, scale: Scale) -> Counts:
        """See `retriever.Backend`."""
        return joined([_counts(part, scores, scale) for part, scores in self._scored(queries)])

    def nearest(self, queries: Queries, count: int) -> Nearest:
        """See `retriever.Backend`."""
        found = [nearest_of(scores, part.exclude, count, first=0) for part, scores in self._scored(queries)]
        return Nearest(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _scored(self, queries: Queries) -> Iterator[tuple[Queries, np.ndarray]]:
        """Yield parts of the queries with their scores f32 [B, N] of all items."""
        (first, one), (second, other) = ((space, encoded(space.encoder, queries)) for space in self._spaces)
        for part in _parts(queries):
            similar = second.similarities(part, other)
            yield part, first.similarities(part, one) + self._weight * similar

    def reconnect(self) -> None:
        """Do nothing: nothing can be lost here."""

    def close(self) -> None:
        """Do nothing."""


def hybrid_backend(titles: Sequence[str], section: RetrieverSection) -> HybridBackend:
    """Load two encoders, and make or load the catalogue's vectors of each."""
    encoders = [load_encoder(name, titles, device=section.encoder_device) for name in (section.encoder, section.dense)]
    first, second = (Space(encoder, open_index(titles, encoder, section.cache)) for encoder in encoders)
    return HybridBackend(first, second, section.dense_weight)


def _counts(queries: Queries, scores: np.ndarray, scale: Scale) -> Counts:
    silent = ~scores.any(1)
    own = scores[np.arange(len(scores)), queries.targets].astype(np.float64)
    out = np.concatenate([queries.targets[:, None], queries.exclude], axis=1)
    return Counts(*count_scores(scores, own, out, scale), own, silent)


def _parts(queries: Queries) -> list[Queries]:
    """Split the queries so that one part's scores of all items fit in memory."""
    parts = []
    for start in range(0, len(queries.targets), QUERIES):
        rows = slice(start, start + QUERIES)
        taken = None if queries.taken is None else queries.taken[rows]
        part = {"mix": queries.mix[rows], "targets": queries.targets[rows], "exclude": queries.exclude[rows]}
        parts.append(queries._replace(**part, taken=taken))
    return parts
