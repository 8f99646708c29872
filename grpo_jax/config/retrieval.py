"""The section of a retriever: of a run's config, and in Python of `bridges.retrieval`."""

from __future__ import annotations

from typing import Literal, get_args

from grpo_jax.config.fields import (
    Count,
    NonNegative,
    Positive,
    PositiveCount,
    Section,
    require,
    resume_mutable,
)

Ties = Literal["against", "average", "favour"]


class RetrievalSection(Section):
    """What ranks the catalogue against a completion.

    Both backends give the same ranks; the retriever's own fingerprint identifies its encoder and catalogue.
    """

    backend: Literal["local", "ray"] = resume_mutable("local")
    """"local" ranks in this process; "ray" asks a service that `python -m bridges.retrieval serve` started."""
    encoder: str = resume_mutable("tfidf")
    """"tfidf", or a folder or hub name of a sentence-transformers model."""
    dense: str | None = resume_mutable(None)
    """A sentence-transformers model whose cosine is added to the encoder's (local); null for the encoder alone."""
    dense_weight: NonNegative = resume_mutable(0.0)
    """How many times it is added; 0 without `dense`."""
    ties: Ties = "against"
    """Where items that score like the target stand: "against" before it, "average", or "favour" behind it."""
    temperature: Positive = 0.05
    """Of the softmax over similarities that the reward "soft" is read from."""
    service: str = resume_mutable("retrieval")
    """Name of the service (ray)."""
    address: str | None = resume_mutable(None)
    """HOST:PORT of the Ray cluster; null or "auto" for where your own `serve` of that name runs."""
    timeout: Positive = resume_mutable(120.0)
    """Seconds one attempt of a call may take (ray)."""
    attempts: PositiveCount = resume_mutable(3)
    """Tries of one call before its ranks count as missing."""
    budget: Count = resume_mutable(5)
    """Calls that may go missing among the last `window`; one more saves and stops the run."""
    window: Count = resume_mutable(100)
    """Calls that are remembered."""
    cache: str | None = resume_mutable(None)
    """Folder that keeps the catalogue's vectors between runs (local); null keeps none."""
    device: str = resume_mutable("cpu")
    """Of a sentence-transformers model in this process: "cpu" or "gpu:N"."""

    def __post_init__(self) -> None:
        require(self.backend in ("local", "ray"), "backend", "local or ray", self.backend)
        require(self.ties in get_args(Ties), "ties", f"one of {', '.join(get_args(Ties))}", self.ties)
        require(bool(self.encoder), "encoder", "tfidf, a folder or a name", self.encoder)
        weighed = "a weight above 0 with retrieval.dense, and 0 without"
        require((self.dense is not None) == (self.dense_weight > 0), "dense_weight", weighed, self.dense_weight)
        here = self.dense is None or self.backend == "local"
        require(here, "dense", "null: a service has one encoder", self.dense)
        require(self.window > self.budget, "window", f"more than budget = {self.budget}", self.window)
