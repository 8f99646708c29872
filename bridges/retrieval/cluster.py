"""The Ray cluster of a retrieval service: finding it, joining it, and naming what goes wrong."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridges.pool.cluster import (
    BatchLost,
    NotJoined,
    PoolLate,
    PoolLost,
    TokenRefused,
    cluster_session,
    first_line,
    is_gone,
    is_joined,
    join,
)
from bridges.retrieval.errors import (
    ActorLost,
    ConnectionLost,
    RetrievalError,
    RetrievalTimeout,
    ServiceNotFound,
)
from bridges.retrieval.whereabouts import find_service


def join_cluster(address: str | None, service: str) -> None:
    """Connect this process to a service's cluster, or raise ServiceNotFound; do nothing if it belongs to one already.

    Nothing of the run is placed there before the service itself was found. `address` is HOST:PORT; None or "auto" is
    where this user's `serve` of that name runs, and nowhere else.
    """
    if is_joined():
        return
    known = None
    if address in (None, "auto"):
        known = find_service(service)
        if known is None:
            raise ServiceNotFound(not_found(service, f"none of yours runs here{_foreign()}"))
        address = known.address
    try:
        join(address)
    except TokenRefused as error:
        raise ServiceNotFound(str(error)) from error
    except NotJoined as error:
        raise ServiceNotFound(not_found(service, str(error))) from error
    if known is not None and cluster_session() != known.session:
        import ray

        ray.shutdown()
        raise ServiceNotFound(not_found(service, f"at {address}, where it was, is another Ray cluster"))


def rejoin_cluster(address: str | None, service: str) -> None:
    """Leave a cluster that is gone and join the service's present one, or raise ServiceNotFound."""
    import ray

    if ray.is_initialized() and is_gone():
        ray.shutdown()
    join_cluster(address, service)


def _foreign() -> str:
    """Describe the cluster that Ray itself would have joined."""
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"  # the last `ray start`
    found = os.environ.get("RAY_ADDRESS") or (current.read_text().strip() if current.is_file() else "")
    return f"; the Ray cluster at {found} is joined only if task.retrieval.address names it" if found else ""


@contextmanager
def typed_errors(seconds: float) -> Iterator[None]:
    """Raise a pool's failures, given its limit in seconds, as errors of `bridges.retrieval.errors`."""
    from ray import exceptions

    try:
        yield
    except RetrievalError:  # raised here, or in an actor
        raise
    except PoolLate as error:
        raise RetrievalTimeout(f"no answer within {seconds:g} s") from error
    except (PoolLost, BatchLost) as error:
        raise (ConnectionLost if is_gone() else ActorLost)(f"a shard died, or the cluster is gone: {error}") from error
    except (exceptions.RayError, ConnectionError) as error:
        raise ConnectionLost(first_line(error)) from error
    except Exception as error:
        raise RetrievalError(f"the service failed: {first_line(error)}") from error


def not_found(service: str, reason: str) -> str:
    """Message of `ServiceNotFound`: what is missing, and how to start it."""
    return (
        f"RetrievalService not found: {service!r} ({reason}); start the service with: "
        f"python -m bridges.retrieval serve --catalogue FILE --service {service}"
    )
