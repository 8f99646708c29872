"""Exact ranks: the position of a query's target among all items of a catalogue.

`open_retriever` makes a `Retriever` with one of two backends, which give equal results: this process, or actors of a
Ray cluster started by `python -m bridges.retrieval serve`.

A failed call is retried after a pause. If it keeps failing, the run saves and ends: a failure never becomes a rank.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from bridges.retrieval.encoders import Fingerprint, RetrievalError
from bridges.retrieval.ranking import Counts, History, Queries, Ranks, local_backend, make_queries, ranks_of
from grpo_jax.config.sections import RetrievalSection
from grpo_jax.errors import StopRun, UserError

_log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Tries of one call before the run ends."""
_ASKED = 256  # titles in a self-test
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a second attempt; each further pause is twice as long, up to the longest."""


class Backend(Protocol):
    """Encodes queries and compares them with the N items of the catalogue."""

    fingerprint: Fingerprint

    def count(self, parts: Sequence[Queries]) -> list[Counts]:
        """Count over the whole catalogue for each part of a call; RetrievalError on failure."""
        ...


class Retriever:
    """Ranks targets among all items of the catalogue."""

    def __init__(self, backend: Backend, *, wait: Callable[[float], None] = time.sleep):
        """Take a backend; `wait` pauses for a number of seconds."""
        self.backend, self.fingerprint = backend, backend.fingerprint
        self._wait = wait

    def score_ranks(
        self,
        texts: Sequence[str],
        targets: Sequence[int],
        exclude: Sequence[Sequence[int]],
        history: History | None = None,
    ) -> Ranks:
        """Return the rank of each target when all items are sorted by their similarity to the text.

        Args:
            texts: B queries; without a history, an empty query, or one without a known word, ranks its target last.
            targets: B rows of the catalogue.
            exclude: For each query, rows to exclude (the history); its target is never excluded.
            history: Previously taken items, as a part of the queries; None for the text only.

        Raises:
            StopRun: Every attempt failed.
        """
        if not len(texts):
            return Ranks(np.zeros(0), np.zeros(0, np.float32))
        parts = make_queries(texts, targets, exclude, history)
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._ranks(parts)
            except RetrievalError as error:
                _log.warning("retrieval: attempt %d of %d failed: %s", attempt, ATTEMPTS, error)
                if attempt == ATTEMPTS:
                    raise StopRun(f"the retrieval failed {ATTEMPTS} times: {type(error).__name__}: {error}") from error
            self._wait(min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE))

    def self_test(self, titles: Sequence[str], *, required: float = 0.9) -> float:
        """Return the share of up to 256 titles, evenly spread, that rank first when they are the query.

        Other items with the same title are excluded, since they are indistinguishable. Different titles with equal
        encodings are ties, as in a run.

        Args:
            titles: Of the catalogue.
            required: The least share.

        Raises:
            UserError: The share is too low.
            RetrievalError: The service does not answer.
        """
        rows = [row for row, title in enumerate(titles) if title.strip()]
        picked = [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, min(_ASKED, len(rows))).astype(int))]
        if not picked:
            raise UserError("the catalogue has no title that is not blank")
        called: dict[str, list[int]] = {}
        for row in rows:
            called.setdefault(titles[row], []).append(row)
        ranks = self._ranks(
            make_queries([titles[row] for row in picked], picked, [called[titles[row]] for row in picked])
        )
        share = float(np.mean(ranks.rank == 1))
        if share < required:
            raise UserError(
                f"retrieval self-test: {share:.0%} of {len(picked)} titles retrieve themselves, at least "
                f"{required:.0%} should; the encoder ({self.fingerprint.encoder}) does not tell these titles apart, "
                "or the vectors were not made from them"
            )
        return share

    def _ranks(self, parts: Sequence[Queries]) -> Ranks:
        counts = Counts(*map(np.concatenate, zip(*self.backend.count(parts), strict=True)))
        # -inf is the sum over no items; NaN and +inf are failures
        bad = ~np.isfinite(counts.score) | np.isnan(counts.log_sum) | np.isposinf(counts.log_sum)
        if bad.any():
            raise RetrievalError(f"{bad.sum()} of {len(bad)} scores are not finite")
        return ranks_of(counts)


def open_retriever(
    titles: Sequence[str], section: RetrievalSection = RetrievalSection(), *, self_test: float = 0.9
) -> tuple[Retriever, float]:
    """Make a retriever over titles, in the order of their rows, and run its self-test.

    Returns:
        The retriever, and the share of titles that retrieve themselves, at least `self_test`.

    Raises:
        UserError: Encoder, cache or service cannot be used, the catalogue differs, or the self-test fails.
        RetrievalError: The service does not answer.
    """
    if section.backend == "ray":
        from bridges.retrieval.service import connect

        backend: Backend = connect(titles, section)
    else:
        backend = local_backend(titles, section)
    retriever = Retriever(backend)
    return retriever, retriever.self_test(titles, required=self_test)
