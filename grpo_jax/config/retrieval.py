"""The section of a retriever: of a run's config, and in Python of `bridges.retrieval`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from grpo_jax.config.fields import Count, NonNegative, Positive, PositiveCount, check_ranges, may_change, require

Ties = Literal["against", "average", "favour"]


@dataclass(frozen=True)
class RetrievalSection:
    """What ranks the catalogue against a completion.

    Both backends give the same ranks; the retriever's own fingerprint identifies its encoder and catalogue.

    Args:
        backend: "local" ranks in this process; "ray" asks a service that `python -m bridges.retrieval serve` started.
        encoder: "tfidf", or a folder or hub name of a sentence-transformers model.
        dense: A sentence-transformers model whose cosine is added to the encoder's (local); null for the encoder alone.
        dense_weight: How many times it is added; 0 without `dense`.
        ties: Where items that score like the target stand: "against" before it, "average", or "favour" behind it.
        temperature: Of the softmax over similarities that the reward "soft" is read from.
        service: Name of the service (ray).
        address: HOST:PORT of the Ray cluster; null or "auto" for where your own `serve` of that name runs.
        timeout: Seconds one attempt of a call may take (ray).
        attempts: Tries of one call before its ranks count as missing.
        budget: Calls that may go missing among the last `window`; one more saves and stops the run.
        window: Calls that are remembered.
        cache: Folder that keeps the catalogue's vectors between runs (local); null keeps none.
        device: Of a sentence-transformers model in this process: "cpu" or "gpu:N".
    """

    backend: Literal["local", "ray"] = may_change("local")
    encoder: str = may_change("tfidf")
    dense: str | None = may_change(None)
    dense_weight: NonNegative = may_change(0.0)
    ties: Ties = "against"
    temperature: Positive = 0.05
    service: str = may_change("retrieval")
    address: str | None = may_change(None)
    timeout: Positive = may_change(120.0)
    attempts: PositiveCount = may_change(3)
    budget: Count = may_change(5)
    window: Count = may_change(100)
    cache: str | None = may_change(None)
    device: str = may_change("cpu")

    def __post_init__(self) -> None:
        check_ranges(self, "retrieval")
        require(self.backend in ("local", "ray"), "retrieval.backend", "local or ray", self.backend)
        require(self.ties in get_args(Ties), "retrieval.ties", f"one of {', '.join(get_args(Ties))}", self.ties)
        require(bool(self.encoder), "retrieval.encoder", "tfidf, a folder or a name", self.encoder)
        weighed = "a weight above 0 with retrieval.dense, and 0 without"
        require(
            (self.dense is not None) == (self.dense_weight > 0), "retrieval.dense_weight", weighed, self.dense_weight
        )
        here = self.dense is None or self.backend == "local"
        require(here, "retrieval.dense", "null: a service has one encoder", self.dense)
        require(self.window > self.budget, "retrieval.window", f"more than budget = {self.budget}", self.window)
