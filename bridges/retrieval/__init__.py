"""Exact ranks: the position of a query's target among all items of a catalogue.

`open_retriever` gives a `Retriever` over one of two backends with equal results: in this process, or actors of a
Ray cluster that `python -m bridges.retrieval serve` starts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridges.retrieval.catalogue import Fingerprint, default_cache, require_same
from bridges.retrieval.errors import (
    ActorLost,
    ConnectionLost,
    NonFiniteScores,
    RetrievalError,
    RetrievalTimeout,
    ServiceNotFound,
)
from bridges.retrieval.queries import History
from bridges.retrieval.ranking import Ranks, Scale, Ties
from bridges.retrieval.retriever import Patience, Retriever

__all__ = [
    "ActorLost",
    "ConnectionLost",
    "Fingerprint",
    "History",
    "NonFiniteScores",
    "Patience",
    "Ranks",
    "RetrievalError",
    "RetrievalTimeout",
    "Retriever",
    "Scale",
    "ServiceNotFound",
    "Ties",
    "default_cache",
    "open_retriever",
    "require_same",
]


def open_retriever(
    titles: Sequence[str],
    *,
    backend: str = "local",
    encoder: str = "tfidf",
    dense: str | None = None,
    dense_weight: float = 0.0,
    ties: Ties = "against",
    scale: Scale = Scale(),
    patience: Patience = Patience(),
    cache: str | Path | None = None,
    encoder_device: str = "cpu",
    device: Any = None,
    service: str = "retrieval",
    address: str | None = None,
    timeout: float = 120.0,
    self_test: float = 0.9,
) -> tuple[Retriever, float]:
    """Make a retriever and run its self-test.

    Args:
        titles: Of all items, in the order of their rows; "" where an item has none.
        backend: "local", or "ray" for a service that runs already.
        encoder: "tfidf", a folder of a sentence-transformers model, or its name on the hub. A service was started
            with one of its own: it must be the same.
        dense: Local: a second encoder, whose cosine is added to the first one's; None for one alone.
        dense_weight: Factor of the second encoder's cosine.
        ties: Where items that score like the target stand: "against" before it, "average", or "favour".
        scale: Temperature of the soft probability; scores closer than the tolerance tie.
        patience: Retries, and the budget of failed calls.
        cache: Local: folder that keeps the catalogue's vectors between runs, or None.
        encoder_device: Local: "cpu" or "gpu:N" for a sentence-transformers model.
        device: Local: JAX device of the comparison of dense vectors; None for the CPU.
        service: Ray: name of the service.
        address: Ray: host and port of the cluster; None or "auto" for where this user's `serve` of that name runs.
        timeout: Ray: seconds one attempt of a call may take.
        self_test: Share of titles that must retrieve themselves.

    Returns:
        The retriever, and the share of titles that retrieve themselves.

    Raises:
        UserError: Encoder, cache or service cannot be used, the catalogue differs, or the self-test fails.
        RetrievalError: The service does not answer.
    """
    if dense is not None:
        from bridges.retrieval.hybrid import hybrid_backend

        if backend != "local" or not dense_weight > 0:
            raise ValueError(f"dense: expected backend local and dense_weight > 0, got {backend!r} and {dense_weight}")
        made: Any = hybrid_backend(titles, (encoder, dense), dense_weight, cache=cache, device=encoder_device)
    elif backend == "local":
        from bridges.retrieval.local import local_backend

        made = local_backend(titles, encoder=encoder, cache=cache, encoder_device=encoder_device, device=device)
    elif backend == "ray":
        from bridges.retrieval.service import connect

        made = connect(titles, encoder=encoder, service=service, address=address, timeout=timeout)
    else:
        raise ValueError(f'backend: expected "local" or "ray", got {backend!r}')
    retriever = Retriever(made, ties=ties, scale=scale, patience=patience)
    return retriever, retriever.self_test(titles, required=self_test)
