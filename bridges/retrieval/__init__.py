"""Exact ranks: the position of a query's target among all items of a catalogue.

`open_retriever` gives a `Retriever` over one of two backends with equal results: in this process, or actors of a
Ray cluster that `python -m bridges.retrieval serve` starts.
"""

from collections.abc import Sequence

from bridges.retrieval.catalogue import Fingerprint, default_cache
from bridges.retrieval.errors import NonFiniteScores, RetrievalError, ServiceNotFound
from bridges.retrieval.queries import History
from bridges.retrieval.ranking import Ranks, Scale, Ties
from bridges.retrieval.retriever import Backend, Patience, Retriever, RetrieverSection

__all__ = [
    "Fingerprint",
    "History",
    "NonFiniteScores",
    "Patience",
    "Ranks",
    "RetrievalError",
    "Retriever",
    "RetrieverSection",
    "Scale",
    "ServiceNotFound",
    "Ties",
    "default_cache",
    "open_retriever",
]


def open_retriever(
    titles: Sequence[str],
    section: RetrieverSection = RetrieverSection(),
    *,
    ties: Ties = "against",
    scale: Scale = Scale(),
    patience: Patience = Patience(),
    self_test: float = 0.9,
) -> tuple[Retriever, float]:
    """Make a retriever and run its self-test.

    Args:
        titles: Of all items, in the order of their rows; "" where an item has none.
        section: Backend and encoder.
        ties: Where items that score like the target stand: "against" before it, "average", or "favour".
        scale: Temperature of the soft probability; scores closer than the tolerance tie.
        patience: Retries, and the budget of failed calls.
        self_test: Share of titles that must retrieve themselves.

    Returns:
        The retriever, and the share of titles that retrieve themselves.

    Raises:
        UserError: Encoder, cache or service cannot be used, the catalogue differs, or the self-test fails.
        RetrievalError: The service does not answer.
    """
    if section.dense is not None and not (section.backend == "local" and section.dense_weight > 0):
        combination = f"{section.backend!r} and {section.dense_weight}"
        raise ValueError(f"dense: expected backend local and dense_weight > 0, got {combination}")
    if section.backend == "ray":
        from bridges.retrieval.service import connect

        backend: Backend = connect(titles, section)
    elif section.backend != "local":
        raise ValueError(f'backend: expected "local" or "ray", got {section.backend!r}')
    else:
        from bridges.retrieval.local import local_backend

        backend = local_backend(titles, section)
    retriever = Retriever(backend, ties=ties, scale=scale, patience=patience)
    return retriever, retriever.self_test(titles, required=self_test)
