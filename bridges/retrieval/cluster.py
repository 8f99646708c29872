"""A Ray cluster: how this process joins one, waits for answers, and names what goes wrong."""

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from bridges.retrieval.whereabouts import find_service
from grpo_jax.errors import UserError

NAMESPACE = "grpo_jax"
LOOPBACK = "127.0.0.1"
_PROBE_SECONDS = 10.0
_OBJECT_STORE = 256 * 2**20  # bytes, of a cluster started here: only queries and counts pass through it


def cluster_address() -> str:
    """Host and port of the cluster that this process has joined: what `connect` takes as its address."""
    import ray

    return ray.get_runtime_context().gcs_address


def cluster_session() -> str:
    """Name of the session of the cluster that this process has joined: no other cluster has it."""
    import ray

    return ray.get_runtime_context().get_session_name()


def start_cluster(host: str = LOOPBACK) -> None:
    """Starts a cluster on this machine for this process, with a token; nothing if the process belongs to one already.

    Args:
        host: address by which it is reached. Of a loopback address nothing outside this machine reaches any part of it;
            with another Ray listens on every interface.

    Raises:
        UserError: Ray is not installed, does not start, or `host` is not of this machine.
    """
    ray = _import_ray(token=True)
    if ray.is_initialized():
        return
    _require_own(host)
    # training waits for the ranks, and Ray's workers would run at the lowest priority of the machine
    os.environ.setdefault("RAY_worker_niceness", "0")
    options = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE, "_node_ip_address": host}
    _stay_on_loopback(_is_loopback(host))
    try:
        _init(address="local", **options)  # and not the cluster that RAY_ADDRESS names
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(f"Ray does not start on {host}: {_first_line(error)}") from error
    if _is_loopback(host) and not _is_loopback(listening := cluster_address()):
        ray.shutdown()
        raise UserError(f"this version of Ray listens on {listening} in place of {host}; install ray 2.60 or newer")


def join_cluster(address: str | None, service: str) -> None:
    """Connects this process to a service's cluster; nothing if it belongs to one already.

    Nothing of the run is placed there before the service itself was found. Ray's own handler of SIGTERM is taken away.

    Args:
        address: host and port; None or "auto" for where this user's `serve` of that name runs, and nowhere else.
        service: name.

    Raises:
        ServiceNotFound: There is no cluster there, it is another one than it was, or it refuses.
        UserError: Ray is not installed.
    """
    ray = _import_ray(token=_has_token())
    if ray.is_initialized():
        return
    known = None
    if address in (None, "auto"):
        known = find_service(service)
        if known is None:
            raise ServiceNotFound(not_found(service, f"none of yours runs here{_foreign()}"))
        address = known.address
    if not answers(address):
        raise ServiceNotFound(not_found(service, f"no Ray cluster answers at {address}"))
    _stay_on_loopback(_is_loopback(address))
    try:
        _init(address=address)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if _is_about_a_token(error):
            raise ServiceNotFound(
                f"the Ray cluster at {address} asks for a token and this process has none or another: set RAY_AUTH_MODE"
                "=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to that of `serve` (by default ~/.ray/auth_token)"
            ) from error
        reason = f"the Ray cluster at {address} cannot be joined: {_first_line(error)}"
        raise ServiceNotFound(not_found(service, reason)) from error
    if known is not None and cluster_session() != known.session:
        ray.shutdown()
        raise ServiceNotFound(not_found(service, f"at {address}, where it was, is another Ray cluster"))


def rejoin_cluster(address: str | None, service: str) -> None:
    """Leaves a cluster that is gone and joins the one that the service is on now; nothing if the old one lives.

    Raises:
        ServiceNotFound: There is none.
    """
    import ray

    if ray.is_initialized() and not answers(cluster_address()):
        ray.shutdown()
    join_cluster(address, service)


def _import_ray(*, token: bool) -> Any:
    """Ray, which reads its settings when it is imported; with `token` it shows and asks for one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray ends a process whose cluster has been gone for a minute; a training run must live to save
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "1000000")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")  # seconds of trying to join what answers
    if token and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise UserError("the retrieval service needs Ray: pip install grpo_jax[recommendation]") from error
    return ray


def _require_own(host: str) -> None:
    """Ray itself would try for minutes to listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        raise UserError(f"--host {host} is no address of this machine ({error.strerror}); see `hostname -I`") from error


def _init(**options: Any) -> None:
    import ray

    with own_signals(), _quiet():
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **options)


def _stay_on_loopback(stay: bool) -> None:
    """Ray's one switch for it, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER; else it takes 127.0.0.1 for the machine's address."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = not stay


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0] if address.count(":") == 1 else address.partition("]:")[0].removeprefix("[")
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _has_token() -> bool:
    named = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return any(name in os.environ for name in named) or Path("~/.ray/auth_token").expanduser().is_file()


def _is_about_a_token(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__name__ == "AuthenticationError" or "InvalidAuthToken" in str(error):
            return True
        error = error.__cause__
    return False


def _foreign() -> str:
    """What Ray itself would have joined."""
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"  # the last `ray start`
    found = os.environ.get("RAY_ADDRESS") or (current.read_text().strip() if current.is_file() else "")
    return f"; the Ray cluster at {found} is joined only if task.retrieval.address names it" if found else ""


def answers(address: str) -> bool:
    """Whether something listens there: Ray itself would try for minutes. True where only Ray can tell."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what Ray's C++ writes to standard error; shown where the block succeeds, else the error says it."""
    with tempfile.TemporaryFile() as kept:
        terminal = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
        kept.seek(0)
        with suppress(OSError):
            os.write(2, kept.read())


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
        f"RetrievalService not found: {service!r} ({reason}); start the service with: "
        f"python -m bridges.retrieval serve --catalogue FILE --service {service}"
    )
