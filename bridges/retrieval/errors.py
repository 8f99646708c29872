"""Failures between a text and its rank. None of these ever becomes a number."""

from grpo_jax.errors import UserError


class RetrievalError(RuntimeError):
    """A call gave no ranks: no answer in its time, an actor that stays dead, a cluster that is gone."""


class ServiceNotFound(RetrievalError, UserError):
    """No retrieval service of that name runs; the message says how to start one."""


class NonFiniteScores(RetrievalError):
    """A vector or a score is NaN or infinite."""
