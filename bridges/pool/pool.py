"""A pool: the actors of a judge, and one queue of batches before them.

Each actor has a few batches in flight. No thread watches the pool: a caller that waits for an answer collects answers
for all callers (`ray.wait`), and hands out waiting batches. Ray restarts an actor that died. Its batches do not wait
for that: they go to others, like those of an actor that was ended because it was late.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridges.pool import actor, cluster
from bridges.pool.cluster import BatchLost, PoolLate, PoolLost
from bridges.pool.section import PoolSection
from grpo_jax.errors import UserError

_log = logging.getLogger(__name__)

_PROBE_EVERY = 5.0  # seconds between two looks whether the cluster is there while nothing comes
_PROBES = 2  # unanswered in a row: the cluster is gone
_RAY_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # of resources
_OPTIONS = ("num_cpus", "num_gpus", "memory")  # resources that are options of an actor


@dataclass(frozen=True)
class Request:
    """A batch, as `actor.JudgeActor.answer` takes it; `stored` are references.

    `seat` is the number of the actor that is asked; None for whichever is free.
    """

    method: str
    arguments: Sequence[Any] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    pieces: Mapping[int | str, tuple[list[tuple[int, int]], str]] = field(default_factory=dict)
    stored: Sequence[Any] = ()
    seat: int | None = None


@dataclass(frozen=True)
class Answer:
    """The value of a batch; or the reference, shape and type of a tensor in the object store."""

    value: Any = None
    stored: tuple[Any, tuple[int, ...], str] | None = None


class _Call:
    """Requests that are waited for together."""

    def __init__(self, count: int):
        self.answers: list[Answer | None] = [None] * count
        self.error: BaseException | None = None

    @property
    def open(self) -> bool:
        return self.error is None and None in self.answers


class _Batch:
    """A request: its call and place there, how many actors were lost over it, and its references while in flight."""

    def __init__(self, call: _Call, place: int, request: Request):
        self.call = call
        self.place = place
        self.request = request
        self.attempts = 0
        self.references: list[Any] = []


class Seat:
    """An actor. `hello` is a reference while it starts; afterwards it works on the first batch in `doing`."""

    def __init__(self, handle: Any, number: int):
        """Take Ray's handle; the actor may still be starting."""
        self.handle = handle
        self.number = number
        self.hello: Any = None
        self.gone = False
        self.since = 0.0  # when it began with the first batch
        self.doing: deque[_Batch] = deque()


class Pool:
    """Actors and the batches that wait for them; thread-safe."""

    def __init__(self, name: str, handles: Sequence[Any], section: PoolSection, *, whole: bool = False):
        """Take Ray's handles of `actor.JudgeActor`, and the limits of a section; `name` is for errors.

        `whole` says that each actor has a part of its own, so that the pool is lost with any of them.
        """
        self.name = name
        self.seats = [Seat(handle, number) for number, handle in enumerate(handles)]
        self._section = section
        self._needed = len(handles) if whole else 1
        self._description: Any = None
        self._failure: BaseException | None = None  # of loading the judge
        self._queue: deque[_Batch] = deque()
        self._lock = threading.Lock()
        self._closed = ""  # why
        self._heard = time.monotonic()
        self._unanswered = 0
        for seat in self.seats:
            self._greet(seat)

    def wait_until_ready(self, seconds: float) -> Any:
        """Return an actor's description of its judge (`actor.described`), once all have started or the time is over.

        PoolLost if none came, or not all of those that are needed; an error of loading the judge is raised as it was.
        """
        deadline = time.monotonic() + seconds
        while any(seat.hello for seat in self.seats) and not self._closed and time.monotonic() < deadline:
            self._advance(deadline)
        if self._failure:
            raise self._failure
        ready = sum(not seat.gone and not seat.hello for seat in self.seats)
        if ready >= max(self._needed, 1):
            return self._description
        if self._closed:
            raise PoolLost(f"{self.name}: {self._closed}")
        raise PoolLate(f"{self.name}: no actor has started within {seconds:g} s (`ray status`)")

    def ask(self, requests: Sequence[Request], seconds: float = math.inf) -> list[Answer]:
        """Return the answers in the order of the requests.

        Raises:
            PoolLost: Too few actors are left, or the cluster is gone.
            PoolLate: No answer within the seconds; the actors are left alone.
            BatchLost: A batch cost as many actors as the limits allow.
            Exception: The judge's own, which `failure_of` makes of its answer.
        """
        call = _Call(len(requests))
        deadline = time.monotonic() + seconds
        with self._lock:
            self._queue.extend(_Batch(call, place, request) for place, request in enumerate(requests))
        try:
            while call.open:
                self._advance(deadline)
                if self._closed and call.open:
                    raise PoolLost(f"{self.name}: {self._closed}")
                if time.monotonic() > deadline and call.open:
                    raise PoolLate(f"{self.name}: no answer within {seconds:g} s")
        finally:
            with self._lock:
                self._queue = deque(batch for batch in self._queue if batch.call is not call)
        if call.error is not None:
            raise call.error
        return call.answers

    def close(self) -> None:
        """End the actors; callers that wait for them get PoolLost."""
        import ray

        self._closed = self._closed or "it was closed"
        gone = cluster.is_gone()  # Ray would wait for it to come back
        for seat in self.seats:
            seat.gone = True
            with suppress(Exception):
                if not gone:
                    ray.kill(seat.handle)

    def _advance(self, deadline: float) -> None:
        """Hand out batches, wait until something in flight is done or somebody must look around, and collect."""
        import ray

        with self._lock:
            self._hand_out()
            waiting = [seat.hello for seat in self.seats if seat.hello]
            waiting += [batch.references[0] for seat in self.seats for batch in seat.doing]
        seconds = min(1.0, self._section.batch_timeout / 4 or 1.0, max(deadline - time.monotonic(), 0.0))
        done: set[Any] = set()
        if waiting:
            try:
                done = set(ray.wait(waiting, timeout=seconds, fetch_local=False)[0])
            except Exception as error:  # of a connection that is gone
                with self._lock:
                    self._lose_all(f"the Ray cluster is gone: {cluster.first_line(error)}")
        elif not self._closed:
            time.sleep(min(seconds, 0.05))
        with self._lock:
            for seat in self.seats:
                self._collect(seat, done)
            self._look_around()

    # Below, the lock is held.

    def _hand_out(self) -> None:
        """Give waiting batches to the actors that have the fewest, or to the one that they ask for."""
        left: deque[_Batch] = deque()
        while self._queue:
            batch = self._queue.popleft()
            asked = batch.request.seat
            seats = [s for s in self.seats if not s.gone and not s.hello and asked in (None, s.number)]
            free = [seat for seat in seats if len(seat.doing) < self._section.in_flight]
            if not batch.call.open:
                continue
            if not free:
                left.append(batch)
                continue
            self._send(batch, min(free, key=lambda seat: len(seat.doing)))
        self._queue = left

    def _send(self, batch: _Batch, seat: Seat) -> None:
        asked = batch.request
        if not seat.doing:
            seat.since = time.monotonic()
        fields = asked.method, list(asked.arguments), dict(asked.keywords), dict(asked.pieces)
        try:
            batch.references = seat.handle.answer.options(num_returns=2).remote(*fields, *asked.stored)
            seat.doing.append(batch)
        except Exception as error:  # of a connection that is gone, or of an argument that cannot be pickled
            batch.call.error = batch.call.error or error
            if cluster.is_gone():
                self._lose_all(f"the Ray cluster is gone: {cluster.first_line(error)}")

    def _greet(self, seat: Seat) -> None:
        """Ask an actor that is starting, or restarting, to say when it is ready: Ray repeats this until it is."""
        try:
            seat.hello = seat.handle.describe.options(max_task_retries=-1).remote()
        except Exception as error:
            self._gone(seat, cluster.first_line(error))

    def _collect(self, seat: Seat, done: set[Any]) -> None:
        """Take what a seat has answered; another caller may have been first."""
        import ray

        if seat.hello in done and not seat.gone:
            hello, seat.hello = seat.hello, None
            self._heard, self._unanswered = time.monotonic(), 0
            try:
                kind, description = ray.get(hello)
            except Exception as error:
                self._gone(seat, cluster.last_line(error))
                return
            if kind == "raised":
                self._failure = self._failure or failure_of(description)
                self._gone(seat, f"{description[1]}: {description[2]}")
            else:
                self._description = description
        for batch in [batch for batch in seat.doing if batch.references[0] in done]:
            self._heard, self._unanswered = time.monotonic(), 0
            try:
                kind, value = ray.get(batch.references[0])
            except ray.exceptions.RayTaskError as error:  # the actor lives but could not unpickle the request
                batch.call.error = batch.call.error or error
            except Exception as error:
                self._lost(seat, error)
                return
            else:
                self._answered(batch, kind, value)
            seat.doing.remove(batch)
            seat.since = time.monotonic()

    def _answered(self, batch: _Batch, kind: str, value: Any) -> None:
        call = batch.call
        if kind == "raised":
            call.error = call.error or failure_of(value)
        elif kind == "stored":
            call.answers[batch.place] = Answer(stored=(batch.references[1], *value))
        else:
            call.answers[batch.place] = Answer(value)

    def _lost(self, seat: Seat, failure: BaseException) -> None:
        """An actor died: count it against the batch that it worked on, and give all of its batches to others."""
        reason = cluster.last_line(failure)
        batches = list(seat.doing)
        seat.doing.clear()
        batches[0].attempts += 1
        for batch in reversed(batches):
            if batch.attempts >= self._section.batch_attempts:
                spent = f"{batch.attempts} actors died over a batch, or were too late with it; the last: {reason}"
                batch.call.error = batch.call.error or BatchLost(f"{self.name}: {spent}")
            else:
                self._queue.appendleft(batch)
        self._greet(seat)

    def _gone(self, seat: Seat, reason: str) -> None:
        seat.gone = True
        left = sum(not seat.gone for seat in self.seats)
        if left < self._needed:
            self._lose_all(f"{'an actor is gone' if left else 'no actor is left; the last'}: {reason}")

    def _lose_all(self, reason: str) -> None:
        self._closed = self._closed or reason

    def _look_around(self) -> None:
        """End actors that are late with a batch; probe the cluster where nothing comes."""
        import ray

        now = time.monotonic()
        limit = self._section.batch_timeout or math.inf
        for seat in self.seats:
            if seat.doing and now - seat.since > limit:
                with suppress(Exception):
                    ray.kill(seat.handle, no_restart=False)
                self._lost(seat, TimeoutError(f"no answer within {limit:g} s"))
        if now - self._heard > _PROBE_EVERY and not self._closed:
            self._heard = now
            self._unanswered = self._unanswered + 1 if cluster.is_gone() else 0
            if self._unanswered >= _PROBES:
                self._lose_all("the Ray cluster is gone: nothing answers there any more")


def failure_of(answer: tuple[bytes | None, str, str, str]) -> BaseException:
    """The exception that a judge raised in an actor; where this process has not its class, one of the same name."""
    from ray import cloudpickle

    packed, name, message, text = answer
    error = None
    with suppress(Exception):
        error = cloudpickle.loads(packed or b"")
    if not isinstance(error, BaseException):
        error = type(name, (RuntimeError,), {})(message)
    error.add_note(f"In the actor:\n{text}")
    return error


def start_actors(pool: str, judges: Sequence[Any], section: PoolSection, names: Sequence[str] = ()) -> list[Any]:
    """Start an actor for each judge, which it loads, and return their handles; `pool` is its name for errors.

    `names` are those under which any process of the cluster finds the actors; none where nobody looks for them.
    """
    import ray
    from ray import cloudpickle

    torch = sys.modules.get("torch")
    settings = {
        "folder": os.getcwd(),
        "check": bool(section.runtime_env or section.address),
        "deterministic": torch is not None and torch.are_deterministic_algorithms_enabled(),
    }
    resources = _resources(section)
    options: dict[str, Any] = {name: resources.pop(name) for name in _OPTIONS if name in resources}
    options |= {"resources": resources or None, "runtime_env": section.runtime_env or None}
    options |= {"max_restarts": section.max_restarts, "max_task_retries": 0}
    device = "gpu:0" if section.cards else "cpu"
    cloudpickle.register_pickle_by_value(actor)  # an interpreter of the judge's own need not have this package
    try:
        handles = []
        for number, judge in enumerate(judges):
            name = {"name": names[number], "namespace": cluster.NAMESPACE} if names else {}
            remote = ray.remote(actor.JudgeActor).options(**options, **name)
            handles.append(remote.remote(_packed(judge), device, settings))
        return handles
    except (TypeError, ValueError) as error:
        raise UserError(f"{pool}.resources, runtime_env: {cluster.first_line(error)}") from error
    finally:
        cloudpickle.unregister_pickle_by_value(actor)


def require_room(pool: str, section: PoolSection) -> None:
    """Raise UserError if a cluster that does not grow lacks a resource that the actors need in all."""
    import ray

    there = ray.cluster_resources()
    where = f"the Ray cluster at {section.address}" if section.address else "this machine's cluster"
    for name, amount in _resources(section).items():
        wanted, has = section.replicas * amount, there.get(_RAY_NAMES.get(name, name), 0.0)
        if wanted <= has:
            continue
        lack = f"{pool}.resources.{name}: {section.replicas} actors need {wanted:g}, {where} has {has:g}"
        if section.address is None or not cluster.grows():
            raise UserError(lack)
        _log.warning("%s; it is waited for until the cluster has grown", lack)


def _resources(section: PoolSection) -> dict[str, float]:
    """Resources of each actor."""
    return {"num_cpus": 1.0 if section.address else 0.0, "num_gpus": 0.0, **section.resources}


def _packed(judge: Any) -> bytes:
    """Pickle a judge, with the code of its file where no import finds that."""
    from ray import cloudpickle

    module = sys.modules.get(type(judge).__module__)
    file = Path(getattr(module, "__file__", None) or "")
    if module is None or file.stem in ("", "__init__", module.__name__.rpartition(".")[2]):
        return cloudpickle.dumps(judge)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(judge)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
