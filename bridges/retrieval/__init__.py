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
from grpo_jax.errors import StopRun

_log = logging.getLogger(__name__)

PAUSES = (1.0, 2.0)  # seconds before the second and the third attempt of a call


class Backend(Protocol):
    """Encodes queries and compares them with the N items of the catalogue."""

    fingerprint: Fingerprint

    def count(self, parts: Sequence[Queries]) -> list[Counts]:
        """Count over the whole catalogue for each part of a call; RetrievalError on failure."""


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
        """Return the ranks of targets when all items are sorted by their similarity to the text.

        There are B texts, targets (rows of the catalogue) and lists of rows to exclude, which never hold the target.
        `history` are previously taken items as a part of the queries. Without it, an empty query, or one without a
        known word, ranks its target last. StopRun if every attempt failed.
        """
        if not len(texts):
            return Ranks(np.zeros(0), np.zeros(0, np.float32))
        parts = make_queries(texts, targets, exclude, history)
        for pause in (*PAUSES, None):
            try:
                return self._ranks(parts)
            except RetrievalError as error:
                _log.warning("retrieval: a call failed: %s", error)
                if pause is None:
                    reason = f"{type(error).__name__}: {error}"
                    raise StopRun(f"the retrieval failed {1 + len(PAUSES)} times: {reason}") from error
                self._wait(pause)

    def _ranks(self, parts: Sequence[Queries]) -> Ranks:
        counts = Counts(*map(np.concatenate, zip(*self.backend.count(parts), strict=True)))
        # -inf is the sum over no items; NaN and +inf are failures
        bad = ~np.isfinite(counts.score) | np.isnan(counts.log_sum) | np.isposinf(counts.log_sum)
        if bad.any():
            raise RetrievalError(f"{bad.sum()} of {len(bad)} scores are not finite")
        return ranks_of(counts)


def open_retriever(titles: Sequence[str], section: RetrievalSection = RetrievalSection()) -> Retriever:
    """Make a retriever over titles, in the order of their rows.

    UserError if encoder, cache, service or catalogue do not suit; RetrievalError if the service does not answer.
    """
    if section.backend == "ray":
        from bridges.retrieval.service import connect

        return Retriever(connect(titles, section))
    return Retriever(local_backend(titles, section))
