"""A Ray cluster: how this process starts, joins and leaves one; errors of a pool on it."""

import json
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_jax.errors import ABANDONED, StopRun, UserError

NAMESPACE = "grpo_jax"
LOOPBACK = "127.0.0.1"
PROBE_SECONDS = 5.0
"""For which an answer is waited for until the cluster is asked whether it is there."""
_LEAVE_SECONDS = 2.0  # for Ray to notice that there is nothing to leave any more
_END_SECONDS = 60.0  # for ending a cluster; one that dies just then Ray would wait for for ever
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # a frame of HTTP/2, its kind in the fourth byte


class NotJoined(UserError):
    """No cluster at an address, or it refuses this process."""


class TokenRefused(NotJoined):
    """The cluster asks for a token that this process has not."""


class PoolLost(StopRun):
    """No actor of a pool is left, or its cluster is gone: the run saves and ends."""


class PoolLate(PoolLost):
    """A pool did not start, or answer, within its time limit."""


class ActorLost(PoolLost):
    """An actor died; Ray may start it again."""


class BatchLost(RuntimeError):
    """Every actor that was given a batch died or timed out on it: the judge failed on it."""


class NotRowByRow(TypeError):
    """A judge answered a batch with something else than a value for each of its rows."""


def cluster_address() -> str:
    """Host and port of the joined cluster, as `join` takes them."""
    import ray

    return ray.get_runtime_context().gcs_address


def cluster_session() -> str:
    """Session name of the joined cluster: no other cluster has it."""
    import ray

    return ray.get_runtime_context().get_session_name()


def is_joined() -> bool:
    """Tell whether this process belongs to a cluster; Ray is imported with a token where this user has one."""
    return import_ray(token=_has_token()).is_initialized()


def start_cluster(host: str = LOOPBACK, *, object_store: int | None = None) -> None:
    """Start a cluster with a token on this machine; do nothing if this process belongs to one already.

    With a loopback `host` nothing outside this machine reaches any part of it; with another Ray listens on every
    interface. `object_store` is in bytes; None for Ray's own choice.
    """
    ray = import_ray(token=True)
    if ray.is_initialized():
        return
    try:
        socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0]).close()
    except OSError as error:  # Ray itself would try for minutes to listen there
        raise UserError(f"--host {host} is no address of this machine ({error.strerror}); see `hostname -I`") from error
    # training waits for the answers, and Ray's workers would run at the lowest priority of the machine
    os.environ.setdefault("RAY_worker_niceness", "0")
    options = {"include_dashboard": False, "object_store_memory": object_store, "_node_ip_address": host}
    _stay_on_loopback(_is_loopback(host))
    for attempts_left in (2, 1, 0):  # Ray waits half a minute for its own processes, which is little on a busy machine
        try:
            _init(address="local", **options)  # and not the cluster that RAY_ADDRESS names
            break
        except Exception as error:
            _shut_down()
            if not attempts_left:
                raise UserError(f"Ray does not start on {host}: {first_line(error)}") from error
    if _is_loopback(host) and not _is_loopback(listening := cluster_address()):
        ray.shutdown()
        raise UserError(f"this version of Ray listens on {listening} in place of {host}; install ray 2.60 or newer")


def join(address: str) -> None:
    """Connect to a cluster at HOST:PORT, or raise NotJoined; do nothing if this process belongs to one.

    Ray's signal handlers are undone.
    """
    ray = import_ray(token=_has_token())
    if ray.is_initialized():
        return
    if not answers(address):
        raise NotJoined(f"no Ray cluster answers at {address}")
    if not answers(address, grpc=True):
        raise NotJoined(f"what answers at {address} is no Ray cluster; its owner sees HOST:PORT when it starts")
    _stay_on_loopback(_is_loopback(address))
    try:
        _init(address=address)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if re.search("AuthenticationError|InvalidAuthToken", "".join(traceback.format_exception(error))):
            raise TokenRefused(
                f"the Ray cluster at {address} asks for a token and this process has none or another: set RAY_AUTH_MODE"
                "=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's (by default ~/.ray/auth_token)"
            ) from error
        raise NotJoined(f"the Ray cluster at {address} cannot be joined: {first_line(error)}") from error


_lock = threading.Lock()
_users: list[tuple[str | None, bool]] = []
"""For each pool of this process the address, the same for all, and whether the first pool came to the cluster."""


def enter(address: str | None) -> None:
    """Enter a cluster at HOST:PORT for one pool; the first pool starts or joins it.

    None is one started on this machine, or the one that this process belongs to already. UserError if other pools of
    this process are on another one.
    """
    ray = import_ray(token=address is None or _has_token())
    with _lock:
        if _users and address != _users[0][0]:
            raise UserError(f"expected the address of the run's other pools, {_users[0][0]}, got {address}")
        ours = _users[0][1] if _users else not ray.is_initialized()
        if address is None:
            start_cluster()
        else:
            join(address)
        _users.append((address, ours))


def leave() -> None:
    """Leave for one pool; the last ends or leaves the cluster that the first came to."""
    with _lock:
        _, ours = _users.pop()
        if not _users and ours:
            leaving = threading.Thread(target=_shut_down, name=f"{ABANDONED}ray", daemon=True)
            gone = is_gone()
            leaving.start()
            leaving.join(_LEAVE_SECONDS if gone else _END_SECONDS)


def _shut_down() -> None:
    import ray

    with own_signals(), suppress(Exception):
        ray.shutdown()


def is_gone() -> bool:
    """Tell whether the cluster of this process no longer answers, asked twice."""
    import ray

    with suppress(Exception):  # of a connection that is being closed
        return not ray.is_initialized() or not any(answers(cluster_address()) for _ in range(2))
    return True


def grows() -> bool:
    """Tell whether autoscaling may add machines to the cluster: not where its own monitor is read-only.

    That is so of machines put together by hand (`ray start`): Ray names each kind of them by a number.
    """
    from ray.experimental import internal_kv

    for _ in range(20):  # a cluster that has just started says nothing yet
        with suppress(Exception):
            status = json.loads(internal_kv._internal_kv_get("__autoscaling_status"))
            if kinds := status["autoscaler_report"]["active_nodes"]:
                return not all(re.fullmatch(r"node_[0-9a-f]{56}", kind) for kind in kinds)
        time.sleep(0.5)
    return True


def ready(references: list[Any], seconds: float, count: int = 1) -> list[Any]:
    """Wait until `count` of the values are there; return the references of those that are after some seconds.

    PoolLost if the cluster is gone.
    """
    import ray

    came, _ = attempt(ray.wait, references, num_returns=count, timeout=max(seconds, 0.0))
    if len(came) < count and is_gone():
        raise PoolLost("nothing answers any more where the Ray cluster was")
    return came


def get(references: list[Any], seconds: float = math.inf) -> list[Any]:
    """Wait for values, and fetch them.

    Raises:
        PoolLate: Not all have come within the seconds.
        ActorLost: The actor died that had one of them.
        PoolLost: The cluster is gone, or the machine that had one of them.
        Exception: Raised by a judge in an actor, as it was raised there.
    """
    import ray

    deadline = time.monotonic() + seconds
    while len(ready(references, min(PROBE_SECONDS, deadline - time.monotonic()), len(references))) < len(references):
        if time.monotonic() >= deadline:
            raise PoolLate(f"no answer within {seconds:g} s")
    return attempt(ray.get, references)


def attempt(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of Ray's; what fails is raised as `get` does."""
    from ray import exceptions

    try:
        return call(*arguments, **options)
    except (exceptions.RayTaskError, exceptions.UnserializableException) as error:
        raise judge_error(error) from None
    except exceptions.RayActorError as error:
        raise ActorLost(f"an actor died: {last_line(error)}") from error
    except Exception as error:
        if not (isinstance(error, exceptions.RayError | ConnectionError) or is_gone()):
            raise
        raise PoolLost(f"the Ray cluster, or a machine of it, is gone: {last_line(error)}") from error


def judge_error(error: Exception) -> BaseException:
    """Return the exception that a judge raised in an actor; a RuntimeError where this process has not its class."""
    from ray.exceptions import RayError

    cause = getattr(error, "cause", None)
    if cause is None or isinstance(cause, RayError):
        cause = RuntimeError(last_line(error))
    cause.add_note(f"In the actor:\n{error}")
    return cause


def import_ray(*, token: bool) -> Any:
    """Import Ray, which reads its settings then; with `token` it shows and asks for one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray ends a process whose cluster has been gone for a minute; a training run must live to save
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "1000000")
    # where its raylet is gone too, if its parent is process 1, as in a container or behind a shell that has ended
    os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")  # seconds of trying to join what answers
    if token and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    excepthook = sys.excepthook
    try:
        import ray
    except ImportError as error:
        raise UserError('Ray is not installed; run pip install "grpo_jax[ray]"') from error
    # Ray's own hook reports a traceback to the cluster before it prints it, and waits for ever where that is gone
    sys.excepthook = excepthook
    return ray


def _init(**options: Any) -> None:
    import ray

    with own_signals(), _quiet():
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **options)


def _stay_on_loopback(stay: bool) -> None:
    """Set Ray's one switch for it (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER): else Ray takes the machine's own address."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = not stay


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0] if address.count(":") == 1 else address.partition("]:")[0].removeprefix("[")
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _has_token() -> bool:
    file = Path("~/.ray/auth_token").expanduser()
    return "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ or file.is_file()


def answers(address: str, *, grpc: bool = False) -> bool:
    """Tell whether something listens at HOST:PORT, with `grpc` whether it speaks HTTP/2: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS) as connection:
            if not grpc:
                return True
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
            return connection.recv(9)[3:4] == _SETTINGS[3:4]
    except (OSError, ValueError):
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what Ray's C++ writes to standard error; shown where the block succeeds, else the error says it."""
    with tempfile.TemporaryFile() as captured:
        terminal = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
        captured.seek(0)
        with suppress(OSError):
            os.write(2, captured.read())


@contextmanager
def own_signals() -> Iterator[None]:
    """Restore the signal handlers: the training loop saves on SIGTERM, Ray would leave at once."""
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


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}".removesuffix(": ")


def last_line(error: BaseException) -> str:
    """The last line of an error's message, where Ray says why an actor died or what a judge raised."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
