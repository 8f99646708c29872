"""A Ray cluster: how this process starts, joins and leaves one, and waits for its answers."""

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
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_jax.errors import ABANDONED, StopRun, UserError, one_line

NAMESPACE = "grpo_jax"
LOOPBACK = "127.0.0.1"
_PROBE_SECONDS = 5.0  # for which an answer is waited for until the cluster is asked whether it is there
_END_SECONDS = 60.0  # for ending a cluster; one that dies just then Ray would wait for for ever
_HTTP2 = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # a frame of settings, its kind in the fourth byte
_SETTINGS = {  # Ray reads them when it is imported
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    "RAY_NUM_REDIS_GET_RETRIES": "5",  # seconds of trying to join what answers
    "RAY_worker_niceness": "0",  # Ray's workers would run at the lowest priority of the machine
    # Ray ends a process whose cluster has been gone for a minute; a training run must live to save
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000",
    # where its raylet is gone too, if its parent is process 1, as in a container or behind a shell that has ended
    "RAY_RAYLET_PID": str(os.getpid()),
}


class TokenRefused(UserError):
    """The cluster asks for a token that this process has not."""


class PoolLost(StopRun):
    """No actor of a pool is left, or its cluster is gone: the run saves and ends."""


class PoolLate(PoolLost):
    """A pool did not start, or answer, within its time limit."""


class ActorLost(PoolLost):
    """An actor died; Ray may start it again."""


def import_ray(*, token: bool) -> Any:
    """Import Ray with the settings of a run; with `token` it shows and asks for one."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", "Zero-copy tensor serialization")  # tensors are contiguous, and copied at the end
    if token and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    excepthook = sys.excepthook
    import ray

    # Ray's own hook reports a traceback to the cluster before it prints it, and waits for ever where that is gone
    sys.excepthook = excepthook
    return ray


def join(address: str | None, *, cards: Sequence[str] | None = None, object_store: int | None = None) -> None:
    """Join the cluster at HOST:PORT, or start one that this machine alone reaches; keep one that was joined before.

    `cards` are those of a cluster that is started (None: all), `object_store` its bytes (None: Ray's own choice).
    UserError without one. Ray's signal handlers are undone.
    """
    ray = import_ray(token=address is None or _has_token())
    if ray.is_initialized():
        return
    if address is not None and not answers(address):
        raise UserError(f"no Ray cluster answers at {address}")
    if address is not None and not answers(address, grpc=True):
        raise UserError(f"what answers at {address} is no Ray cluster; its owner sees HOST:PORT when it starts")
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = address is not None and not _is_loopback(address)  # else it leaves loopback
    options: dict[str, Any] = {"address": address}
    if address is None:  # "local", and not the cluster that RAY_ADDRESS names
        options = {"address": "local", "include_dashboard": False, "object_store_memory": object_store}
        options["_node_ip_address"] = LOOPBACK
    for attempts_left in (0,) if address else (2, 1, 0):  # Ray gives its own processes half a minute, little if busy
        try:
            with _own_signals(), _quiet(), _visible(cards):
                ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **options)
            break
        except Exception as error:
            _shut_down()
            if not attempts_left:
                raise _refusal(address, error) from error
    if address is None and not _is_loopback(cluster_address()):
        ray.shutdown()
        raise UserError("this version of Ray does not stay on loopback; install ray 2.60 or newer")


def _refusal(address: str | None, error: Exception) -> UserError:
    if re.search("AuthenticationError|InvalidAuthToken", "".join(traceback.format_exception(error))):
        return TokenRefused(
            f"the Ray cluster at {address} asks for a token and this process has none or another: set RAY_AUTH_MODE"
            "=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's (by default ~/.ray/auth_token)"
        )
    return UserError(f"the Ray cluster at {address or 'this machine'} cannot be joined: {told(error)}")


_lock = threading.Lock()
_users: list[tuple[str | None, bool]] = []
"""For each pool of this process the address, the same for all, and whether the first pool came to the cluster."""


def enter(address: str | None, *, cards: Sequence[str] | None = None) -> None:
    """Join a cluster for one pool (see `join`); UserError if other pools of this process are on another one."""
    ray = import_ray(token=address is None or _has_token())
    with _lock:
        if _users and address != _users[0][0]:
            raise UserError(f"expected the address of the run's other pools, {_users[0][0]}, got {address}")
        ours = _users[0][1] if _users else not ray.is_initialized()
        join(address, cards=cards)
        _users.append((address, ours))


def leave() -> None:
    """Leave for one pool; the last ends or leaves the cluster that the first came to."""
    with _lock:
        _, ours = _users.pop()
        if not _users and ours:
            leaving = threading.Thread(target=_shut_down, name=f"{ABANDONED}ray", daemon=True)
            seconds = 2.0 if is_gone() else _END_SECONDS
            leaving.start()
            leaving.join(seconds)


def _shut_down() -> None:
    import ray

    with _own_signals(), suppress(Exception):
        ray.shutdown()


def cluster_address() -> str:
    """Return host and port of the joined cluster, as `join` takes them."""
    import ray

    return ray.get_runtime_context().gcs_address


def is_joined() -> bool:
    """Return whether this process belongs to a cluster; Ray is imported with a token where this user has one."""
    return import_ray(token=_has_token()).is_initialized()


def is_gone() -> bool:
    """Return whether the cluster of this process no longer answers, asked twice."""
    import ray

    with suppress(Exception):  # of a connection that is being closed
        return not ray.is_initialized() or not any(answers(cluster_address()) for _ in range(2))
    return True


def ready(references: Sequence[Any], seconds: float = math.inf) -> Any:
    """Return the reference of a value that is there; PoolLate if none comes in time, PoolLost without a cluster."""
    import ray

    deadline = time.monotonic() + seconds
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        came, _ = attempt(ray.wait, references, timeout=min(_PROBE_SECONDS, left))
        if came:
            return came[0]
        if is_gone():
            raise PoolLost("nothing answers any more where the Ray cluster was")
        if not left:
            raise PoolLate(f"no answer within {seconds:g} s")


def fetched(reference: Any) -> Any:
    """Return a value that is there; raise what its judge raised, and what `attempt` does."""
    import ray

    return attempt(ray.get, reference)


def attempt(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of Ray's.

    Raises:
        ActorLost: The actor died, or its machine.
        PoolLost: The cluster is gone.
        Exception: Raised by a judge in an actor, as it was raised there.
    """
    from ray import exceptions

    try:
        return call(*arguments, **options)
    except (exceptions.RayTaskError, exceptions.UnserializableException) as error:
        raise _judge_error(error) from None
    except Exception as error:
        if is_gone():
            raise PoolLost(f"the Ray cluster is gone: {last_line(error)}") from error
        if isinstance(error, exceptions.RayError | ConnectionError):
            raise ActorLost(f"an actor died: {last_line(error)}") from error
        raise


def _judge_error(error: Exception) -> BaseException:
    """Return the exception that a judge raised in an actor; a RuntimeError where this process has not its class."""
    from ray.exceptions import RayError

    cause = getattr(error, "cause", None)
    if cause is None or isinstance(cause, RayError):
        cause = RuntimeError(last_line(error))
    cause.add_note(f"In the actor:\n{error}")
    return cause


def answers(address: str, *, grpc: bool = False) -> bool:
    """Return whether something listens at HOST:PORT, with `grpc` in HTTP/2: with others Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS) as line:
        if not grpc:
            return True
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _HTTP2)
        return line.recv(9)[3:4] == _HTTP2[3:4]
    return False


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _has_token() -> bool:
    file = Path("~/.ray/auth_token").expanduser()
    return "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ or file.is_file()


@contextmanager
def _visible(cards: Sequence[str] | None) -> Iterator[None]:
    """Show Ray some cards of this machine alone; all for None."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cards is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    try:
        yield
    finally:
        if cards is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            os.environ.update({} if before is None else {"CUDA_VISIBLE_DEVICES": before})


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
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers: the training loop saves on SIGTERM, Ray would leave at once."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python
                signal.signal(number, handler)


def told(error: BaseException) -> str:
    """Return an error's type and its message as one line."""
    return f"{type(error).__name__}: {one_line(error, 300)}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, where Ray says why an actor died or what a judge raised."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
