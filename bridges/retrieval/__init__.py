"""Exact ranks: the position of a query's target among all items of a catalogue.

`open_retriever` gives a `Retriever` over one of two backends with equal results: in this process, or actors of a
Ray cluster that `python -m bridges.retrieval serve` starts.
"""

from collections.abc import Sequence

from bridges.retrieval.local import History, local_backend
from bridges.retrieval.ranking import NonFiniteScores, RetrievalError, ServiceNotFound
from bridges.retrieval.retriever import Backend, Retriever
from grpo_jax.config.sections import RetrievalSection

__all__ = ["History", "NonFiniteScores", "RetrievalError", "ServiceNotFound", "local_backend", "open_retriever"]


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
