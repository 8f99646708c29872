"""What ranks the catalogue against a completion: its section of the config, and opening it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_jax.config.fields import may_change, require
from grpo_jax.errors import UserError
from grpo_jax.tasks.recommendation.ranking.prior import PriorSection

Ask = Callable[[Sequence[str], Sequence[int], Sequence[Sequence[int]], Sequence[Sequence[int]]], Any]
"""B texts, target rows and histories (rows, oldest first) → the targets' ranks, the histories left out."""


@dataclass(frozen=True)
class RetrievalSection:
    """What ranks the catalogue against a completion.

    Where ranks come from changes none of them; another encoder or catalogue is told by the retriever's own fingerprint.

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
    dense_weight: float = may_change(0.0)
    ties: Literal["against", "average", "favour"] = "against"
    temperature: float = 0.05
    service: str = may_change("retrieval")
    address: str | None = may_change(None)
    timeout: float = may_change(120.0)
    attempts: int = may_change(3)
    budget: int = may_change(5)
    window: int = may_change(100)
    cache: str | None = may_change(None)
    device: str = may_change("cpu")

    def __post_init__(self) -> None:
        """Checks the ranges."""
        require(bool(self.encoder), "retrieval.encoder", "tfidf, a folder or a name", self.encoder)
        require(self.dense_weight >= 0, "retrieval.dense_weight", "a number >= 0", self.dense_weight)
        weighed = "a weight above 0 with retrieval.dense, and 0 without"
        require(
            (self.dense is not None) == (self.dense_weight > 0), "retrieval.dense_weight", weighed, self.dense_weight
        )
        here = self.dense is None or self.backend == "local"
        require(here, "retrieval.dense", "null: a service has one encoder", self.dense)
        for name in ("temperature", "timeout"):
            require(getattr(self, name) > 0, f"retrieval.{name}", "a number > 0", getattr(self, name))
        require(self.attempts >= 1, "retrieval.attempts", "a number >= 1", self.attempts)
        require(self.budget >= 0, "retrieval.budget", "a number >= 0", self.budget)
        require(self.window > self.budget, "retrieval.window", f"more than budget = {self.budget}", self.window)


def open_retriever(
    section: RetrievalSection, titles: Sequence[str], retrieval: Any, *, required: float = 0.9
) -> tuple[Any, float]:
    """A retriever over the titles that has tested itself, and the share of titles that retrieve themselves.

    Args:
        section: Which one.
        titles: Of the catalogue.
        retrieval: The module `bridges.retrieval`.
        required: The least share.

    Raises:
        UserError: The service is not there or holds another catalogue, or titles do not retrieve themselves.
    """
    try:
        return retrieval.open_retriever(
            titles,
            backend=section.backend,
            encoder=section.encoder,
            dense=section.dense,
            dense_weight=section.dense_weight,
            ties=section.ties,
            scale=retrieval.Scale(temperature=section.temperature),
            patience=retrieval.Patience(attempts=section.attempts, budget=section.budget, window=section.window),
            cache=section.cache,
            encoder_device=section.device,
            service=section.service,
            address=section.address,
            timeout=section.timeout,
            self_test=required,
        )
    except retrieval.RetrievalError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"task.retrieval: {error}") from error


def make_ask(retriever: Any, prior: PriorSection, retrieval: Any) -> Ask:
    """How every text of the task is ranked: with the prior's history as a part of the query, or alone.

    query = unit(text) + a · unit(history), a = `prior.history`: a text that says nothing earns what the history does.

    Args:
        retriever: Of `open_retriever`.
        prior: Says how much the history counts, and its decay.
        retrieval: The module `bridges.retrieval`.
    """

    def ask(
        texts: Sequence[str],
        targets: Sequence[int],
        histories: Sequence[Sequence[int]],
        excluded: Sequence[Sequence[int]],
    ) -> Any:
        return retriever.score_ranks(texts, targets, excluded, prior_history(prior, histories, retrieval))

    return ask


def prior_history(prior: PriorSection, histories: Sequence[Sequence[int]], retrieval: Any) -> Any:
    """The part of queries that the prior knows, a `bridges.retrieval.History`; None where it counts nothing."""
    return retrieval.History(histories, prior.history, prior.decay) if prior.history else None
