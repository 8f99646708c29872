"""One queue of batches before the actors of a pool.

Each actor has a few batches in flight. No thread watches the pool: a caller that waits for an answer meanwhile
collects answers for all callers, and hands out waiting batches. A batch whose actor died, or was ended because it
was late, goes to another; its first answer counts, later ones are ignored.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from bridges.pool import cluster
from bridges.pool.errors import BatchLost, PoolLate, PoolLost

_PROBE_EVERY = 5.0  # seconds between two looks whether the cluster is there while nothing comes
_PROBES = 2  # unanswered in a row: the cluster is gone


class Request(NamedTuple):
    """A batch, as `actor.JudgeActor.answer` takes it; `stored` are references.

    `seat` is the number of the actor that is asked; None for whichever is free.
    """

    method: str
    arguments: Sequence[Any] = ()
    keywords: Mapping[str, Any] = MappingProxyType({})
    pieces: Mapping[Any, Any] = MappingProxyType({})
    stored: Sequence[Any] = ()
    seat: int | None = None


class Limits(NamedTuple):
    """See the fields of `section.PoolSection`."""

    in_flight: int = 2
    attempts: int = 3
    timeout: float = 600.0


class _Call:
    """Requests that are waited for together: answers, how many are still to come, and the failure."""

    def __init__(self, count: int):
        self.answers: list[Any] = [None] * count
        self.left, self.error = count, None

    @property
    def open(self) -> bool:
        return self.left > 0 and self.error is None


class _Batch:
    """A request in flight: its call and place there, the actors lost over it, and the ticket of its present attempt.

    Answers with another ticket are ignored.
    """

    def __init__(self, call: _Call, place: int, request: Request):
        self.call, self.place, self.request = call, place, request
        self.attempts, self.ticket, self.references = 0, None, ()


class Seat:
    """An actor: "starting", "ready" or "gone". It works on the first batch in `doing`, since `since`."""

    def __init__(self, handle: Any, number: int):
        """Begin in the state "starting"."""
        self.handle, self.number, self.state, self.since = handle, number, "starting", 0.0
        self.doing: deque[_Batch] = deque()


class Pool:
    """Actors and the batches that wait for them; thread-safe."""

    def __init__(self, name: str, handles: Sequence[Any], limits: Limits, *, whole: bool = False):
        """Take Ray's handles of `actor.JudgeActor`, which may still be starting; `name` is for errors.

        `whole` says that each actor has a part of its own, so that the pool is lost with any of them.
        """
        self.name, self._limits, self._needed = name, limits, len(handles) if whole else 1
        self.seats = [Seat(handle, number) for number, handle in enumerate(handles)]
        self._said: list[Any] = []
        self._queue: deque[_Batch] = deque()
        self._lock, self._bell = threading.Lock(), threading.Condition()
        self._arrived: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rung, self._closed, self._reason = 0, "", "no actor was started"
        self._heard, self._unheard = time.monotonic(), 0
        for seat in self.seats:
            self._greet(seat)

    def wait_until_ready(self, seconds: float) -> Any:
        """Return an actor's description of its judge (`actor.described`), once all have started or the time is over.

        PoolLost if none came, or not all of those that are needed; an error of loading the judge is raised as it was.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            tick = self._rung
            with self._lock:
                self._settle()
                self._look_around()
                if not any(seat.state == "starting" for seat in self.seats) or self._closed:
                    break
            self._listen(tick, min(1.0, max(deadline - time.monotonic(), 0.0)))
        raised = [told for kind, told in self._said if kind == "raised"]
        if raised:
            raise failure_of(raised[0])
        if len(self._said) >= self._needed:
            return self._said[0][1]
        if self._closed:
            raise PoolLost(f"{self.name}: {self._closed}")
        raise PoolLate(f"{self.name}: no actor has started within {seconds:g} s (`ray status`)")

    def ask(self, requests: Sequence[Request], seconds: float = math.inf) -> list[tuple[Any, Any]]:
        """Return the answers in the order of the requests: each a head and a reference to a kept array.

        Raises:
            PoolLost: Too few actors are left, or the cluster is gone.
            PoolLate: No answer within the seconds; the actors are left alone.
            BatchLost: A batch cost as many actors as the limits allow.
            Exception: The judge's own, which `failure_of` makes of its answer.
        """
        call, deadline = _Call(len(requests)), time.monotonic() + seconds
        with self._lock:
            self._queue.extend(_Batch(call, place, request) for place, request in enumerate(requests))
        try:
            while True:
                tick = self._rung
                with self._lock:
                    self._settle()
                    self._look_around()
                    self._hand_out()
                    if self._closed and call.open:
                        raise PoolLost(f"{self.name}: {self._closed}")
                if not call.open:
                    break
                if time.monotonic() > deadline:
                    raise PoolLate(f"{self.name}: no answer within {seconds:g} s")
                self._listen(tick, min(self._patience(), max(deadline - time.monotonic(), 0.0)))
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
        self._ring()
        gone = cluster.is_gone()  # Ray would wait for it to come back
        for seat in self.seats:
            seat.state = "gone"
            with cluster.quietly():
                if not gone:
                    ray.kill(seat.handle)

    # Below, the lock is held.

    def _settle(self) -> None:
        """Collect what has arrived."""
        while True:
            try:
                take = self._arrived.get_nowait()
            except queue.Empty:
                return
            self._heard, self._unheard = time.monotonic(), 0
            take()
            self._ring()  # it may be what another thread waits for

    def _hand_out(self) -> None:
        """Give waiting batches to the actors that have the fewest, or to the one that they ask for."""
        while self._queue:
            free = [s for s in self.seats if s.state == "ready" and len(s.doing) < self._limits.in_flight]
            free.sort(key=lambda seat: len(seat.doing))
            ways = ((batch, s) for batch in self._queue for s in free if batch.request.seat in (None, s.number))
            batch, seat = next(ways, (None, None))
            if batch is None or seat is None:
                return
            self._queue.remove(batch)
            if batch.call.open:
                self._send(batch, seat)

    def _send(self, batch: _Batch, seat: Seat) -> None:
        asked, ticket = batch.request, object()
        batch.ticket = ticket
        fields = asked.method, list(asked.arguments), dict(asked.keywords), dict(asked.pieces)
        if not seat.doing:
            seat.since = time.monotonic()
        seat.doing.append(batch)
        try:
            head, kept = seat.handle.answer.options(num_returns=2).remote(*fields, *asked.stored)
        except Exception as error:  # of a connection that is gone, or of an argument that cannot be pickled
            self._unsent(batch, seat, error)
            return
        batch.references = (head, kept)
        self._tell_when_done(head, lambda came, failure: self._answered(seat, batch, ticket, came, failure))

    def _unsent(self, batch: _Batch, seat: Seat, error: Exception) -> None:
        seat.doing.remove(batch)
        batch.call.error = batch.call.error or error
        if cluster.is_gone():
            self._lose_all(f"the Ray cluster is gone: {cluster.first_line(error)}")

    def _tell_when_done(self, reference: Any, take: Callable[[Any, Any], None]) -> None:
        """Have a waiting caller call `take(value, failure)` once Ray knows either; Ray's own thread only notifies."""

        def done(future: Any) -> None:
            failure = future.exception()
            came = None if failure is not None else future.result()
            self._arrived.put(lambda: take(came, failure))
            self._ring()

        reference.future().add_done_callback(done)

    def _answered(self, seat: Seat, batch: _Batch, ticket: object, came: Any, failure: Any) -> None:
        if batch.ticket is not ticket:  # it went elsewhere meanwhile
            return
        if failure is not None and not is_unreadable(failure):
            self._lost(seat, failure)
            return
        seat.doing.remove(batch)
        if failure is not None:
            batch.call.error = batch.call.error or failure
            return
        seat.since, kept = time.monotonic(), batch.references[1]
        batch.ticket, batch.references = None, ()
        call = batch.call
        if came[0] == "raised":
            call.error = call.error or failure_of(came[1])
        else:
            call.answers[batch.place] = came, kept
            call.left -= 1

    def _lost(self, seat: Seat, failure: Any) -> None:
        """An actor died: count it against the batch that it worked on, and give all of its batches to others."""
        reason = cluster.last_line(failure)
        batches = list(seat.doing)
        seat.doing.clear()
        if batches:
            batches[0].attempts += 1
        for batch in reversed(batches):
            batch.ticket, batch.references = None, ()
            if batch.attempts >= self._limits.attempts:
                spent = f"{batch.attempts} actors died over a batch, or were too late with it; the last: {reason}"
                batch.call.error = batch.call.error or BatchLost(f"{self.name}: {spent}")
            elif batch.call.open:
                self._queue.appendleft(batch)
        if seat.state == "ready":
            self._reason, seat.state = reason, "starting"
            self._greet(seat)

    def _greet(self, seat: Seat) -> None:
        """Ask an actor that is starting, or restarting, to say when it is ready."""
        try:
            reference = seat.handle.describe.options(max_task_retries=-1).remote()
        except Exception as error:
            self._gone(seat, cluster.first_line(error))
            return
        self._tell_when_done(reference, lambda came, failure: self._came(seat, came, failure))

    def _came(self, seat: Seat, came: Any, failure: Any) -> None:
        if seat.state == "gone":
            return
        if failure is not None:
            self._gone(seat, cluster.last_line(failure))
            return
        self._said.append(came)
        if came[0] == "raised":
            self._gone(seat, f"{came[1][1]}: {came[1][2]}")
        else:
            seat.state, seat.since = "ready", time.monotonic()

    def _gone(self, seat: Seat, reason: str) -> None:
        seat.state, self._reason = "gone", reason
        left = sum(seat.state != "gone" for seat in self.seats)
        if left < self._needed:
            self._lose_all(f"{'an actor is gone' if left else 'no actor is left; the last'}: {reason}")

    def _lose_all(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._ring()

    def _look_around(self) -> None:
        """End actors that are late with a batch; probe the cluster where nothing comes."""
        import ray

        now = time.monotonic()
        for seat in self.seats if self._limits.timeout else ():
            if seat.state == "ready" and seat.doing and now - seat.since > self._limits.timeout:
                with cluster.quietly():
                    ray.kill(seat.handle, no_restart=False)
                self._lost(seat, TimeoutError(f"no answer within {self._limits.timeout:g} s"))
        if now - self._heard > _PROBE_EVERY and not self._closed:
            self._heard, self._unheard = now, self._unheard + 1 if cluster.is_gone() else 0
            if self._unheard >= _PROBES:
                self._lose_all("the Ray cluster is gone: nothing answers there any more")

    # Below, the lock is not held.

    def _patience(self) -> float:
        """Seconds until somebody must look around."""
        return min(1.0, self._limits.timeout / 4 or 1.0)

    def _ring(self) -> None:
        with self._bell:
            self._rung += 1
            self._bell.notify_all()

    def _listen(self, tick: int, seconds: float) -> None:
        with self._bell:
            self._bell.wait_for(lambda: self._rung != tick, seconds)


def is_unreadable(failure: BaseException) -> bool:
    """Tell whether the actor lives but could not unpickle its request: a package that it lacks, say."""
    from ray import exceptions

    return isinstance(failure, exceptions.RayTaskError)


def failure_of(told: tuple[bytes | None, str, str, str]) -> BaseException:
    """The exception that a judge raised in an actor; where this process has not its class, one of the same name."""
    packed, name, message, text = told
    error = None
    if packed is not None:
        from ray import cloudpickle

        with cluster.quietly():
            error = cloudpickle.loads(packed)
    if not isinstance(error, BaseException):
        error = type(name, (RuntimeError,), {})(message)
    error.add_note(f"In the actor:\n{text}")
    return error
