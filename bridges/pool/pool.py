"""A pool: the actors of a judge, and one queue of batches before them.

A thread for each actor gives it the next batches and waits for its answers. Ray restarts an actor that died. Its
batches do not wait for that: they go to others, like those of an actor that was ended because it was late.
(`max_task_retries` is not used for batches: Ray counts also what it tries while an actor restarts, not deaths alone.)
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bridges.pool import actor, cluster
from bridges.pool.cluster import ActorLost, BatchLost, PoolLate, PoolLost
from bridges.pool.section import PoolSection
from grpo_jax.errors import UserError

_log = logging.getLogger(__name__)

_START_SECONDS = 600.0  # to load the judges; large weights on a slow disk, or a cluster that grows, take minutes
_CLOSE_SECONDS = 10.0  # until the threads of a pool have ended
_RAY_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # of resources
_OPTIONS = ("num_cpus", "num_gpus", "memory")  # resources that are options of an actor


class Block(NamedTuple):
    """An array in the object store: Ray's reference, rows, shape of a row, and tensor type, such as "float32"."""

    reference: Any
    rows: int
    inner: tuple[int, ...]
    kind: str


@dataclass(eq=False)
class Batch:
    """A request (method, values, stored), as `actor.JudgeActor.answer` takes it, and the answer to come."""

    request: tuple[str, dict[int | str, Any], dict[int | str, Any]]
    references: Sequence[Any] = ()
    """Of its answer, while an actor has it."""
    attempts: int = 0
    """Actors that were lost over it."""
    given_up: bool = False
    """Its call has failed."""
    answer: Future[Any] = field(default_factory=Future)


class Pool:
    """Actors of a judge, and the batches that wait for them; thread-safe."""

    def __init__(self, name: str, section: PoolSection):
        """Take the resources and limits of a section; `name` is for errors."""
        self.name = name
        self.actors: list[Any] = []
        self._section = section
        self._threads: list[threading.Thread] = []
        self._waiting: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._idle = 0  # threads that wait for a batch
        self._working = 0  # threads that have not ended
        self._closed = ""  # why

    def start(self, judges: Sequence[Any]) -> Any:
        """Start an actor for each judge; return a description of it (`JudgeActor.describe`) once all have loaded.

        PoolLost if one does not start; an error of loading the judge is raised as it was.
        """
        self.actors = start_actors(self.name, judges, self._section)
        try:
            description, *_ = cluster.get([handle.describe.remote() for handle in self.actors], _START_SECONDS)
        except PoolLate as error:
            late = f"not all of {len(judges)} actors have started within {_START_SECONDS:g} s (`ray status`)"
            raise PoolLate(late) from error
        self._working = len(self.actors)
        self._threads = [threading.Thread(target=self._serve, args=(one,), daemon=True) for one in self.actors]
        for thread in self._threads:
            thread.start()
        return description

    def ask(self, batches: Sequence[Batch]) -> list[Any]:
        """Return the answers of batches, in their order.

        Raises:
            PoolLost: No actor is left, or the cluster is gone.
            BatchLost: A batch cost as many actors as the limits allow.
            Exception: The judge's own.
        """
        with self._changed:
            if self._closed:
                raise PoolLost(f"{self.name}: {self._closed}")
            self._waiting.extend(batches)
            self._changed.notify_all()
        answers = [batch.answer for batch in batches]
        try:
            for answer in wait(answers, return_when=FIRST_EXCEPTION).done:
                answer.result()
        finally:
            for batch in batches:
                batch.given_up = True
        return [answer.result() for answer in answers]

    def close(self) -> None:
        """End the actors; callers that wait for them get PoolLost."""
        import ray

        with self._changed:
            self._close("it was closed")
        if not cluster.is_gone():  # Ray would wait for it to come back
            for handle in self.actors:
                with suppress(Exception):
                    ray.kill(handle)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _serve(self, handle: Any) -> None:
        """Keep an actor busy until the pool is closed, or the actor is lost for good."""
        running: deque[Batch] = deque()
        reason = ""
        try:
            while not self._closed:
                while len(running) < self._section.in_flight and (batch := self._take(bool(running))):
                    running.append(batch)
                    self._send(handle, running)
                if running:
                    self._collect(handle, running)
        except Exception as error:  # whatever it is, nobody may wait for this actor
            reason = cluster.last_line(error)
        with self._changed:
            self._waiting.extendleft(reversed(running))
            self._working -= 1
            if self._closed or not self._working:
                self._close(f"no actor is left; the last: {reason}")
            self._changed.notify_all()

    def _take(self, busy: bool) -> Batch | None:
        """Return the next batch for an actor, for which it waits unless it is busy; None if there is none for it."""
        with self._changed:
            if not busy:
                self._idle += 1
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._idle -= 1
            elif len(self._waiting) <= self._idle:  # an idle actor begins with them at once
                return None
            while self._waiting:
                batch = self._waiting.popleft()
                if not batch.given_up:
                    return batch
            return None

    def _send(self, handle: Any, running: deque[Batch]) -> None:
        """Give an actor the last of its batches."""
        try:
            answer = handle.answer.options(num_returns=2, max_task_retries=0)
            running[-1].references = answer.remote(*running[-1].request)
        except Exception as error:  # of an argument that cannot be pickled, or of a connection that is gone
            if cluster.is_gone():
                raise
            running.pop().answer.set_exception(error)

    def _collect(self, handle: Any, running: deque[Batch]) -> None:
        """Wait for the answer that an actor works on; PoolLost if the actor is lost for good, or the cluster."""
        array = running[0].references[1]
        try:
            ((kind, value),) = cluster.get(running[0].references[:1], self._section.batch_timeout or math.inf)
        except (ActorLost, PoolLate) as error:
            if cluster.is_gone():
                raise
            self._replace(handle, running, error)
        except PoolLost:
            raise
        except BaseException as error:
            running.popleft().answer.set_exception(error)
        else:
            if kind == "stored":
                (rows, *inner), dtype = value
                value = Block(array, rows, tuple(inner), dtype)
            running.popleft().answer.set_result(value)

    def _replace(self, handle: Any, running: deque[Batch], error: PoolLost) -> None:
        """Give the batches of an actor that died or is late to others, and wait until Ray has restarted it.

        It counts against the batch that it worked on. PoolLost if it does not come back.
        """
        import ray

        if isinstance(error, PoolLate):
            with suppress(Exception):
                ray.kill(handle, no_restart=False)
        running[0].attempts += 1
        if running[0].attempts >= self._section.batch_attempts:
            spent = f"{running[0].attempts} actors died over a batch, or were too late with it; the last: {error}"
            running.popleft().answer.set_exception(BatchLost(f"{self.name}: {spent}"))
        with self._changed:
            self._waiting.extendleft(reversed(running))
            self._changed.notify_all()
        running.clear()
        cluster.get([handle.describe.remote()])

    def _close(self, reason: str) -> None:
        """Refuse what waits, and what will come, for a reason; the lock is held."""
        self._closed = self._closed or reason
        while self._waiting:
            self._waiting.popleft().answer.set_exception(PoolLost(f"{self.name}: {self._closed}"))
        self._changed.notify_all()


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
