"""Errors of a pool. A judge's own exception is none of these: it arrives as it was raised."""

from grpo_jax.errors import StopRun


class PoolLost(StopRun):
    """No actor of a pool is left, or its cluster is gone: the run saves and ends."""


class PoolLate(PoolLost):
    """A pool did not start, or answer, within its time limit."""


class BatchLost(RuntimeError):
    """Every actor that was given a batch died or timed out on it: the judge failed on it."""


class NotRowByRow(TypeError):
    """A judge answered a batch with something else than a value for each of its rows."""
