"""Failures between a text and its rank. None of these ever becomes a number."""

from grpo_jax.errors import UserError


class RetrievalError(RuntimeError):
    """Base class: a call gave no ranks."""


class ServiceNotFound(RetrievalError, UserError):
    """No retrieval service of that name runs; the message says how to start one."""


class ConnectionLost(RetrievalError):
    """The cluster cannot be reached any more."""


class ActorLost(RetrievalError):
    """A shard died, and Ray's own restarts did not bring the call to its end."""


class RetrievalTimeout(RetrievalError):
    """No answer within the time of one call."""


class NonFiniteScores(RetrievalError):
    """A vector or a score is NaN or infinite."""
