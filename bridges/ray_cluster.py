"""Join or start a Ray cluster, and distinguish a dead actor from a lost cluster."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_jax.errors import ABANDONED, StopRun, UserError, one_line

NAMESPACE = "grpo_jax"
PROBE_SECONDS = 5.0  # without an answer, until the cluster is probed
_END_SECONDS = 60.0  # timeout to end a cluster; Ray would wait for ever if it dies meanwhile
_CARDS = "CUDA_VISIBLE_DEVICES"
_SETTINGS = {  # Ray reads them when it is imported
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    "RAY_NUM_REDIS_GET_RETRIES": "5",  # seconds of attempts to join a responding cluster
    "RAY_worker_niceness": "0",  # by default Ray's workers run at the lowest priority
    # Ray ends a process a minute after it lost its cluster; a training run must survive to save
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000",
    # where its raylet is gone too, if its parent is process 1, as in a container or behind a shell that has ended
    "RAY_RAYLET_PID": str(os.getpid()),
}
_joined: dict[str, Any] = {}  # "address" of the joined cluster (None if started here), and "for_run"


class PoolLost(StopRun):
    """A pool has no actor left, lost its cluster, or timed out: the run saves and ends."""


class ActorLost(PoolLost):
    """An actor died; Ray may restart it."""


def import_ray(*, starts: bool = False) -> Any:
    """Import Ray with the settings of a run; it uses a token if the user has one, or a cluster `starts`."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", "Zero-copy tensor serialization")  # tensors are contiguous, and finally copied
    named = os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    if "ray" not in sys.modules and (starts or named or Path("~/.ray/auth_token").expanduser().is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    excepthook = sys.excepthook
    import ray

    # Ray's hook reports a traceback to the cluster before it prints it, and waits for ever for a lost cluster
    sys.excepthook = excepthook
    return ray


def join(
    address: str | None, *, cards: Sequence[str] | None = None, object_store: int | None = None, for_run: bool = False
) -> None:
    """Join the cluster at HOST:PORT, or start a local one; a process stays on its cluster.

    `cards` are the GPUs of a started cluster (None: all), `object_store` its bytes (None: Ray's default). With
    `for_run`, `leave` ends or leaves the cluster. UserError without a cluster.
    """
    ray = import_ray(starts=address is None)
    if ray.is_initialized() and is_gone():
        ray.shutdown()
    if ray.is_initialized():
        if address not in (None, _joined.get("address"), cluster_address()):
            raise UserError(f"expected the cluster that this process is on already, {cluster_address()}")
        return
    if address is not None and not answers(address, http2=True):
        raise UserError(f"no Ray cluster answers at {address}; its owner sees HOST:PORT when it starts")
    from ray._private import ray_constants

    on_loopback = address is None or address.startswith(("127.", "localhost:"))
    ray_constants.ENABLE_RAY_CLUSTER = not on_loopback  # else Ray leaves loopback
    options: dict[str, Any] = {"address": address}
    if address is None:  # "local", not the cluster of RAY_ADDRESS
        options = {"address": "local", "include_dashboard": False, "object_store_memory": object_store}
        options["_node_ip_address"] = "127.0.0.1"
    handler, visible, terminal = signal.getsignal(signal.SIGTERM), os.environ.get(_CARDS), os.dup(2)
    if cards is not None:
        os.environ[_CARDS] = ",".join(cards)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # hide Ray's C++ messages, which the exception repeats
    try:
        for attempts_left in (0,) if address else (2, 1, 0):  # Ray waits only half a minute for its own processes
            try:
                ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **options)
                break
            except Exception as error:
                _shut_down()
                if not attempts_left:
                    token = "its token is read from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
                    where = f"at {address} ({token})" if address else "of this machine"
                    raise UserError(f"cannot join the Ray cluster {where}: {told(error)}") from error
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # a run must save; Ray would exit at once
        os.environ.pop(_CARDS, None)
        os.environ.update({} if visible is None else {_CARDS: visible})
    _joined.update(address=address, for_run=for_run)


def leave() -> None:
    """End a run's pools and the cluster that it started, or leave the cluster that it joined."""
    if _joined.pop("for_run", False):
        _joined.clear()  # the next cluster of this process may be another
        leaving = threading.Thread(target=_shut_down, name=f"{ABANDONED}ray", daemon=True)
        seconds = 2.0 if is_gone() else _END_SECONDS
        leaving.start()
        leaving.join(seconds)


def _shut_down() -> None:
    with suppress(Exception):
        import_ray().shutdown()


def cluster_address() -> str:
    """Return HOST:PORT of the joined cluster, as for `join`."""
    return import_ray().get_runtime_context().gcs_address


def is_gone() -> bool:
    """Return whether the cluster of this process no longer answers, after two attempts."""
    with suppress(Exception):  # the connection may be closing
        return not import_ray().is_initialized() or not any(answers(cluster_address()) for _ in range(2))
    return True


def answers(address: str, *, http2: bool = False) -> bool:
    """Return whether something listens at HOST:PORT, optionally with HTTP/2; else Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # a frame, its kind in the fourth byte
    with suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS) as line:
        if not http2:
            return True
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        return line.recv(9)[3:4] == settings[3:4]
    return False


def attempt(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a Ray function; raise the judge's original exception, ActorLost, or PoolLost if the cluster is gone."""
    from ray import exceptions

    try:
        return call(*arguments, **options)
    except (exceptions.RayTaskError, exceptions.UnserializableException) as error:
        cause = getattr(error, "cause", None)
        if cause is None or isinstance(cause, exceptions.RayError):  # this process lacks the exception's class
            cause = RuntimeError(told(error))
        cause.add_note(f"In the actor:\n{error}")
        raise cause from None
    except Exception as error:
        if is_gone():
            raise PoolLost(f"the Ray cluster is gone: {told(error)}") from error
        if isinstance(error, exceptions.RayError | ConnectionError) and not isinstance(error, TimeoutError):
            raise ActorLost(f"an actor died: {told(error)}") from error
        raise


def told(error: BaseException) -> str:
    """Return an error's type and the last line of its message, which has Ray's reason for an actor's death."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {one_line(lines[-1], 300)}" if lines else type(error).__name__
