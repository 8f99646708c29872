"""A pool: the actors of a judge, and the calls that give them batches.

A call gives each actor its next batch when one has come back (`ray.wait`). Ray restarts an actor that died. Its
batches do not wait for that: they go to others, like those of an actor that was ended because it was late.
(`max_task_retries` is not used for batches: Ray counts also what it tries while an actor restarts, not deaths alone.)
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bridges.pool import actor, cluster
from bridges.pool.cluster import BatchLost, PoolLate, PoolLost
from grpo_jax.config.judge import PoolSection
from grpo_jax.errors import UserError

_log = logging.getLogger(__name__)

_START_SECONDS = 600.0  # to load the judges; large weights on a slow disk, or a cluster that grows, take minutes
_RAY_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # of resources
_OPTIONS = ("num_cpus", "num_gpus", "memory")  # resources that are options of an actor

Request = tuple[str, dict[int | str, Any], dict[int | str, Any]]
"""Method, values and stored arrays of one batch, as `actor.JudgeActor.answer` takes them."""


class Pool:
    """Actors of a judge; any number of threads may ask them.

    Attributes:
        actors: Those that Ray keeps alive or restarts.
        away: Actors that Ray restarts, by the reference of their answer once they are back.
        since: When an actor was last given a batch, or answered one.
        closed: Why nothing can be asked any more; "" while it can.
    """

    def __init__(self, name: str, section: PoolSection):
        """Take the resources and limits of a section; `name` is for errors."""
        self.name = name
        self.section = section
        self.actors: list[Any] = []
        self.away: dict[Any, Any] = {}
        self.since: dict[Any, float] = {}
        self.closed = ""

    def start(self, judges: Sequence[Any]) -> Any:
        """Start an actor for each judge; return a description of it (`JudgeActor.describe`) once all have loaded.

        PoolLost if one does not start; an error of loading the judge is raised as it was.
        """
        self.actors = start_actors(self.name, judges, self.section)
        try:
            description, *_ = cluster.get([handle.describe.remote() for handle in self.actors], _START_SECONDS)
        except PoolLate as error:
            late = f"not all of {len(judges)} actors have started within {_START_SECONDS:g} s (`ray status`)"
            raise PoolLate(late) from error
        return description

    def ask(self, requests: Sequence[Request]) -> list[Any]:
        """Return the answers to requests, in their order.

        Raises:
            PoolLost: No actor is left, or the cluster is gone.
            BatchLost: A batch cost as many actors as the limits allow.
            Exception: The judge's own.
        """
        try:
            return _Call(self, requests).answers()
        except PoolLost as error:
            raise PoolLost(f"{self.name}: {error}") from error

    def back(self, reference: Any) -> None:
        """Take the answer of an actor that Ray has restarted; one that gives none is lost for good."""
        handle = self.away.get(reference)
        try:
            cluster.get([reference])
        except Exception as error:
            with suppress(ValueError):  # another call was first
                self.actors.remove(handle)
            if not self.actors:
                self.closed = self.closed or f"no actor is left; the last: {cluster.last_line(error)}"
        self.away.pop(reference, None)

    def close(self) -> None:
        """End the actors; callers that wait for them get PoolLost."""
        import ray

        self.closed = self.closed or "it was closed"
        if not cluster.is_gone():  # Ray would wait for it to come back
            for handle in self.actors:
                with suppress(Exception):
                    ray.kill(handle)


class _Sent(NamedTuple):
    """A batch by its number, the actor that has it, and the reference of the array of its answer."""

    batch: int
    actor: Any
    array: Any


class _Call:
    """Batches of one call: those that wait, those that actors have, and the answers."""

    def __init__(self, pool: Pool, requests: Sequence[Request]):
        self._pool = pool
        self._requests = requests
        self._waiting = deque(range(len(requests)))
        self._sent: dict[Any, _Sent] = {}  # by the reference of the answer; an actor's in the order of its work
        self._attempts: Counter[int] = Counter()  # actors that were lost over a batch
        self._answers: dict[int, Any] = {}
        self._failed: Exception | None = None  # of the judge, raised once no actor has a batch any more

    def answers(self) -> list[Any]:
        """Work until all batches are answered; see `Pool.ask`."""
        limit = self._pool.section.batch_timeout or math.inf
        while self._sent or (self._waiting and self._failed is None):
            if self._failed is None:
                self._send()
            since = {sent.actor: self._pool.since[sent.actor] for sent in self._sent.values()}
            left = min([cluster.PROBE_SECONDS, *(begun + limit - time.monotonic() for begun in since.values())])
            for reference in cluster.ready([*self._pool.away, *self._sent], left):
                self._collect(reference)
            for handle, begun in since.items():
                if self._pool.since[handle] == begun <= time.monotonic() - limit:
                    self._end(handle, limit)
        if self._failed is not None:
            raise self._failed
        return [self._answers[batch] for batch in range(len(self._requests))]

    def _send(self) -> None:
        """Give each actor that is there its next batches: a second one only when all have a first."""
        if self._pool.closed:
            raise PoolLost(self._pool.closed)
        running = Counter(sent.actor for sent in self._sent.values())
        away = list(self._pool.away.values())
        there = [handle for handle in self._pool.actors if handle not in away]
        for depth in range(self._pool.section.in_flight):
            for handle in there:
                if self._waiting and running[handle] == depth:
                    batch = self._waiting.popleft()
                    answer = handle.answer.options(num_returns=2, max_task_retries=0)
                    reference, array = cluster.attempt(answer.remote, *self._requests[batch])
                    self._sent[reference] = _Sent(batch, handle, array)
                    self._pool.since[handle] = time.monotonic()
                    running[handle] += 1

    def _collect(self, reference: Any) -> None:
        """Take the answer to a batch, or of an actor that is back."""
        if reference not in self._sent:
            return self._pool.back(reference)
        sent = self._sent[reference]
        try:
            ((kind, value),) = cluster.get([reference])
        except PoolLost as error:
            if cluster.is_gone():
                raise
            return self._lose(sent.actor, error)
        except Exception as error:
            self._failed, value = error, None
        else:
            if kind == "stored":
                from bridges.pool.stored import stored

                value = stored(sent.array, *value)
        del self._sent[reference]
        self._pool.since[sent.actor] = time.monotonic()
        self._answers[sent.batch] = value

    def _end(self, handle: Any, limit: float) -> None:
        """End an actor that is late; Ray starts it again."""
        import ray

        with suppress(Exception):
            ray.kill(handle, no_restart=False)
        self._lose(handle, PoolLate(f"no answer within {limit:g} s"))

    def _lose(self, handle: Any, error: PoolLost) -> None:
        """Give the batches of an actor that died or is late to others; it counts against the first of them."""
        pool = self._pool
        lost = {reference: sent.batch for reference, sent in self._sent.items() if sent.actor == handle}
        for reference in lost:
            del self._sent[reference]
        first, *_ = lost.values()
        self._attempts[first] += 1
        pool.since[handle] = time.monotonic()
        if handle not in list(pool.away.values()):
            pool.away[cluster.attempt(handle.describe.remote)] = handle
        if self._attempts[first] >= pool.section.batch_attempts:
            spent = f"{self._attempts[first]} actors died over a batch, or were too late with it; the last: {error}"
            self._failed = BatchLost(f"{pool.name}: {spent}")
        self._waiting.extendleft(reversed(lost.values()))


def start_actors(pool: str, judges: Sequence[Any], section: PoolSection, names: Sequence[str] = ()) -> list[Any]:
    """Start an actor for each judge, and return their handles; `pool` is its name for errors.

    Questions that may be asked twice (`describe` and `call`) wait for an actor that Ray restarts, and are asked again.
    `names` are those under which any process of the cluster finds the actors; none where nobody looks for them.
    """
    import ray
    from ray import cloudpickle

    torch = sys.modules.get("torch")
    settings = {
        "folder": os.getcwd(),
        "check": bool(section.runtime_env or section.address),
        "deterministic": torch is not None and torch.are_deterministic_algorithms_enabled(),
        "tf32": torch is None or torch.backends.cudnn.allow_tf32,
    }
    resources = _resources(section)
    options: dict[str, Any] = {name: resources.pop(name) for name in _OPTIONS if name in resources}
    options |= {"resources": resources or None, "runtime_env": section.runtime_env or None}
    options |= {"max_restarts": section.max_restarts, "max_task_retries": -1, "namespace": cluster.NAMESPACE}
    device = "gpu:0" if section.cards else "cpu"
    cloudpickle.register_pickle_by_value(actor)  # an interpreter of the judge's own need not have this package
    try:
        remote = ray.remote(actor.JudgeActor)
        return [
            remote.options(**options, name=name or None).remote(_packed(judge), device, settings)
            for judge, name in zip(judges, names or [""] * len(judges), strict=True)
        ]
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
