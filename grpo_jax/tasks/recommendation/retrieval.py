"""Opening what ranks the catalogue against a completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.tasks.recommendation.task import PriorSection, RetrievalSection

Ask = Callable[[Sequence[str], Sequence[int], Sequence[Sequence[int]], Sequence[Sequence[int]]], Any]
"""B texts, target rows and histories (rows, oldest first) → the targets' ranks, the histories left out."""


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
