"""Retrieval in this process, by one encoder or by two.

TF-IDF tells titles apart by their words, a sentence encoder knows words of the same meaning: two at once score
cos of the one + w · cos of the other. Each keeps its own index (and its own folder of the cache). Queries and histories
are built in each space separately, so that the lengths of one do not weigh in the other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

from bridges.retrieval.encoders import Encoder, Vectors, check_finite, directions, load_encoder, stacked
from bridges.retrieval.errors import NonFiniteScores
from bridges.retrieval.index import Fingerprint, Index, open_index
from bridges.retrieval.queries import Queries
from bridges.retrieval.ranking import (
    Counts,
    Nearest,
    Scale,
    count_scores,
    merge_counts,
    merge_nearest,
    nearest_of,
)
from grpo_jax.config.retrieval import RetrievalSection

QUERIES = 64
"""Compared at once."""
_BLOCK = 65536  # items at a time


class Space(NamedTuple):
    """An encoder, the catalogue as its vectors, and the factor of its cosines beside the first space's, which is 1."""

    encoder: Encoder
    index: Index
    weight: float = 1.0


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


class LocalBackend:
    """Encoders and unit vectors on the CPU, sparse ones (TF-IDF), dense ones, or several spaces of them.

    See `retriever.Backend`. Products of sparse vectors are sparse too, so inverted lists beat a dense product by far.
    """

    def __init__(self, *spaces: Space, block: int = _BLOCK):
        """Take spaces over the same titles; how many items are compared at a time does not change results.

        NonFiniteScores if a vector is NaN or infinite.
        """
        (first, own), *others = [(space, space.index.fingerprint.encoder) for space in spaces]
        self.items = first.index.vectors.shape[0]
        encoders = " + ".join([own, *(f"{space.weight:g} × {other}" for space, other in others)])
        self.fingerprint = Fingerprint(first.index.fingerprint.catalogue, encoders)
        self._spaces = spaces
        self._blocks = [
            (start, [_block(space.index.vectors, start, start + block) for space in spaces])
            for start in range(0, self.items, block)
        ]

    def count(self, queries: Queries, scale: Scale) -> Counts:
        """See `retriever.Backend`."""
        wanted = self._wanted(queries)
        parts = []
        for start in range(0, len(queries.targets), QUERIES):
            rows = slice(start, start + QUERIES)
            asked, targets = [one[rows] for one in wanted], queries.targets[rows]
            score = self._target_scores(asked, targets)
            silent = np.all([_is_zero(one) for one in asked], axis=0)
            out = np.concatenate([targets[:, None], queries.exclude[rows]], axis=1)
            counts = [
                Counts(*count_scores(self._scores(asked, block), score, out - first, scale), score, silent)
                for first, block in self._blocks
            ]
            parts.append(merge_counts(counts))
        return Counts(*map(np.concatenate, zip(*parts, strict=True)))

    def nearest(self, queries: Queries, count: int) -> Nearest:
        """See `retriever.Backend`."""
        wanted = self._wanted(queries)
        parts = [
            nearest_of(self._scores(wanted, block), queries.exclude - first, count, first=first)
            for first, block in self._blocks
        ]
        return merge_nearest(parts, count)

    def _wanted(self, queries: Queries) -> list[Vectors]:
        return [
            query_vectors(queries, encoded(space.encoder, queries), space.index.vectors, space.encoder.emphasis)
            for space in self._spaces
        ]

    def _scores(self, asked: Sequence[Vectors], block: Sequence[Vectors]) -> np.ndarray:
        """Similarities f32 [B, M] of queries, and of a block of items, in each space."""
        total = _dense(asked[0] @ block[0])
        for space, one, items in zip(self._spaces[1:], asked[1:], block[1:], strict=True):
            total += np.float32(space.weight) * _dense(one @ items)
        return total

    def _target_scores(self, asked: Sequence[Vectors], targets: np.ndarray) -> np.ndarray:
        """Similarities f64 [B] of queries and their targets, the same for every block."""
        total = np.zeros(len(targets))
        for space, one in zip(self._spaces, asked, strict=True):
            own = space.index.vectors[targets]
            products = one.multiply(own) if sparse.issparse(one) else one * own
            total += space.weight * np.asarray(products.sum(1), np.float64).reshape(-1)
        return total


def _block(vectors: Vectors, start: int, end: int) -> Vectors:
    """Items from `start` to `end` as columns."""
    block = vectors[start:end]
    finite = np.isfinite(np.asarray(block.sum(1)).reshape(-1))
    if not finite.all():
        raise NonFiniteScores(f"the catalogue's vector in row {start + int(np.argmin(finite))} is not finite")
    return block.T.tocsr() if sparse.issparse(block) else block.T


def _dense(scores: Vectors) -> np.ndarray:
    return scores.toarray() if sparse.issparse(scores) else np.asarray(scores)


def _is_zero(vectors: Vectors) -> np.ndarray:
    """Whether each row is the zero vector."""
    return np.diff(vectors.indptr) == 0 if sparse.issparse(vectors) else ~vectors.any(1)


def local_backend(titles: Sequence[str], section: RetrievalSection = RetrievalSection()) -> LocalBackend:
    """Load the encoder, or both, and make or load the catalogue's vectors."""
    spaces = []
    for name, weight in ((section.encoder, 1.0), (section.dense, section.dense_weight)):
        if name is not None:
            encoder = load_encoder(name, titles, device=section.device)
            spaces.append(Space(encoder, open_index(titles, encoder, section.cache), weight))
    return LocalBackend(*spaces)
