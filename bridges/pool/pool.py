"""A pool: the actors of a judge, and one queue of batches before them.

Each actor has a few batches in flight. No thread watches the pool: a caller that waits for an answer collects answers
for all callers (`ray.wait`), and hands out waiting batches. Ray restarts an actor that died. Its batches do not wait
for that: they go to others, like those of an actor that was ended because it was late. (`max_task_retries` is not used
for batches: Ray counts also what it tries while an actor restarts, and not only deaths.)
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bridges.pool import actor, cluster
from bridges.pool.cluster import BatchLost, PoolLost
from bridges.pool.section import PoolSection
from grpo_jax.errors import UserError

_log = logging.getLogger(__name__)

_PROBE_EVERY = 10.0  # seconds without an answer until the cluster is asked whether it is there
_START_SECONDS = 600.0  # to load the judges; large weights on a slow disk, or a cluster that grows, take minutes
_RAY_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # of resources
_OPTIONS = ("num_cpus", "num_gpus", "memory")  # resources that are options of an actor


class Block(NamedTuple):
    """An array in the object store: Ray's reference, rows, shape of a row, and tensor type, such as "float32"."""

    reference: Any
    rows: int
    inner: tuple[int, ...]
    kind: str


class Batch:
    """A request, as `actor.JudgeActor.answer` takes it; later its answer (a value or a `Block`), or an error."""

    def __init__(self, method: str, values: Mapping[int | str, Any], pieces: Mapping = {}, stored: Sequence[Any] = ()):
        """Take a request; `stored` are references, which `pieces` tell where to put."""
        self.request = method, dict(values), dict(pieces)
        self.stored = stored
        self.references: list[Any] = []  # while an actor has it
        self.attempts = 0  # actors that were lost over it
        self.done = False
        self.answer: Any = None
        self.error: BaseException | None = None


class Worker:
    """An actor. `starting` is a reference while it restarts; otherwise it works on the first batch in `running`."""

    def __init__(self, handle: Any):
        """Take Ray's handle."""
        self.handle = handle
        self.starting: Any = None
        self.since = 0.0  # when it began with the first batch
        self.running: list[Batch] = []


class Pool:
    """Actors of a judge, and the batches that wait for them; thread-safe."""

    def __init__(self, name: str, section: PoolSection):
        """Take the resources and limits of a section; `name` is for errors."""
        self.name = name
        self.workers: list[Worker] = []
        self._section = section
        self._queue: deque[Batch] = deque()
        self._lock = threading.Lock()
        self._closed = ""  # why
        self._last_answer = time.monotonic()

    def start(self, judges: Sequence[Any]) -> Any:
        """Start an actor for each judge; return a description of it (`JudgeActor.describe`) once all have loaded.

        Those that are late are ended. PoolLost if none has started; an error of loading the judge is raised as it was.
        """
        import ray

        self.workers = [Worker(handle) for handle in start_actors(self.name, judges, self._section)]
        described = [worker.handle.describe.remote() for worker in self.workers]
        with suppress(cluster.PoolLate):
            cluster.get(described, _START_SECONDS)
        ready = ray.wait(described, num_returns=len(described), timeout=0)[0]
        for worker, reference in zip(list(self.workers), described, strict=True):
            if reference not in ready:
                _log.warning("%s: an actor has not started within %g s (`ray status`)", self.name, _START_SECONDS)
                ray.kill(worker.handle)
                self.workers.remove(worker)
        if not ready:
            raise cluster.PoolLate(f"no actor has started within {_START_SECONDS:g} s (`ray status`)")
        self._last_answer = time.monotonic()
        return cluster.get(ready)[0]

    def ask(self, batches: Sequence[Batch]) -> list[Any]:
        """Return the answers of batches, in their order.

        Raises:
            PoolLost: No actor is left, or the cluster is gone.
            BatchLost: A batch cost as many actors as the limits allow.
            Exception: The judge's own.
        """
        with self._lock:
            self._queue.extend(batches)
        try:
            while not all(batch.done for batch in batches):
                self._advance()
                for batch in batches:
                    if batch.error is not None:
                        raise batch.error
                if self._closed:
                    raise PoolLost(f"{self.name}: {self._closed}")
        finally:
            for batch in batches:
                batch.done = True
        return [batch.answer for batch in batches]

    def close(self) -> None:
        """End the actors; callers that wait for them get PoolLost."""
        import ray

        self._closed = self._closed or "it was closed"
        if not cluster.is_gone():  # Ray would wait for it to come back
            for worker in self.workers:
                with suppress(Exception):
                    ray.kill(worker.handle)

    def _advance(self) -> None:
        """Hand out batches, wait until something in flight is done or somebody is late, and collect."""
        import ray

        with self._lock:
            self._dispatch()
            waiting = [worker.starting for worker in self.workers if worker.starting]
            waiting += [batch.references[0] for worker in self.workers for batch in worker.running]
        seconds = min(1.0, self._section.batch_timeout / 4 or 1.0)
        done: set[Any] = set()
        try:
            done = set(ray.wait(waiting, timeout=seconds, fetch_local=False)[0]) if waiting else done
        except Exception as error:  # of a connection that is gone
            self._closed = self._closed or f"the Ray cluster is gone: {cluster.last_line(error)}"
        now = time.monotonic()
        if done:
            self._last_answer = now
        elif now - self._last_answer > _PROBE_EVERY:
            self._last_answer = now
            if cluster.is_gone():
                self._closed = self._closed or "the Ray cluster is gone: nothing answers there any more"
        with self._lock:
            for worker in list(self.workers):
                self._collect(worker, done)
                if worker.running and 0 < self._section.batch_timeout < now - worker.since:
                    with suppress(Exception):
                        ray.kill(worker.handle, no_restart=False)
                    self._lost(worker, f"no answer within {self._section.batch_timeout:g} s")

    # Below, the lock is held.

    def _dispatch(self) -> None:
        """Give waiting batches to the actors that have the fewest."""
        while self._queue:
            ready = [worker for worker in self.workers if not worker.starting]
            free = min(ready, key=lambda worker: len(worker.running), default=None)
            if free is None or len(free.running) >= self._section.in_flight:
                return
            batch = self._queue.popleft()
            if batch.done:  # its call has failed
                continue
            if not free.running:
                free.since = time.monotonic()
            try:
                answer = free.handle.answer.options(num_returns=2, max_task_retries=0)
                batch.references = answer.remote(*batch.request, *batch.stored)
                free.running.append(batch)
            except Exception as error:  # of a connection that is gone, or of an argument that cannot be pickled
                batch.error = error
                if cluster.is_gone():
                    self._closed = self._closed or f"the Ray cluster is gone: {cluster.last_line(error)}"

    def _collect(self, worker: Worker, done: set[Any]) -> None:
        """Take what a worker has answered; another caller may have been first."""
        import ray
        from ray import exceptions

        if worker.starting in done:
            starting, worker.starting = worker.starting, None
            try:
                ray.get(starting)
            except Exception as error:
                self.workers.remove(worker)
                if not self.workers:
                    self._closed = self._closed or f"no actor is left; the last: {cluster.last_line(error)}"
                return
        for batch in [batch for batch in worker.running if batch.references[0] in done]:
            try:
                kind, value = ray.get(batch.references[0])
            except (exceptions.RayTaskError, exceptions.UnserializableException) as error:
                batch.error = cluster.judge_error(error)
            except Exception as error:
                self._lost(worker, cluster.last_line(error))
                return
            else:
                batch.answer = value
                if kind == "stored":
                    (rows, *inner), kind = value
                    batch.answer = Block(batch.references[1], rows, tuple(inner), kind)
                batch.done = True
            worker.running.remove(batch)
            worker.since = time.monotonic()

    def _lost(self, worker: Worker, reason: str) -> None:
        """An actor died: count it against the batch that it worked on, give all of its batches to others."""
        batches, worker.running = worker.running, []
        batches[0].attempts += 1
        if batches[0].attempts >= self._section.batch_attempts:
            spent = f"{batches[0].attempts} actors died over a batch, or were too late with it; the last: {reason}"
            batches.pop(0).error = BatchLost(f"{self.name}: {spent}")
        self._queue.extendleft(reversed(batches))
        with suppress(Exception):  # of a connection that is gone, which the next look notices
            worker.starting = worker.handle.describe.remote()


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
