"""From texts and targets to ranks: checks, retries, missing answers and the rule for ties; backends only count.

A failed call is tried again after a pause. If it keeps failing, its ranks are missing (NaN), which a reward must pass
on as missing; if too many calls go missing, training stops. No failure is ever turned into a rank.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from bridges.retrieval.catalogue import Fingerprint
from bridges.retrieval.errors import NonFiniteScores, RetrievalError
from bridges.retrieval.queries import History, Queries, make_queries
from bridges.retrieval.ranking import TIES, Counts, Nearest, Ranks, Scale, Ties, ranks_of
from grpo_jax.errors import StopRun, UserError

_log = logging.getLogger(__name__)


class Backend(Protocol):
    """Encodes queries and compares them with the N items of the catalogue; each call may raise a RetrievalError."""

    items: int
    fingerprint: Fingerprint

    def count(self, queries: Queries, scale: Scale) -> Counts:
        """Counts over the whole catalogue."""
        ...

    def nearest(self, queries: Queries, count: int) -> Nearest:
        """The best items of the whole catalogue, at most `count`."""
        ...


@dataclass(frozen=True)
class RetrieverSection:
    """Where a retriever finds the catalogue's vectors, and who compares them.

    Args:
        backend: "local", or "ray" for a service that runs already.
        encoder: "tfidf", a folder of a sentence-transformers model, or its name on the hub. A service was started
            with one of its own: it must be the same.
        dense: Local: a second encoder, whose cosine is added to the first one's; None for one alone.
        dense_weight: Factor of the second encoder's cosine.
        cache: Local: folder that keeps the catalogue's vectors between runs, or None.
        encoder_device: Local: "cpu" or "gpu:N" for a sentence-transformers model.
        service: Ray: name of the service.
        address: Ray: host and port of the cluster; None or "auto" for where this user's `serve` of that name runs.
        timeout: Ray: seconds one attempt of a call may take.
    """

    backend: str = "local"
    encoder: str = "tfidf"
    dense: str | None = None
    dense_weight: float = 0.0
    cache: str | Path | None = None
    encoder_device: str = "cpu"
    service: str = "retrieval"
    address: str | None = None
    timeout: float = 120.0


@dataclass(frozen=True)
class Patience:
    """Retries of a call, and the budget of failed calls.

    Attributes:
        attempts: Tries of one call, the first included.
        first_wait: Seconds before the second try; each further pause is twice as long.
        longest_wait: Bound on a pause, in seconds.
        budget: Calls that may go missing among the last `window`; one more stops the run.
    """

    attempts: int = 3
    first_wait: float = 1.0
    longest_wait: float = 30.0
    budget: int = 5
    window: int = 100

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.budget < 0 or self.window <= self.budget:
            raise ValueError(
                f"patience: expected attempts >= 1 and 0 <= budget < window, got attempts {self.attempts}, "
                f"budget {self.budget}, window {self.window}"
            )
        if not 0 <= self.first_wait <= self.longest_wait:
            raise ValueError(
                f"patience: expected 0 <= first_wait <= longest_wait, got {self.first_wait} and {self.longest_wait}"
            )


class Retriever:
    """Ranks targets among all items of the catalogue; `retries` and `missing` count extra attempts and lost calls."""

    def __init__(
        self,
        backend: Backend,
        *,
        ties: Ties = "against",
        scale: Scale = Scale(),
        patience: Patience = Patience(),
        wait: Callable[[float], None] = time.sleep,
    ):
        """Take a backend and the rules; `ties` as in `ranks_of`, `wait` pauses for a number of seconds."""
        if ties not in TIES:
            raise ValueError(f"ties: expected one of {', '.join(TIES)}, got {ties!r}")
        if not scale.temperature > 0 or not scale.tolerance >= 0:
            raise ValueError(f"scale: expected temperature > 0 and tolerance >= 0, got {scale}")
        self.backend = backend
        self.retries = 0
        self.missing = 0
        self._ties: Ties = ties
        self._scale = scale
        self._patience = patience
        self._wait = wait
        self._failed: deque[bool] = deque(maxlen=patience.window)

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of catalogue and encoder."""
        return self.backend.fingerprint

    @property
    def items(self) -> int:
        """Number of items."""
        return self.backend.items

    def score_ranks(
        self,
        texts: Sequence[str],
        targets: Sequence[int],
        exclude: Sequence[Sequence[int]],
        history: History | None = None,
    ) -> Ranks:
        """Return the rank of each target when all items are sorted by their similarity to the text.

        Args:
            texts: B queries; an empty one, or one without a known word, puts its target last if there is no history.
            targets: B rows of the catalogue.
            exclude: For each query, rows that are not ranked (the history); its target is ranked all the same.
            history: Items taken before, as a part of the queries; None for the text alone.

        Returns:
            Ranks; all NaN if the call failed within the budget.

        Raises:
            StopRun: More calls failed than the budget allows.
            ValueError: The arguments do not fit each other or the catalogue.
        """
        return self.score_mixed_ranks([[text] for text in texts], [[1.0]] * len(texts), targets, exclude, history)

    def score_mixed_ranks(
        self,
        texts: Sequence[Sequence[str]],
        weights: Sequence[Sequence[float]],
        targets: Sequence[int],
        exclude: Sequence[Sequence[int]],
        history: History | None = None,
    ) -> Ranks:
        """`score_ranks` for queries that are the direction of a weighted sum of the vectors of several texts.

        Args:
            texts: B lists of texts.
            weights: B lists of finite weights, one for each text.
            targets: As in `score_ranks`, like `exclude` and `history`.
        """
        queries = make_queries(texts, weights, targets, exclude, self.items, history)
        count = len(texts)
        if not count:
            return Ranks(np.zeros(0), np.zeros(0, np.float32))
        counts = self._count(queries)
        if counts is None:
            return Ranks(np.full(count, np.nan), np.full(count, np.nan, np.float32))
        return ranks_of(counts, ties=self._ties, temperature=self._scale.temperature)

    def nearest(
        self,
        texts: Sequence[str],
        count: int,
        exclude: Sequence[Sequence[int]],
        history: History | None = None,
    ) -> list[list[tuple[int, float]]]:
        """Return the rows of the items most similar to each query, best first, with their cosines.

        Args:
            texts: B queries.
            count: Number of items; fewer come where fewer are left.
            exclude: For each query, rows that are not listed.
            history: As in `score_ranks`.

        Raises:
            RetrievalError: The backend does not answer; it is not asked again.
        """
        if not texts:
            return []
        queries = make_queries([[text] for text in texts], [[1.0]] * len(texts), None, exclude, self.items, history)
        neighbours = self.backend.nearest(queries, count)
        listed = [zip(rows.tolist(), scores.tolist(), strict=True) for rows, scores in zip(*neighbours, strict=True)]
        return [[(row, score) for row, score in pairs if score > -np.inf] for pairs in listed]

    def self_test(self, titles: Sequence[str], *, samples: int = 256, required: float = 0.9) -> float:
        """Return the share of titles that, used as a query, rank first by this retriever's rule for ties.

        Other items of the very same title are left out: nothing tells them apart. Different titles that the encoder
        finds alike are ties, as they are in a run.

        Args:
            titles: Of the catalogue.
            samples: Number of queries, evenly spread over the titles that are not blank.
            required: The least share.

        Raises:
            UserError: The share is too low, or the catalogue is not the service's.
            RetrievalError: The service does not answer.
        """
        if len(titles) != self.items:
            raise UserError(f"the retrieval service holds {self.items} items, the catalogue has {len(titles)}")
        rows = [row for row, title in enumerate(titles) if title.strip()]
        picked = [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, min(samples, len(rows))).astype(int))]
        if not picked:
            raise UserError("the catalogue has no title that is not blank")
        called: dict[str, list[int]] = {}
        for row in rows:
            called.setdefault(titles[row], []).append(row)
        twins = [[other for other in called[titles[row]] if other != row] for row in picked]
        queries = make_queries([[titles[row]] for row in picked], [[1.0]] * len(picked), picked, twins, self.items)
        counts = self._attempt(queries)
        share = float(np.mean(ranks_of(counts, ties=self._ties, temperature=self._scale.temperature).rank == 1))
        if share < required:
            raise UserError(
                f"retrieval self-test: {share:.0%} of {len(picked)} titles retrieve themselves, at least "
                f"{required:.0%} should; the encoder ({self.fingerprint.encoder}) does not tell these titles apart, "
                "or the vectors were not made from them"
            )
        return share

    def _attempt(self, queries: Queries) -> Counts:
        counts = self.backend.count(queries, self._scale)
        count = len(queries.targets)
        if any(np.shape(column) != (count,) for column in counts):
            raise RetrievalError(f"expected counts of {count} queries, got shapes {[np.shape(c) for c in counts]}")
        # -inf is the sum over no item; NaN and +inf are failures
        bad = ~np.isfinite(counts.score) | np.isnan(counts.log_sum) | np.isposinf(counts.log_sum)
        if bad.any():
            raise NonFiniteScores(f"{bad.sum()} of {count} scores are not finite")
        return counts

    def _count(self, queries: Queries) -> Counts | None:
        """Counts with retries; None if all attempts failed within the budget."""
        patience = self._patience
        pause = patience.first_wait
        for attempt in range(patience.attempts):
            try:
                counts = self._attempt(queries)
            except RetrievalError as error:
                last = error
                _log.warning("retrieval: attempt %d of %d failed: %s", attempt + 1, patience.attempts, error)
                if attempt + 1 < patience.attempts:
                    self.retries += 1
                    self._wait(pause)
                    pause = min(2 * pause, patience.longest_wait)
                continue
            self._failed.append(False)
            return counts
        self.missing += 1
        self._failed.append(True)
        if sum(self._failed) > patience.budget:
            raise StopRun(
                f"the retrieval failed in {sum(self._failed)} of the last {len(self._failed)} calls (the budget is "
                f"{patience.budget}); the last time: {type(last).__name__}: {last}"
            ) from last
        return None
