"""A Ray cluster: how this process joins one, waits for answers, and names what goes wrong."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridges.retrieval.errors import (
    ActorLost,
    ConnectionLost,
    NonFiniteScores,
    RetrievalError,
    RetrievalTimeout,
    ServiceNotFound,
)
from grpo_jax.errors import UserError

NAMESPACE = "grpo_jax"
_PROBE_SECONDS = 10.0
_OBJECT_STORE = 256 * 2**20  # bytes, of a cluster started here: only queries and counts pass through it


def cluster_address() -> str:
    """Host and port of the cluster that this process has joined: what `connect` takes as its address."""
    import ray

    return ray.get_runtime_context().gcs_address


def join_cluster(address: str | None, service: str) -> None:
    """Connects this process to a cluster, or with None starts one; Ray's own handler of SIGTERM is taken away.

    Does nothing if the process belongs to one already.

    Raises:
        ServiceNotFound: There is no cluster there, or it refuses.
        UserError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray ends a process whose cluster has been gone for a minute; a training run must live to save
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "1000000")
    try:
        import ray
    except ImportError as error:
        raise UserError("the retrieval service needs Ray: pip install grpo_jax[recommendation]") from error
    if ray.is_initialized():
        return
    if address is not None and not _answers(address):
        raise ServiceNotFound(not_found(service, f"no Ray cluster answers at {address}"))
    new = {}
    if address is None:
        # training waits for the ranks, and Ray's workers would run at the lowest priority of the machine
        os.environ.setdefault("RAY_worker_niceness", "0")
        new = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    try:
        with own_signals():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **new)
    except (ConnectionError, RuntimeError) as error:
        reason = f"the Ray cluster at {address} cannot be joined: {_first_line(error)}"
        if address not in (None, "auto") and "RAY_AUTH_MODE" not in os.environ:
            reason += "; if it asks for a token, as Ray's own do from 2.60 on, set RAY_AUTH_MODE=token"
        raise ServiceNotFound(not_found(service, reason)) from error


def rejoin_cluster(address: str, service: str) -> None:
    """Leaves a cluster that is gone and joins the one that is at that address now; nothing if the old one lives.

    Raises:
        ServiceNotFound: There is none.
    """
    import ray

    if ray.is_initialized() and not _answers(cluster_address()):
        ray.shutdown()
    join_cluster(address, service)


def _answers(address: str) -> bool:
    """Whether something listens there: Ray itself would try for minutes. True where only Ray can tell."""
    if address == "auto":  # Ray keeps the address of this machine's cluster in a file, also of one that was killed
        known = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        address = known.read_text().strip() if known.is_file() else ""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return True
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


@contextmanager
def own_signals():
    """Handlers as they were: the training loop saves on SIGTERM, Ray would leave at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python
                signal.signal(number, handler)


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
        raise ActorLost(f"{_first_line(error)} {str(error).splitlines()[-1].strip()}") from error
    except cut as error:
        raise ConnectionLost(_first_line(error)) from error
    except exceptions.RayTaskError as error:
        raise RetrievalError(f"the service failed: {_first_line(error.cause or error)}") from error
    except exceptions.RayError as error:
        raise RetrievalError(_first_line(error)) from error


def _plain(error: Any) -> RetrievalError:
    kind: Callable[[str], RetrievalError] = NonFiniteScores if isinstance(error, NonFiniteScores) else RetrievalError
    return kind(_first_line(error.cause))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def not_found(service: str, reason: str) -> str:
    """The message of `ServiceNotFound`: what is missing, and how to start it."""
    return (
        f"RetrievalService not found: {service!r} ({reason}). `ray status` shows whether a cluster runs; start the "
        f"service with: python -m bridges.retrieval serve --catalogue FILE --service {service}"
    )
