"""A judge in plain Ray actors: a call is split into batches of rows, and each actor that is free takes the next.

Ray restarts an actor that died. Its batch does not wait for that: it goes to another. An actor that is late ends its
own process, so late is dead, too.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import Signature
from pathlib import Path
from typing import Any

import numpy as np

from bridges.placement import cards_left
from bridges.ray_pool import actor, cluster
from bridges.ray_pool.cluster import ActorLost, PoolLate, PoolLost
from grpo_jax.config.judge import PoolSection
from grpo_jax.errors import UserError

_log = logging.getLogger(__name__)
_ROWS = 32  # of a batch where neither the pool nor its judge says how many
_RAY_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # of resources

Request = tuple[Sequence[Any], dict[str, Any]]
"""Arguments and keywords of one batch."""


class BatchLost(RuntimeError):
    """Every actor that was given a batch died or timed out on it: the judge failed on it."""


class RayPool:
    """Proxy of a judge in Ray actors, with its plain attributes and its methods.

    Arguments of one length are split into batches of rows, whose answers are joined in their order: a judge must judge
    each row by itself. Threads ask a pool one after the other.
    """

    device = "cpu"

    def __init__(
        self,
        name: str,
        actors: Sequence[Any],
        description: tuple[dict[str, Any], list[str], Signature | None],
        *,
        batch: int = 0,
        attempts: int = 3,
        limit: float = 0.0,
        close: Callable[[], None] = lambda: None,
    ):
        """Take actors that have loaded the judge.

        Args:
            name: For errors.
            actors: Handles.
            description: See `described`.
            batch: Rows of a batch; 0 for the judge's own batch_size.
            attempts: Actors that may be lost over one batch.
            limit: Seconds that each has for one, for errors; 0 for none.
            close: Ends the actors.
        """
        self._name, self._attempts, self._lock = name, attempts, threading.Lock()
        self._free, self._last = deque(actors), ""
        self._away: dict[Any, Any] = {}  # actors that Ray restarts, by the reference of their answer
        self._late = f" or took more than {limit:g} s (batch_timeout)" if limit else ""
        attributes, self._methods, signature = description
        vars(self).update({name: value for name, value in attributes.items() if name not in ("device", "close")})
        size = batch or attributes.get("batch_size")
        self._size = size if isinstance(size, int) and size > 0 else _ROWS
        self._title = f"{attributes['title']}; {len(actors)} actors of a Ray cluster, {self._size} rows at a time"
        self.close = close
        if signature is not None:
            self.__signature__ = signature

    def __str__(self) -> str:
        return self._title

    def __getattr__(self, name: str) -> Any:
        methods = vars(self).get("_methods", ())
        if name not in methods:
            raise AttributeError(f"{name} is in the actors of a pool, which has methods alone: {', '.join(methods)}")
        return self._draw if name == "draw" else functools.partial(self._ask, name)

    def _ask(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        rows, requests = split(arguments, keywords, self._size)
        return joined(self.run(method, requests), rows, f"{self._name}.{method}".rstrip("."))

    def _draw(self, texts: Sequence[str], seeds: Sequence[int], **keywords: Any) -> Any:
        """Draw equal pairs of text and seed once."""
        pairs = list(zip(texts, seeds, strict=True))
        different = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
        drawn = self._ask("draw", [text for text, _ in different], [seed for _, seed in different], **keywords)
        return drawn if len(different) == len(pairs) else drawn[[different[pair] for pair in pairs]]

    def run(self, method: str, requests: Sequence[Request], seconds: float = math.inf) -> list[Any]:
        """Return a method's answers to some batches, in their order.

        Raises:
            PoolLate: They did not come within the seconds.
            PoolLost: No actor is left, or the cluster is gone.
            BatchLost: A batch cost as many actors as the limits allow.
            Exception: The judge's own, once no actor has a batch any more.
        """
        try:
            with self._lock:
                return self._answers(method, requests, time.monotonic() + seconds)
        except PoolLate as error:
            raise PoolLate(f"{self._name}: no answer within {seconds:g} s") from error
        except PoolLost as error:
            raise PoolLost(f"{self._name}: {error}") from error

    def _answers(self, method: str, requests: Sequence[Request], deadline: float) -> list[Any]:
        waiting, sent = deque(range(len(requests))), {}
        answers, lost, failed = [None] * len(requests), Counter(), None
        while sent or (waiting and failed is None):
            while waiting and self._free and failed is None:
                number, handle = waiting.popleft(), self._free.popleft()
                answer = handle.answer.options(max_task_retries=0)  # Ray would ask the same actor, and count refusals
                sent[cluster.attempt(answer.remote, method, *requests[number])] = number, handle
            if not (sent or self._away):
                raise PoolLost(f"no actor is left; the last: {self._last}")
            reference = cluster.ready([*sent, *self._away], deadline - time.monotonic())
            if reference in self._away:
                self._take_back(reference)
                continue
            number, handle = sent.pop(reference)
            try:
                answers[number] = actor.own(cluster.fetched(reference))
            except ActorLost as error:
                self._away[handle.describe.remote()] = handle
                waiting.appendleft(number)
                lost[number] += 1
                if lost[number] >= self._attempts:
                    spent = f"{lost[number]} actors died{self._late} over one batch; the last: {error}"
                    failed = BatchLost(f"{self._name}: {spent}")
                continue
            except PoolLost:
                raise
            except Exception as error:
                failed = error
            self._free.append(handle)
        if failed is not None:
            raise failed
        return answers

    def _take_back(self, reference: Any) -> None:
        """Use an actor again that Ray has restarted; one that does not load is lost for good."""
        handle = self._away.pop(reference)
        try:
            cluster.fetched(reference)
            self._free.append(handle)
        except Exception as error:
            self._last = cluster.last_line(error)


class PooledReward(RayPool):
    """A judge that can be called, with its signature, from which a reward's arguments are chosen."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the judge."""
        return self._ask("", *arguments, **keywords)


def load_pooled(judge: Any, section: PoolSection, name: str) -> RayPool:
    """Start the actors of a pool and wait until they have loaded the judge; `name` is for errors."""
    try:
        cluster.enter(section.address, cards=cards_left() if section.address is None else None)
    except UserError as error:
        raise UserError(f"{name}{'.address' if section.address else ''}: {error}") from error
    actors: list[Any] = []

    @functools.cache
    def end() -> None:
        kill(actors)
        cluster.leave()

    try:
        actors += start_actors(name, [judge] * section.replicas, section)
        description = described(actors, actor.START_SECONDS)
    except BaseException as error:
        end()
        if isinstance(error, PoolLost):  # nothing has begun that could be saved
            raise UserError(f"{name}: {error}; the pool did not start (see `ray status`)") from error
        raise
    kind = RayPool if description[2] is None else PooledReward
    size = section.batch or getattr(judge, "batch_size", 0)
    limits = {"batch": size, "attempts": section.batch_attempts, "limit": section.batch_timeout}
    return kind(name, actors, description, **limits, close=end)


def described(actors: Sequence[Any], seconds: float) -> Any:
    """Wait until actors have loaded, and return `JudgeActor.describe`; an error of loading is raised as it was."""
    waiting, deadline = [handle.describe.remote() for handle in actors], time.monotonic() + seconds
    while waiting:
        waiting.remove(reference := cluster.ready(waiting, deadline - time.monotonic()))
        description = cluster.fetched(reference)
    return description


def kill(actors: Sequence[Any]) -> None:
    """End actors; not where the cluster is gone, since Ray would wait for it to come back."""
    import ray

    for handle in actors if not cluster.is_gone() else ():
        with suppress(Exception):
            ray.kill(handle)


def start_actors(name: str, judges: Sequence[Any], section: PoolSection, named: Sequence[str] = ()) -> list[Any]:
    """Start an actor for each judge of a pool, and return their handles.

    `named` are names under which any process of the cluster finds them. UserError if a cluster of the run's own lacks
    a resource; one elsewhere may grow.
    """
    import ray
    from ray import cloudpickle

    resources = {"num_cpus": 1.0 if section.address else 0.0, "num_gpus": 0.0, **section.resources}
    there = ray.cluster_resources()
    for kind, amount in resources.items():
        wanted, has = len(judges) * amount, there.get(_RAY_NAMES.get(kind, kind), 0.0)
        if wanted > has:
            lack = f"{name}.resources.{kind}: {len(judges)} actors need {wanted:g}, the Ray cluster has {has:g}"
            if section.address is None:
                raise UserError(lack)
            _log.warning("%s; it is waited for until the cluster has grown", lack)
    torch = sys.modules.get("torch")
    settings = {
        "folder": os.getcwd(),
        "timeout": section.batch_timeout,
        "check": bool(section.runtime_env or section.address),
        "deterministic": torch is not None and torch.are_deterministic_algorithms_enabled(),
        "tf32": torch is None or torch.backends.cudnn.allow_tf32,
    }
    options = {kind: resources.pop(kind) for kind in ("num_cpus", "num_gpus", "memory") if kind in resources}
    options |= {"resources": resources or None, "runtime_env": section.runtime_env or None}
    options |= {"max_restarts": section.max_restarts, "max_task_retries": -1, "namespace": cluster.NAMESPACE}
    device = "gpu:0" if section.cards else "cpu"
    cloudpickle.register_pickle_by_value(actor)  # an interpreter of the judge's own need not have this package
    try:
        remote = ray.remote(actor.JudgeActor)
        return [
            remote.options(**options, name=one or None).remote(_packed(judge), device, settings)
            for judge, one in zip(judges, named or [""] * len(judges), strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}.resources, runtime_env: {cluster.told(error)}") from error
    finally:
        cloudpickle.unregister_pickle_by_value(actor)


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


def split(arguments: Sequence[Any], keywords: dict[str, Any], size: int) -> tuple[list[int], list[Request]]:
    """Split a call into batches of `size` rows, the last with what is left; return the rows of each, and the requests.

    Lists, tuples, and arrays of NumPy or torch have rows. Where these are not all of one length, or none is given, the
    call is one batch.
    """
    counts = {len(value) for value in (*arguments, *keywords.values()) if _has_rows(value)}
    if len(counts) != 1 or 0 in counts:
        return [0], [(actor.on_host(list(arguments)), actor.on_host(keywords))]

    (count,) = counts
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def of(part: slice, value: Any) -> Any:
        return actor.on_host(value[part] if _has_rows(value) else value)

    requests = [([of(part, one) for one in arguments], {k: of(part, v) for k, v in keywords.items()}) for part in parts]
    return [part.stop - part.start for part in parts], requests


def _has_rows(value: Any) -> bool:
    if isinstance(value, np.ndarray) or actor.is_tensor(value):
        return value.ndim > 0
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def joined(values: Sequence[Any], rows: Sequence[int], judge: str) -> Any:
    """Join the answers to the batches of a call, in their order; TypeError if one has not a value for each row."""
    if len(values) == 1:
        return values[0]
    for value, count in zip(values, rows, strict=True):
        if not _has_rows(value) or len(value) != count:
            came = f"{len(value)} values" if _has_rows(value) else type(value).__name__
            raise TypeError(
                f"{judge} answered a batch of {count} rows with {came}, so it does not judge row by row: set its "
                "`batch` to the rows of a whole call, which is then not taken apart"
            )
    if actor.is_tensor(values[0]):
        return sys.modules["torch"].cat(list(values))
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    return type(values[0])(entry for value in values for entry in value)
