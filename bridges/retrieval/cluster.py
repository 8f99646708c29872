"""The cluster that a retrieval service is on: how a run finds it, waits for its answers, and names what goes wrong."""

import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridges.pool.cluster import (
    NotJoined,
    TokenRefused,
    cluster_session,
    first_line,
    is_joined,
    join,
    leave_where_gone,
)
from bridges.retrieval.errors import (
    ActorLost,
    ConnectionLost,
    NonFiniteScores,
    RetrievalError,
    RetrievalTimeout,
    ServiceNotFound,
)
from bridges.retrieval.whereabouts import find_service


def join_cluster(address: str | None, service: str) -> None:
    """Connects this process to a service's cluster; nothing if it belongs to one already.

    Nothing of the run is placed there before the service itself was found.

    Args:
        address: host and port; None or "auto" for where this user's `serve` of that name runs, and nowhere else.
        service: name.

    Raises:
        ServiceNotFound: There is no cluster there, it is another one than it was, or it refuses.
        UserError: Ray is not installed.
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
    """Leaves a cluster that is gone and joins the one that the service is on now; nothing if the old one lives.

    Raises:
        ServiceNotFound: There is none.
    """
    leave_where_gone()
    join_cluster(address, service)


def _foreign() -> str:
    """What Ray itself would have joined."""
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"  # the last `ray start`
    found = os.environ.get("RAY_ADDRESS") or (current.read_text().strip() if current.is_file() else "")
    return f"; the Ray cluster at {found} is joined only if task.retrieval.address names it" if found else ""


def fetch(references: list[Any], timeout: float) -> list[Any]:
    """The results of remote calls, or a RetrievalError."""
    import ray

    with typed_errors():
        try:
            return ray.get(references, timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            for reference in references:
                ray.cancel(reference, recursive=False)  # what has not begun need not begin
            raise RetrievalTimeout(f"no answer within {timeout:g} s") from error


@contextmanager
def typed_errors():
    """Ray's errors as those of `bridges.retrieval.errors`."""
    from ray import exceptions

    gone = (exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError)
    lost = (exceptions.ObjectLostError, exceptions.OutOfMemoryError, exceptions.TaskCancelledError)
    cut = (exceptions.RaySystemError, exceptions.RpcError, exceptions.LocalRayletDiedError, ConnectionError)
    try:
        yield
    except RetrievalError as error:
        if isinstance(error, exceptions.RayTaskError):  # raised in the actor: without its traceback
            raise _plain(error) from error
        raise
    except (*gone, *lost) as error:
        # the first line tells that it died, the last one why
        raise ActorLost(f"{first_line(error)} {str(error).splitlines()[-1].strip()}") from error
    except cut as error:
        raise ConnectionLost(first_line(error)) from error
    except exceptions.RayTaskError as error:
        raise RetrievalError(f"the service failed: {first_line(error.cause or error)}") from error
    except exceptions.RayError as error:
        raise RetrievalError(first_line(error)) from error


def _plain(error: Any) -> RetrievalError:
    kind: Callable[[str], RetrievalError] = NonFiniteScores if isinstance(error, NonFiniteScores) else RetrievalError
    return kind(first_line(error.cause))


def not_found(service: str, reason: str) -> str:
    """The message of `ServiceNotFound`: what is missing, and how to start it."""
    return (
        f"RetrievalService not found: {service!r} ({reason}); start the service with: "
        f"python -m bridges.retrieval serve --catalogue FILE --service {service}"
    )
