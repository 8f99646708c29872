"""The section of a retriever: of a run's config, and in Python of `bridges.retrieval`."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import MinLen

from grpo_jax.config.fields import Positive, Section, resume_mutable


class RetrievalSection(Section):
    """What ranks the catalogue against a completion.

    Both backends give the same ranks; the retriever's own fingerprint identifies its encoder and catalogue.
    """

    backend: Literal["local", "ray"] = resume_mutable("local")
    """"local" ranks in this process; "ray" asks a service that `python -m bridges.retrieval serve` started."""
    encoder: Annotated[str, MinLen(1)] = resume_mutable("tfidf")
    """"tfidf", or a folder or hub name of a sentence-transformers model."""
    service: str = resume_mutable("retrieval")
    """Name of the service (ray)."""
    address: str | None = resume_mutable(None)
    """HOST:PORT of the service's Ray cluster, as `serve` prints it (ray)."""
    timeout: Positive = resume_mutable(120.0)
    """Seconds one attempt of a call may take (ray)."""
    cache: str | None = resume_mutable(None)
    """Folder that keeps the catalogue's vectors between runs (local); null keeps none."""
    device: str = resume_mutable("cpu")
    """Of a sentence-transformers model in this process: "cpu" or "gpu:N"."""
