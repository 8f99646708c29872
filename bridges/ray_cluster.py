"""Join or start a Ray cluster, and tell an actor that died from a cluster that is gone."""

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
PROBE_SECONDS = 5.0  # without an answer, until the cluster is asked whether it is there
_END_SECONDS = 60.0  # for ending a cluster; Ray would wait for ever for one that dies just then
_CARDS = "CUDA_VISIBLE_DEVICES"
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
_joined: dict[str, Any] = {}  # "address" that `join` came to, None of a cluster that it started, and "for_run"


class PoolLost(StopRun):
    """No actor of a pool is left, its cluster is gone, or it is late: the run saves and ends."""


class ActorLost(PoolLost):
    """An actor died; Ray may start it again."""


def import_ray(*, starts: bool = False) -> Any:
    """Import Ray with the settings of a run; it shows a token if this user has one, or a cluster `starts`."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", "Zero-copy tensor serialization")  # tensors are contiguous, and copied at the end
    named = os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    if "ray" not in sys.modules and (starts or named or Path("~/.ray/auth_token").expanduser().is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    excepthook = sys.excepthook
    import ray

    # Ray's own hook reports a traceback to the cluster before it prints it, and waits for ever where that is gone
    sys.excepthook = excepthook
    return ray


def join(
    address: str | None,
    *,
    cards: Sequence[str] | None = None,
    object_store: int | None = None,
    for_run: bool = False,
) -> None:
    """Join the cluster at HOST:PORT, or start one that this machine alone reaches; a process stays on its cluster.

    `cards` are those of a cluster that is started (None: all), `object_store` its bytes (None: Ray's own choice).
    `leave` ends what is joined `for_run`. UserError without a cluster.
    """
    ray = import_ray(starts=address is None)
    if ray.is_initialized() and is_gone():
        ray.shutdown()
    if ray.is_initialized():
        if address not in (None, _joined.get("address")):
            raise UserError(f"expected the cluster that this process is on already, {cluster_address()}")
        return
    if address is not None and not answers(address, http2=True):
        raise UserError(f"no Ray cluster answers at {address}; its owner sees HOST:PORT when it starts")
    from ray._private import ray_constants

    on_loopback = address is None or address.startswith(("127.", "localhost:"))
    ray_constants.ENABLE_RAY_CLUSTER = not on_loopback  # else Ray leaves loopback
    options: dict[str, Any] = {"address": address}
    if address is None:  # "local", and not the cluster that RAY_ADDRESS names
        options = {"address": "local", "include_dashboard": False, "object_store_memory": object_store}
        options["_node_ip_address"] = "127.0.0.1"
    handler, visible, terminal = signal.getsignal(signal.SIGTERM), os.environ.get(_CARDS), os.dup(2)
    if cards is not None:
        os.environ[_CARDS] = ",".join(cards)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # what Ray's C++ says of a failure, the exception says, too
    try:
        for attempts_left in (0,) if address else (2, 1, 0):  # Ray gives its own processes half a minute
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
            signal.signal(signal.SIGTERM, handler)  # a run saves; Ray would leave at once
        os.environ.pop(_CARDS, None)
        os.environ.update({} if visible is None else {_CARDS: visible})
    _joined.update(address=address, for_run=for_run)


def leave() -> None:
    """End the pools of a run with the cluster that one of them started, or leave the one that it joined."""
    if _joined.pop("for_run", False):
        leaving = threading.Thread(target=_shut_down, name=f"{ABANDONED}ray", daemon=True)
        seconds = 2.0 if is_gone() else _END_SECONDS
        leaving.start()
        leaving.join(seconds)


def _shut_down() -> None:
    with suppress(Exception):
        import_ray().shutdown()


def cluster_address() -> str:
    """Return host and port of the joined cluster, as `join` takes them."""
    return import_ray().get_runtime_context().gcs_address


def is_gone() -> bool:
    """Return whether the cluster of this process no longer answers, asked twice."""
    with suppress(Exception):  # of a connection that is being closed
        return not import_ray().is_initialized() or not any(answers(cluster_address()) for _ in range(2))
    return True


def answers(address: str, *, http2: bool = False) -> bool:
    """Return whether something listens at HOST:PORT, perhaps in HTTP/2: with others Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # a frame, its kind in the fourth byte
    with suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS) as line:
        if not http2:
            return True
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        return line.recv(9)[3:4] == settings[3:4]
    return False


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
        cause = getattr(error, "cause", None)
        if cause is None or isinstance(cause, exceptions.RayError):  # of a class that this process has not
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
    """Return an error's type and the last line of its message, where Ray says why an actor died."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {one_line(lines[-1], 300)}" if lines else type(error).__name__
