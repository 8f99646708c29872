"""From texts and targets to ranks: checks, retries, missing answers and the rule for ties; backends only count.

A failed call is tried again after a pause. If it keeps failing, its ranks are missing (NaN), which a reward must pass
on as missing; if too many calls go missing, training stops. No failure is ever turned into a rank.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from bridges.retrieval.errors import NonFiniteScores, RetrievalError
from bridges.retrieval.index import Fingerprint
from bridges.retrieval.queries import History, Queries, make_queries
from bridges.retrieval.ranking import Counts, Nearest, Ranks, Scale, ranks_of
from grpo_jax.config.retrieval import RetrievalSection
from grpo_jax.errors import StopRun, UserError

_log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a second attempt; each further pause is twice as long, up to the longest."""


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


class Retriever:
    """Ranks targets among all items of the catalogue; `retries` and `missing` count extra attempts and lost calls."""

    def __init__(
        self,
        backend: Backend,
        section: RetrievalSection = RetrievalSection(),
        *,
        wait: Callable[[float], None] = time.sleep,
    ):
        """Take a backend and the rules for ties, scale and failures; `wait` pauses for a number of seconds."""
        self.backend = backend
        self.retries = 0
        self.missing = 0
        self._section = section
        self._scale = Scale(section.temperature)
        self._wait = wait
        self._failed: deque[bool] = deque(maxlen=section.window)

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
            ValueError: A row is none of the catalogue's.
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
        return self._ranks(counts)

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
            UserError: The share is too low.
            RetrievalError: The service does not answer.
        """
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
        share = float(np.mean(self._ranks(counts).rank == 1))
        if share < required:
            raise UserError(
                f"retrieval self-test: {share:.0%} of {len(picked)} titles retrieve themselves, at least "
                f"{required:.0%} should; the encoder ({self.fingerprint.encoder}) does not tell these titles apart, "
                "or the vectors were not made from them"
            )
        return share

    def _ranks(self, counts: Counts) -> Ranks:
        return ranks_of(counts, ties=self._section.ties, temperature=self._scale.temperature)

    def _attempt(self, queries: Queries) -> Counts:
        counts = self.backend.count(queries, self._scale)
        count = len(queries.targets)
        # -inf is the sum over no item; NaN and +inf are failures
        bad = ~np.isfinite(counts.score) | np.isnan(counts.log_sum) | np.isposinf(counts.log_sum)
        if bad.any():
            raise NonFiniteScores(f"{bad.sum()} of {count} scores are not finite")
        return counts

    def _count(self, queries: Queries) -> Counts | None:
        """Counts with retries; None if all attempts failed within the budget."""
        attempts, budget = self._section.attempts, self._section.budget
        for attempt in range(attempts):
            try:
                counts = self._attempt(queries)
            except RetrievalError as error:
                last = error
                _log.warning("retrieval: attempt %d of %d failed: %s", attempt + 1, attempts, error)
                if attempt + 1 < attempts:
                    self.retries += 1
                    self._wait(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE))
                continue
            self._failed.append(False)
            return counts
        self.missing += 1
        self._failed.append(True)
        if sum(self._failed) > budget:
            raise StopRun(
                f"the retrieval failed in {sum(self._failed)} of the last {len(self._failed)} calls (the budget is "
                f"{budget}); the last time: {type(last).__name__}: {last}"
            ) from last
        return None
