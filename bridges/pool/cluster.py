"""A Ray cluster: how this process starts, joins and leaves one; errors of a pool on it."""

import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_jax.errors import ABANDONED, StopRun, UserError

NAMESPACE = "grpo_jax"
LOOPBACK = "127.0.0.1"
_PROBE_SECONDS = 5.0
_LEAVE_SECONDS = 2.0  # for Ray to notice that there is nothing to leave any more
_STARTS = 3  # attempts to start one


class NotJoined(UserError):
    """No cluster at an address, or it refuses this process."""


class TokenRefused(NotJoined):
    """The cluster asks for a token that this process has not."""


class PoolLost(StopRun):
    """No actor of a pool is left, or its cluster is gone: the run saves and ends."""


class PoolLate(PoolLost):
    """A pool did not start, or answer, within its time limit."""


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
    before = _ray_processes()
    for attempt in range(_STARTS):
        try:
            _init(address="local", **options)  # and not the cluster that RAY_ADDRESS names
            break
        except Exception as error:  # Ray waits half a minute for its own processes, which is little on a busy machine
            with own_signals(), suppress(Exception):
                ray.shutdown()
            for process in _ray_processes() - before:  # Ray forgets them, and they would be in the next one's way
                with suppress(Exception):
                    process.kill()
                    process.wait(5)
            if attempt + 1 == _STARTS:
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
    if not _is_ray(address):
        raise NotJoined(f"what answers at {address} is no Ray cluster; its owner sees HOST:PORT when it starts")
    _stay_on_loopback(_is_loopback(address))
    try:
        _init(address=address)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if _is_about_a_token(error):
            raise TokenRefused(
                f"the Ray cluster at {address} asks for a token and this process has none or another: set RAY_AUTH_MODE"
                "=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's (by default ~/.ray/auth_token)"
            ) from error
        raise NotJoined(f"the Ray cluster at {address} cannot be joined: {first_line(error)}") from error


class _Joined:
    """State shared by all pools of this process: Ray knows one cluster at a time.

    `ours` says that the first pool started or joined the cluster, so that the last leaves it.
    """

    lock = threading.Lock()
    users = 0
    address: str | None = None
    ours = False


def enter(address: str | None) -> None:
    """Enter a cluster at HOST:PORT for one pool; the first pool starts or joins it.

    None is one started on this machine, or the one that this process belongs to already. UserError if other pools of
    this process are on another one.
    """
    ray = import_ray(token=address is None or _has_token())
    with _Joined.lock:
        if _Joined.users and address != _Joined.address:
            raise UserError(f"expected the address of the run's other pools, {_Joined.address}, got {address}")
        if not _Joined.users:
            _Joined.ours, _Joined.address = not ray.is_initialized(), address
            if address is None:
                start_cluster()
            else:
                join(address)
        _Joined.users += 1


def leave() -> None:
    """Leave for one pool; the last ends or leaves the cluster that the first came to."""
    import ray

    def shut_down() -> None:
        with own_signals(), suppress(Exception):
            ray.shutdown()

    with _Joined.lock:
        _Joined.users -= 1
        if _Joined.users or not _Joined.ours:
            return
        if not is_gone():
            shut_down()
            return
        # a cluster that is gone is not waited for
        leaving = threading.Thread(target=shut_down, name=f"{ABANDONED}ray", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)


def is_gone() -> bool:
    """Tell whether the cluster of this process no longer answers."""
    import ray

    try:
        return not ray.is_initialized() or not answers(cluster_address())
    except Exception:  # of a connection that is being closed
        return True


def grows() -> bool:
    """Tell whether autoscaling may add machines to the cluster: not where its own monitor is read-only.

    That is so of machines put together by hand (`ray start`): Ray names each kind of them by a number.
    """
    from ray.experimental import internal_kv

    deadline = time.monotonic() + 2 * _PROBE_SECONDS
    while time.monotonic() < deadline:  # a cluster that has just started says nothing yet
        with suppress(Exception):
            status = json.loads(internal_kv._internal_kv_get("__autoscaling_status"))
            kinds = status["autoscaler_report"]["active_nodes"]
            if kinds:
                return not all(re.fullmatch(r"node_[0-9a-f]{56}", kind) for kind in kinds)
        time.sleep(0.5)
    return True


@contextmanager
def lost_as_pool_lost() -> Iterator[None]:
    """Raise Ray's errors of what is gone as `PoolLost`."""
    from ray import exceptions

    try:
        yield
    except (exceptions.RayError, ConnectionError) as error:
        raise PoolLost(f"the Ray cluster, or a machine of it, is gone: {first_line(error)}") from error


def import_ray(*, token: bool) -> Any:
    """Import Ray, which reads its settings then; with `token` it shows and asks for one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray ends a process whose cluster has been gone for a minute; a training run must live to save
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "1000000")
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


def _ray_processes() -> set[Any]:
    """Processes of Ray started by this process."""
    import psutil  # Ray brings it
    import ray

    processes = set()
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any(str(Path(ray.__file__).parent) in word for word in child.cmdline()):
                processes.add(child)
    return processes


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


def _is_about_a_token(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__name__ == "AuthenticationError" or "InvalidAuthToken" in str(error):
            return True
        error = error.__cause__
    return False


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS)


def answers(address: str) -> bool:
    """Tell whether something listens at HOST:PORT: Ray itself would try for minutes."""
    try:
        _connect(address).close()
    except (OSError, ValueError):
        return False
    return True


def _is_ray(address: str) -> bool:
    """Tell whether HOST:PORT is that of a Ray cluster, which gRPC without Ray would take minutes to find out.

    Asks for the cluster's id in HTTP/2 frames by hand. A cluster answers also where a token is missing; other services
    of gRPC say that they have no such method, which is status 12.
    """

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    fields = {":method": "POST", ":scheme": "http", ":path": "/ray.rpc.NodeInfoGcsService/GetClusterId"}
    fields |= {":authority": "ray", "content-type": "application/grpc", "te": "trailers"}
    literals = [bytes([len(word)]) + word.encode() for pair in fields.items() for word in pair]
    headers = b"".join(b"\0" + name + value for name, value in zip(literals[::2], literals[1::2], strict=True))
    settings, message = frame(4, 0, 0, b""), frame(0, 1, 1, bytes(5))
    answer = b""
    with suppress(OSError), _connect(address) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + frame(1, 4, 1, headers) + message)
        while not re.search(rb"grpc-status(\x01.|\x02..)", answer, re.DOTALL):
            part = connection.recv(4096)
            answer += part
            if not part or len(answer) > 4096:
                break
    return answer[3:4] == b"\x04" and b"grpc-status\x0212" not in answer  # 4: the settings of HTTP/2


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what Ray's C++ writes to standard error; shown where the block succeeds, else the error says it."""
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
    return _line(error, 0)


def last_line(error: BaseException) -> str:
    """An error's type and the last line of its message, where Ray says why an actor died."""
    return _line(error, -1)


def _line(error: BaseException, number: int) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[number]}" if lines else type(error).__name__
