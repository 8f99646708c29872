"""A judge in plain Ray actors: a call is split into batches of rows, and each actor that is free takes the next.

Ray restarts an actor that died. Its batch does not wait for that: it goes to another. An actor that is late ends its
own process, so late is dead, too.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import inspect
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.judge import Judge, PoolSection, title
from grpo_jax.config.named import FILE
from grpo_jax.errors import ABANDONED, StopRun, UserError, one_line

START_SECONDS = 600.0  # to load a judge: large weights on a slow disk, or a cluster that grows, take minutes
ROWS = 32  # of a batch of a judge without a batch_size
ATTEMPTS, RESTARTS = 3, 10  # actors that may be lost over one batch, and times that Ray starts one again
NAMESPACE = "grpo_jax"
_PROBE_SECONDS = 5.0  # without an answer, until the cluster is asked whether it is there
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
_joined: list[str | None] = []  # the address of the cluster that `join` came to; None for one that it started
_entered: list[bool] = []  # for each pool of a run, whether it brought this process to the cluster

Request = tuple[Sequence[Any], dict[str, Any]]
"""Arguments and keywords of one batch."""
Description = tuple[str, dict[str, Any], list[str], Signature | None]
"""Of a loaded judge: title, plain public attributes, names of methods, and signature (None without a call)."""


class BatchLost(RuntimeError):
    """Every actor that was given a batch died or timed out on it: the judge failed on it."""


class PoolLost(StopRun):
    """No actor of a pool is left, its cluster is gone, or it is late: the run saves and ends."""


class ActorLost(PoolLost):
    """An actor died; Ray may start it again."""


class TokenRefused(UserError):
    """The cluster asks for a token that this process has not."""


def placed(judge: Judge, name: str) -> Judge | Pooled:
    """Return a judge of the config as it is loaded: in its pool, if it has one. `name` is its place in errors."""
    return Pooled(judge, judge.pool, name) if judge.pool else judge


@dataclass(frozen=True)
class Pooled:
    """A judge with the pool that it runs in."""

    judge: Judge
    pool: PoolSection
    name: str

    def check(self) -> None:
        """Run the judge's own check; actors that are elsewhere or have packages of their own run it themselves."""
        if not (self.pool.runtime_env or self.pool.address):
            self.judge.check()

    def load(self, device: str = "cpu") -> RayPool:
        """Start the actors, wait until they have loaded the judge, and return its proxy; `leave` ends them."""
        from bridges.placement import cards_left

        pool, name = self.pool, self.name
        require(device == "cpu", "devices", "none for a judge in a pool, which has its resources", device)
        try:
            _entered.append(join(pool.address, cards=None if pool.address else cards_left()))
        except UserError as error:
            raise UserError(f"{name}{'.address' if pool.address else ''}: {error}") from error
        actors = start_actors(name, [self.judge] * pool.replicas, pool)
        try:
            about = described(actors, START_SECONDS)
        except PoolLost as error:  # nothing has begun that could be saved
            raise UserError(f"{name}: {error}; the pool did not start (see `ray status`)") from error
        kind = RayPool if about[-1] is None else PooledReward
        return kind(name, actors, about, getattr(self.judge, "batch_size", 0) or ROWS, pool.batch_timeout)

    def memory(self) -> list[tuple[str, int, str]]:
        """Return the actors' share of this machine's memory; cards of a pool and other machines are not counted."""
        pool = self.pool
        if pool.address or pool.cards:
            where = f"{pool.replicas} actors of a Ray cluster, each with {pool.cards:g} of its cards"
            return [(type(self.judge).__name__, 0, f"not counted: {where}")]
        lines = self.judge.memory()
        return [(name, pool.replicas * size, f"{note}, in {pool.replicas} actors") for name, size, note in lines]


class JudgeActor:
    """A judge, loaded when it is first asked: an error of loading it arrives as what it raises later does."""

    def __init__(self, judge: Any, device: str, folder: str, timeout: float, kernels: tuple[bool, bool]):
        """Take "cpu" or "gpu:0" of the cards that Ray has given this actor, and the run's folder.

        A batch has `timeout` seconds. `kernels` says whether torch must be deterministic, and may round to TF32.
        """
        self._judge, self._device, self._folder, self._timeout, self._kernels = judge, device, folder, timeout, kernels
        self._loaded = None

    def _load(self) -> Any:
        if self._loaded is None:
            if os.path.isdir(self._folder):
                os.chdir(self._folder)  # a config's paths begin there
            if self._device == "cpu":
                os.environ.setdefault("JAX_PLATFORMS", "cpu")
            if self._kernels != (False, True):
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                import torch

                torch.use_deterministic_algorithms(self._kernels[0])
                torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self._kernels[1]
            getattr(self._judge, "check", bool)()
            self._loaded = self._judge.load(self._device)
        return self._loaded

    def describe(self) -> Description:
        """Load the judge and describe it."""
        judge, public = self._load(), {}
        for name in dir(judge):
            with suppress(Exception):  # a property that is not ready, or asks for a package
                public |= {} if name.startswith("_") else {name: getattr(judge, name)}
        plain = {name: value for name, value in public.items() if type(value) in (bool, int, float, str, tuple)}
        methods = [name for name, value in public.items() if callable(value)]
        if not callable(judge):
            return title(judge), plain, methods, None
        given = inspect.signature(judge).parameters.values()  # without types and defaults, which are of its packages
        bare = [Parameter(p.name, p.kind, default=p.empty if p.default is p.empty else None) for p in given]
        return title(judge), plain, methods, Signature(bare)

    def answer(self, method: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Call a method about one batch, or the judge itself if its name is ""; the process ends if it is late."""
        judge = self._load()
        device, call = getattr(judge, "device", None), getattr(judge, method) if method else judge
        if self._timeout:  # though the interpreter's lock be held
            faulthandler.dump_traceback_later(self._timeout, exit=True, file=sys.__stderr__)
        try:
            value = call(*[_own(one, device) for one in arguments], **{k: _own(v, device) for k, v in keywords.items()})
            return _on_host(asyncio.run(value) if inspect.iscoroutine(value) else value)
        except (SystemExit, KeyboardInterrupt) as error:  # must not end the actor
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _own(value: Any, device: Any = None) -> Any:
    """Copy an array, which Ray lends read-only; a tensor to a device, if one is named."""
    if _is_tensor(value):
        return value.to(device, copy=True) if device else value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _on_host(value: Any) -> Any:
    """Move a value's tensors, also those in lists, tuples and dictionaries, to the CPU, as Ray can lend them."""
    if "torch" not in sys.modules:
        return value
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.detach().cpu().contiguous() if _is_tensor(leaf) else leaf, value)


class RayPool:
    """Proxy of a judge in Ray actors, with its plain attributes and its methods.

    Arguments of one length are split into batches of rows, whose answers are joined in their order: a judge must judge
    each row by itself. Threads ask a pool one after the other.
    """

    def __init__(self, name: str, actors: Sequence[Any], about: Description, batch: int = ROWS, limit: float = 0.0):
        """Take actors that have loaded the judge; `name`, and the `limit` in seconds of a batch, are for errors."""
        described_as, attributes, self._methods, signature = about
        vars(self).update(attributes, device="cpu")
        self._name, self._size, self._lock, self._free = name, batch, threading.Lock(), deque(actors)
        self._away: dict[Any, Any] = {}  # actors that Ray restarts, by the reference of their answer
        self._title = f"{described_as}; {len(actors)} actors of a Ray cluster, {batch} rows at a time"
        self._late, self._last = f" or took more than {limit:g} s (batch_timeout)" if limit else "", ""
        if signature is not None:
            self.__signature__ = signature

    def __str__(self) -> str:
        return self._title

    def __getattr__(self, name: str) -> Any:
        methods = vars(self).get("_methods", ())
        if name not in methods:
            raise AttributeError(f"{name} is in the actors of a pool, which has methods alone: {', '.join(methods)}")
        return self._draw if name == "draw" else functools.partial(self._ask, name)

    def _draw(self, texts: Sequence[str], seeds: Sequence[int], **keywords: Any) -> Any:
        """Draw equal pairs of text and seed once."""
        pairs = list(zip(texts, seeds, strict=True))
        different = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
        drawn = self._ask("draw", [text for text, _ in different], [seed for _, seed in different], **keywords)
        return drawn if len(different) == len(pairs) else drawn[[different[pair] for pair in pairs]]

    def _ask(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Call a method about rows: lists, tuples and arrays, if all are of one length; else the call is one batch."""
        lengths = {len(value) for value in (*arguments, *keywords.values()) if _has_rows(value)}
        count = lengths.pop() if len(lengths) == 1 else 0
        parts = [slice(start, min(start + self._size, count)) for start in range(0, count, self._size)]

        def request(rows: slice) -> Request:
            cut = [_on_host(one[rows] if _has_rows(one) else one) for one in (*arguments, *keywords.values())]
            return cut[: len(arguments)], dict(zip(keywords, cut[len(arguments) :], strict=True))

        answers = self.run(method, [request(rows) for rows in parts or [slice(None)]])
        if len(answers) == 1:
            return answers[0]
        if [len(one) if _has_rows(one) else None for one in answers] != [rows.stop - rows.start for rows in parts]:
            raise TypeError(
                f"{self._name}.{method} did not answer {self._size} rows with as many values: a judge in a pool must "
                "judge row by row, or have a batch_size that holds a whole call"
            )
        if _is_tensor(answers[0]):
            return sys.modules["torch"].cat(answers)
        if isinstance(answers[0], np.ndarray):
            return np.concatenate(answers)
        return [one for part in answers for one in part]

    def run(self, method: str, requests: Sequence[Request], seconds: float = math.inf) -> list[Any]:
        """Return a method's answers to some batches, in their order.

        Raises:
            PoolLost: No actor is left, the cluster is gone, or the answers did not come within the seconds.
            BatchLost: A batch cost `ATTEMPTS` actors.
            Exception: The judge's own, once no actor has a batch any more.
        """
        try:
            with self._lock:
                return self._answers(method, requests, seconds)
        except PoolLost as error:
            raise PoolLost(f"{self._name}: {error}") from error

    def _answers(self, method: str, requests: Sequence[Request], seconds: float) -> list[Any]:
        import ray

        deadline = time.monotonic() + seconds
        waiting, sent = deque(range(len(requests))), {}
        answers, lost, failed = [None] * len(requests), Counter(), None
        while sent or (waiting and failed is None):
            while waiting and self._free and failed is None:
                number, handle = waiting.popleft(), self._free.popleft()
                answer = handle.answer.options(max_task_retries=0)  # Ray would ask the same actor, and count refusals
                sent[attempt(answer.remote, method, *requests[number])] = number, handle
            if not (sent or self._away):
                raise PoolLost(f"no actor is left; the last: {self._last}")
            left = max(deadline - time.monotonic(), 0.0)
            came, _ = attempt(ray.wait, [*sent, *self._away], timeout=min(_PROBE_SECONDS, left))
            gone = not came and is_gone()
            if gone or not (came or left):
                raise PoolLost(
                    "nothing answers where the Ray cluster was" if gone else f"no answer within {seconds:g} s"
                )
            for reference in came:
                number, handle = sent.pop(reference, None) or (None, self._away.pop(reference))
                try:
                    value = _own(attempt(ray.get, reference))
                    if number is not None:
                        answers[number] = value
                except ActorLost as error:
                    self._last = str(error)
                    if number is not None:
                        self._away[handle.describe.remote()] = handle
                        waiting.appendleft(number)
                        lost[number] += 1
                        if lost[number] >= ATTEMPTS:
                            spent = f"{ATTEMPTS} actors died{self._late} over one batch; the last: {error}"
                            failed = BatchLost(f"{self._name}: {spent}")
                    continue
                except PoolLost:
                    raise
                except Exception as error:
                    if number is None:  # it does not load any more
                        self._last = last_line(error)
                        continue
                    failed = error
                self._free.append(handle)
        if failed is not None:
            raise failed
        return answers


class PooledReward(RayPool):
    """A judge that can be called, with its signature, from which a reward's arguments are chosen."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the judge."""
        return self._ask("", *arguments, **keywords)


def _has_rows(value: Any) -> bool:
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return value.ndim > 0
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def start_actors(name: str, judges: Sequence[Any], section: PoolSection, named: Sequence[str] = ()) -> list[Any]:
    """Start an actor for each judge of a pool, and return their handles.

    `named` are names under which any process of the cluster finds them. UserError if a cluster of the run's own lacks
    a resource; one elsewhere may grow.
    """
    import ray

    resources = {"num_cpus": 1.0 if section.address else 0.0, "num_gpus": 0.0, **section.resources}
    there = ray.cluster_resources()
    for kind, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        wanted, has = len(judges) * resources[kind], there.get(resource, 0.0)
        enough = section.address is not None or wanted <= has
        require(enough, f"{name}.resources.{kind}", f"at most the {has:g} of the Ray cluster for all actors", wanted)
    for module in {type(judge).__module__ for judge in judges}:
        if module.startswith(FILE):  # the code of a judge's file, which no import finds, is sent along
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    options = {**resources, "runtime_env": section.runtime_env or None, "namespace": NAMESPACE}
    options |= {"max_restarts": RESTARTS, "max_task_retries": -1}
    device, torch = "gpu:0" if section.cards else "cpu", sys.modules.get("torch")
    kernels = False, True
    if torch is not None:
        kernels = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    given = (device, os.getcwd(), section.batch_timeout, kernels)
    try:
        start = [ray.remote(JudgeActor).options(**options, name=one or None) for one in named or [""] * len(judges)]
        return [one.remote(judge, *given) for one, judge in zip(start, judges, strict=True)]
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}.resources, runtime_env: {told(error)}") from error


def described(actors: Sequence[Any], seconds: float) -> Description:
    """Wait until actors have loaded, and describe the judge; an error of loading is raised as it was."""
    import ray

    try:
        return attempt(ray.get, [handle.describe.remote() for handle in actors], timeout=seconds)[0]
    except TimeoutError as error:
        raise PoolLost(f"no answer within {seconds:g} s") from error


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


def join(address: str | None, *, cards: Sequence[str] | None = None, object_store: int | None = None) -> bool:
    """Join the cluster at HOST:PORT, or start one that this machine alone reaches.

    A process stays on its cluster; the result says whether it belonged to none. `cards` are those of a cluster that is
    started (None: all), `object_store` its bytes (None: Ray's own choice). UserError without a cluster.
    """
    ray = import_ray(starts=address is None)
    if ray.is_initialized():
        if address is not None and [address] != _joined:
            raise UserError(f"expected the cluster that this process is on already, {cluster_address()}")
        return False
    if address is not None and not answers(address, http2=True):
        other = f"what answers at {address} is no Ray cluster; its owner sees HOST:PORT when it starts"
        raise UserError(other if answers(address) else f"no Ray cluster answers at {address}")
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
                    raise _refusal(address, error) from error
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # a run saves; Ray would leave at once
        os.environ.pop(_CARDS, None)
        os.environ.update({} if visible is None else {_CARDS: visible})
    _joined[:] = [address]
    return True


def _refusal(address: str | None, error: Exception) -> UserError:
    reasons = "".join(traceback.format_exception(error))
    if "AuthenticationError" in reasons or "InvalidAuthToken" in reasons:
        return TokenRefused(
            f"the Ray cluster at {address} asks for a token and this process has none or another: set RAY_AUTH_MODE"
            "=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's (by default ~/.ray/auth_token)"
        )
    return UserError(f"the Ray cluster at {address or 'this machine'} cannot be joined: {told(error)}")


def leave() -> None:
    """End the pools of a run with the cluster that one of them started, or leave the one that it joined."""
    if any(_entered):
        leaving = threading.Thread(target=_shut_down, name=f"{ABANDONED}ray", daemon=True)
        seconds = 2.0 if is_gone() else _END_SECONDS
        leaving.start()
        leaving.join(seconds)
    _entered.clear()


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
    with suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS) as line:
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
            cause = RuntimeError(last_line(error))
        cause.add_note(f"In the actor:\n{error}")
        raise cause from None
    except Exception as error:
        if is_gone():
            raise PoolLost(f"the Ray cluster is gone: {last_line(error)}") from error
        if isinstance(error, exceptions.RayError | ConnectionError) and not isinstance(error, TimeoutError):
            raise ActorLost(f"an actor died: {last_line(error)}") from error
        raise


def told(error: BaseException) -> str:
    """Return an error's type and its message as one line."""
    return f"{type(error).__name__}: {one_line(error, 300)}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, where Ray says why an actor died or what a judge raised."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
