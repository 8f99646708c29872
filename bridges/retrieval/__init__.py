"""Texts in, exact ranks out: how high the item that came next stands among all items of a catalogue.

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
    """A retriever that has passed its self-test.

    Args:
        titles: of all items, in the order of their rows; "" where an item has none.
        backend: "local", or "ray" for a service that runs already.
        encoder: "tfidf", a folder of a sentence-transformers model, or its name on the hub. A service was started
            with one of its own: it must be the same.
        dense: local: a second encoder, whose cosine is added to the first one's; None for one alone.
        dense_weight: how many times it is added.
        ties: where items that score like the target stand: "against" before it, "average", or "favour".
        scale: temperature of the soft probability; scores closer than the tolerance tie.
        patience: with failures.
        cache: local: folder that keeps the catalogue's vectors between runs, or None.
        encoder_device: local: "cpu" or "gpu:N" for a sentence-transformers model.
        device: local: JAX device of the comparison of dense vectors; None for the CPU.
        service: ray: name of the service.
        address: ray: host and port of the cluster; None or "auto" for where this user's `serve` of that name runs.
        timeout: ray: seconds one attempt of a call may take.
        self_test: share of titles that must retrieve themselves.

    Returns:
        The retriever, and the share of titles that retrieve themselves.

    Raises:
        UserError: the encoder, the cache, the service or the catalogue is not as it should be.
        RetrievalError: the service does not answer.
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
