"""Retrieval in this process."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse

from bridges.retrieval.catalogue import Index, open_index
from bridges.retrieval.encoders import Encoder, Vectors, check_finite, directions, load_encoder, stacked
from bridges.retrieval.queries import Queries
from bridges.retrieval.ranking import Counts, Nearest, Scale, SparseShard, merge_counts, merge_nearest
from bridges.retrieval.retriever import RetrieverSection


def encoded(encoder: Encoder, queries: Queries) -> Vectors:
    """Encode the queries' distinct texts; NonFiniteScores if a vector is NaN or infinite."""
    vectors = stacked([encoder.encode(batch) for batch in queries.texts])
    check_finite(vectors, [text for batch in queries.texts for text in batch])
    return vectors


def asked(queries: Queries, texts: Vectors, items: Vectors, emphasis: np.ndarray | None) -> Vectors:
    """Return unit(text), or unit(unit(text) + a · unit(history)) where the queries have a history: f32 [B, E].

    `texts` are the vectors of the distinct texts, `items` f32 [N, E] those of the whole catalogue.
    """
    said = directions(queries.mix @ texts)
    if queries.taken is None:
        return said
    taken = queries.taken @ items
    if emphasis is not None:
        taken = sparse.csr_matrix(taken.multiply(emphasis))
    return directions(said + queries.weight * directions(taken))


class Shard:
    """A part of an index."""

    def __init__(
        self,
        index: Index,
        *,
        emphasis: np.ndarray | None = None,
        shard: int = 0,
        shards: int = 1,
        device: Any = None,
    ):
        """Load the vectors of part `shard` (from 0) of an index; NonFiniteScores if one is NaN or infinite."""
        self._vectors = index.vectors
        self._emphasis = emphasis
        items = index.vectors.shape[0]
        first = items * shard // shards
        part = index.vectors[first : items * (shard + 1) // shards]
        if sparse.issparse(part):
            self._part = SparseShard(part, first=first)
        else:
            from bridges.retrieval.dense import DenseShard  # JAX is not needed for sparse vectors

            self._part = DenseShard(part, first=first, device=device)

    def count(self, queries: Queries, vectors: Vectors, scale: Scale) -> Counts:
        """Counts of the part's items, from the vectors of the queries' distinct texts."""
        target_vectors = self._vectors[queries.targets]
        wanted = asked(queries, vectors, self._vectors, self._emphasis)
        return self._part.count(wanted, queries.targets, target_vectors, queries.exclude, scale)

    def nearest(self, queries: Queries, vectors: Vectors, count: int) -> Nearest:
        """The part's best items, from the vectors of the queries' distinct texts."""
        return self._part.nearest(asked(queries, vectors, self._vectors, self._emphasis), queries.exclude, count)


class LocalBackend:
    """Encoder and catalogue in this process; see `retriever.Backend`."""

    def __init__(self, index: Index, encoder: Encoder, *, shards: int = 1, device: Any = None):
        """Take an index and the encoder that made it.

        The number of shards does not change results. `device` is where dense vectors are compared; None is the CPU.
        """
        self.items = index.vectors.shape[0]
        self.fingerprint = index.fingerprint
        self._encoder = encoder
        parts = {"emphasis": encoder.emphasis, "shards": shards, "device": device}
        self._shards = [Shard(index, shard=i, **parts) for i in range(shards)]

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


def local_backend(titles: Sequence[str], section: RetrieverSection = RetrieverSection()) -> LocalBackend:
    """Load the encoder, and make or load the catalogue's vectors."""
    encoder = load_encoder(section.encoder, titles, device=section.encoder_device)
    return LocalBackend(open_index(titles, encoder, section.cache), encoder, device=section.device)
