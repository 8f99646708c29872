"""What can go wrong in a pool. A judge's own exception is none of these: it arrives as it was raised."""

from grpo_jax.errors import StopRun


class PoolLost(StopRun):
    """No actor of a pool is left, or its cluster is gone: the run saves and ends."""


class PoolLate(PoolLost):
    """A pool did not start, or answer, within the time that it was given."""


class BatchLost(RuntimeError):
    """Every actor that was given a batch died over it or was too late: the judge failed on it."""


class NotRowByRow(TypeError):
    """A judge answered a batch with something else than a value for each of its rows."""
