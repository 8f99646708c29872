"""Retrieval in this process, by one encoder or by two.

TF-IDF tells titles apart by their words, a sentence encoder knows words of the same meaning: two at once score
cos of the one + w · cos of the other. Each keeps its own index (and its own folder of the cache). Queries and histories
are built in each space separately, so that the lengths of one do not weigh in the other.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

from bridges.retrieval.catalogue import Fingerprint, Index, open_index
from bridges.retrieval.encoders import Encoder, Vectors, check_finite, directions, load_encoder, stacked
from bridges.retrieval.queries import Queries
from bridges.retrieval.ranking import (
    QUERIES,
    Counts,
    Nearest,
    Scale,
    VectorShard,
    count_scores,
    dense_product,
    joined,
    merge_counts,
    merge_nearest,
    nearest_of,
)
from bridges.retrieval.retriever import RetrieverSection


def encoded(encoder: Encoder, queries: Queries) -> Vectors:
    """Encode the queries' distinct texts; NonFiniteScores if a vector is NaN or infinite."""
    vectors = stacked([encoder.encode(batch) for batch in queries.texts])
    check_finite(vectors, [text for batch in queries.texts for text in batch])
    return vectors


def query_vectors(queries: Queries, texts: Vectors, items: Vectors, emphasis: np.ndarray | None) -> Vectors:
    """Return unit(text), or unit(unit(text) + a · unit(history)) where the queries have a history: f32 [B, E].

    `texts` are the vectors of the distinct texts, `items` f32 [N, E] those of the whole catalogue.
    """
    directions_of_texts = directions(queries.mix @ texts)
    if queries.taken is None:
        return directions_of_texts
    taken = queries.taken @ items
    if emphasis is not None:
        taken = sparse.csr_matrix(taken.multiply(emphasis))
    return directions(directions_of_texts + queries.weight * directions(taken))


class Shard:
    """A part of an index."""

    def __init__(self, index: Index, *, emphasis: np.ndarray | None = None, shard: int = 0, shards: int = 1):
        """Load the vectors of part `shard` (from 0) of an index; NonFiniteScores if one is NaN or infinite."""
        self._vectors = index.vectors
        self._emphasis = emphasis
        items = index.vectors.shape[0]
        first = items * shard // shards
        self._part = VectorShard(index.vectors[first : items * (shard + 1) // shards], first=first)

    def count(self, queries: Queries, vectors: Vectors, scale: Scale) -> Counts:
        """Counts of the part's items, from the vectors of the queries' distinct texts."""
        wanted = query_vectors(queries, vectors, self._vectors, self._emphasis)
        return self._part.count(wanted, queries.targets, self._vectors[queries.targets], queries.exclude, scale)

    def nearest(self, queries: Queries, vectors: Vectors, count: int) -> Nearest:
        """The part's best items, from the vectors of the queries' distinct texts."""
        wanted = query_vectors(queries, vectors, self._vectors, self._emphasis)
        return self._part.nearest(wanted, queries.exclude, count)


class LocalBackend:
    """Encoder and catalogue in this process; see `retriever.Backend`."""

    def __init__(self, index: Index, encoder: Encoder, *, shards: int = 1):
        """Take an index and the encoder that made it. The number of shards does not change results."""
        self.items = index.vectors.shape[0]
        self.fingerprint = index.fingerprint
        self._encoder = encoder
        self._shards = [Shard(index, emphasis=encoder.emphasis, shard=shard, shards=shards) for shard in range(shards)]

    def count(self, queries: Queries, scale: Scale) -> Counts:
        """See `retriever.Backend`."""
        vectors = encoded(self._encoder, queries)
        return merge_counts([shard.count(queries, vectors, scale) for shard in self._shards])

    def nearest(self, queries: Queries, count: int) -> Nearest:
        """See `retriever.Backend`."""
        vectors = encoded(self._encoder, queries)
        return merge_nearest([shard.nearest(queries, vectors, count) for shard in self._shards], count)

    def reconnect(self) -> None:
        """Do nothing: nothing can be lost here."""

    def close(self) -> None:
        """Do nothing."""


class Space(NamedTuple):
    """An encoder, and the catalogue as its vectors."""

    encoder: Encoder
    index: Index

    def similarities(self, queries: Queries, vectors: Vectors) -> np.ndarray:
        """Cosines f32 [B, N] of queries and items, from the vectors of the queries' distinct texts."""
        wanted = query_vectors(queries, vectors, self.index.vectors, self.encoder.emphasis)
        return dense_product(wanted, self.index.vectors.T)


class HybridBackend:
    """Two spaces in this process; see `retriever.Backend`."""

    def __init__(self, first: Space, second: Space, weight: float):
        """Take two spaces over the same titles; the second's cosine counts `weight` > 0 times."""
        self.items = first.index.vectors.shape[0]
        one, other = first.index.fingerprint, second.index.fingerprint
        self.fingerprint = Fingerprint(one.catalogue, f"{one.encoder} + {weight:g} × {other.encoder}")
        self._spaces = first, second
        self._weight = np.float32(weight)

    def count(self, queries: Queries, scale: Scale) -> Counts:
        """See `retriever.Backend`."""
        parts = []
        for part, scores in self._scored(queries):
            silent = ~scores.any(1)
            target_scores = scores[np.arange(len(scores)), part.targets].astype(np.float64)
            out = np.concatenate([part.targets[:, None], part.exclude], axis=1)
            parts.append(Counts(*count_scores(scores, target_scores, out, scale), target_scores, silent))
        return joined(parts)

    def nearest(self, queries: Queries, count: int) -> Nearest:
        """See `retriever.Backend`."""
        parts = [nearest_of(scores, part.exclude, count, first=0) for part, scores in self._scored(queries)]
        return Nearest(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _scored(self, queries: Queries) -> Iterator[tuple[Queries, np.ndarray]]:
        """Yield parts of the queries, whose scores fit in memory, with their scores f32 [B, N] of all items."""
        vectors = [encoded(space.encoder, queries) for space in self._spaces]
        for start in range(0, len(queries.targets), QUERIES):
            rows = slice(start, start + QUERIES)
            part = queries._replace(
                mix=queries.mix[rows],
                targets=queries.targets[rows],
                exclude=queries.exclude[rows],
                taken=None if queries.taken is None else queries.taken[rows],
            )
            first, second = (
                space.similarities(part, texts) for space, texts in zip(self._spaces, vectors, strict=True)
            )
            yield part, first + self._weight * second

    def reconnect(self) -> None:
        """Do nothing: nothing can be lost here."""

    def close(self) -> None:
        """Do nothing."""


def local_backend(
    titles: Sequence[str], section: RetrieverSection = RetrieverSection()
) -> LocalBackend | HybridBackend:
    """Load the encoder, or both, and make or load the catalogue's vectors."""
    spaces = []
    for name in (section.encoder, section.dense):
        if name is not None:
            encoder = load_encoder(name, titles, device=section.encoder_device)
            spaces.append(Space(encoder, open_index(titles, encoder, section.cache)))
    if len(spaces) == 2:
        return HybridBackend(*spaces, section.dense_weight)
    return LocalBackend(spaces[0].index, spaces[0].encoder)
