"""Exact ranks: the position of a query's target among all items of a catalogue.

`open_retriever` gives a `Retriever` over one of two backends with equal results: in this process, or actors of a
Ray cluster that `python -m bridges.retrieval serve` starts.
"""

from collections.abc import Sequence

from bridges.retrieval.errors import NonFiniteScores, RetrievalError, ServiceNotFound
from bridges.retrieval.index import Fingerprint, default_cache
from bridges.retrieval.queries import History
from bridges.retrieval.ranking import Ranks, Scale
from bridges.retrieval.retriever import Backend, Retriever
from grpo_jax.config.retrieval import RetrievalSection

__all__ = [
    "Fingerprint",
    "History",
    "NonFiniteScores",
    "Ranks",
    "RetrievalError",
    "RetrievalSection",
    "Retriever",
    "Scale",
    "ServiceNotFound",
    "default_cache",
    "open_retriever",
]


def open_retriever(
    titles: Sequence[str], section: RetrievalSection = RetrievalSection(), *, self_test: float = 0.9
) -> tuple[Retriever, float]:
    """Make a retriever and run its self-test.

    Args:
        titles: Of all items, in the order of their rows; "" where an item has none.
        section: Backend and encoder, the rule for ties, and what becomes of failed calls.
        self_test: Share of titles that must retrieve themselves.

    Returns:
        The retriever, and the share of titles that retrieve themselves.

    Raises:
        UserError: Encoder, cache or service cannot be used, the catalogue differs, or the self-test fails.
        RetrievalError: The service does not answer.
    """
    if section.backend == "ray":
        from bridges.retrieval.service import connect

        backend: Backend = connect(titles, section)
    else:
        from bridges.retrieval.local import local_backend

        backend = local_backend(titles, section)
    retriever = Retriever(backend, section)
    return retriever, retriever.self_test(titles, required=self_test)
