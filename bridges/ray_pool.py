"""A judge in plain Ray actors: a call is split into batches of rows, and each free actor takes the next one.

Ray restarts a dead actor, but its batch goes to another actor at once. An actor that times out ends its own process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import inspect
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import numpy as np

from bridges.ray_cluster import NAMESPACE, PROBE_SECONDS, ActorLost, PoolLost, attempt, is_gone, join, told
from grpo_jax.config.fields import require
from grpo_jax.config.judge import Judge, PoolSection, title
from grpo_jax.config.named import FILE
from grpo_jax.errors import UserError

START_SECONDS = 600.0  # to load a judge: large weights on a slow disk, or a cluster that grows, take minutes
ROWS = 32  # rows per batch for a judge without a batch_size
ATTEMPTS, RESTARTS = 3, 10  # maximum actors lost over one batch, and maximum restarts of an actor
Description = tuple[str, dict[str, Any], list[str], Signature | None]
"""Of a loaded judge: title, plain public attributes, names of methods, and signature (None without a call)."""


class BatchLost(RuntimeError):
    """Every actor died or timed out on a batch: the judge failed on it."""


def placed(judge: Judge, name: str) -> Judge | Pooled:
    """Return a judge of the config for loading, in its pool if it has one. `name` is its name in errors."""
    return Pooled(judge, judge.pool, name) if judge.pool else judge


@dataclass(frozen=True)
class Pooled:
    """A judge with its pool."""

    judge: Judge
    pool: PoolSection
    name: str

    def check(self) -> None:
        """Run the judge's own check; remote actors, and those with their own packages, run it themselves."""
        if not (self.pool.runtime_env or self.pool.address):
            self.judge.check()

    def load(self, device: str = "cpu") -> RayPool:
        """Start the actors, wait until they have loaded the judge, and return a proxy; `leave` ends them."""
        from bridges.placement import cards_left

        pool, name = self.pool, self.name
        require(device == "cpu", "devices", "none for a judge in a pool, which has its resources", device)
        try:
            join(pool.address, cards=None if pool.address else cards_left(), for_run=True)
        except UserError as error:
            raise UserError(f"{name}{'.address' if pool.address else ''}: {error}") from error
        actors = start_actors(name, self.judge, pool)
        try:
            about = described(actors)
        except PoolLost as error:  # there is nothing to save yet
            raise UserError(f"{name}: {error}; the pool did not start (see `ray status`)") from error
        if logs := sorted({"log_metric", "log_extra"} & {*getattr(about[-1], "parameters", ())}):
            raise UserError(f"{name}: actors cannot log: take {', '.join(logs)} out of its arguments, or drop its pool")
        kind = RayPool if about[-1] is None else PooledReward
        return kind(name, actors, about, getattr(self.judge, "batch_size", 0) or ROWS, pool.batch_timeout)

    def memory(self) -> list[tuple[str, int, str]]:
        """Return the actors' memory on this machine, without GPUs of a pool and other machines."""
        pool = self.pool
        if pool.address or pool.cards:
            where = f"{pool.replicas} actors of a Ray cluster, each with {pool.cards:g} of its cards"
            return [(type(self.judge).__name__, 0, f"not counted: {where}")]
        lines = self.judge.memory()
        return [(name, pool.replicas * size, f"{note}, in {pool.replicas} actors") for name, size, note in lines]


class JudgeActor:
    """A judge that is loaded on its first call, so that a loading error arrives like any other."""

    def __init__(self, judge: Any, device: str, folder: str, timeout: float, kernels: tuple[bool, bool]):
        """Take "cpu" or "gpu:0", the run's folder, a batch's seconds, and if torch is deterministic and uses TF32."""
        self._judge, self._device, self._folder, self._timeout, self._kernels = judge, device, folder, timeout, kernels
        self._runner = asyncio.Runner()  # one event loop for all batches, to which a client may be bound

    @functools.cached_property
    def _loaded(self) -> Any:
        if os.path.isdir(self._folder):
            os.chdir(self._folder)  # a config's paths are relative to it
        if self._device == "cpu":
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if self._kernels[0] or self._device != "cpu":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            import torch

            torch.use_deterministic_algorithms(self._kernels[0])
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self._kernels[1]
        getattr(self._judge, "check", bool)()
        return self._judge.load(self._device)

    def describe(self) -> Description:
        """Load the judge and describe it."""
        judge, public = self._loaded, {}
        for name in dir(judge):
            with suppress(Exception):  # a property may be unavailable, or need a package
                public |= {} if name.startswith("_") else {name: getattr(judge, name)}
        plain = {name: value for name, value in public.items() if type(value) in (bool, int, float, str, tuple)}
        methods = [name for name, value in public.items() if callable(value)]
        if not callable(judge):
            return title(judge), plain, methods, None
        given = inspect.signature(judge).parameters.values()  # without types and defaults, which may need its packages
        bare = [Parameter(p.name, p.kind, default=p.empty if p.default is p.empty else None) for p in given]
        return title(judge), plain, methods, Signature(bare)

    def answer(self, method: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Call a method with one batch, or the judge itself if the name is ""; a timeout ends the process."""
        judge = self._loaded
        call, device = getattr(judge, method) if method else judge, getattr(judge, "device", None) or "cpu"
        if self._timeout:  # works even while a call holds the interpreter lock
            faulthandler.dump_traceback_later(self._timeout, exit=True, file=sys.__stderr__)
        try:
            own = {name: _copied(value, device) for name, value in keywords.items()}
            value = call(*[_copied(one, device) for one in arguments], **own)
            return _copied(self._runner.run(value) if inspect.iscoroutine(value) else value)
        except (SystemExit, KeyboardInterrupt) as error:  # must not end the actor
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()


def _copied(value: Any, device: Any = "cpu") -> Any:
    """Copy Ray's read-only arrays, and tensors to a device, also in lists and dictionaries."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if "torch" not in sys.modules:
        return value
    import torch
    from torch.utils._pytree import tree_map

    from bridges.loading import torch_device

    # Ray sends no tensor of a single row whose last stride is not 1.
    options = {"device": torch_device(device), "copy": True, "memory_format": torch.contiguous_format}
    return tree_map(lambda leaf: leaf.detach().to(**options) if _is_tensor(leaf) else leaf, value)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _has_rows(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return not hasattr(value, "_fields")
    return (isinstance(value, np.ndarray) or _is_tensor(value)) and value.ndim > 0


class RayPool:
    """Proxy of a judge in Ray actors, with its plain attributes and its methods.

    Arguments of one length are split into batches of rows, and their answers are concatenated in order. A judge must
    therefore judge each row independently, or with "place_in_group" each group. Threads use a pool one at a time.
    """

    def __init__(self, name: str, actors: Sequence[Any], about: Description, batch: int = ROWS, limit: float = 0.0):
        """Take actors that have loaded the judge; `name`, and a batch's `limit` in seconds, are for errors."""
        described_as, attributes, self._methods, signature = about
        vars(self).update(attributes, device="cpu")
        self._name, self._size, self._lock, self._free = name, batch, threading.Lock(), deque(actors)
        self._away: dict[Any, Any] = {}  # restarting actors, and those at an abandoned batch, by a pending reference
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
        """Render equal pairs of text and seed once."""
        pairs = list(zip(texts, seeds, strict=True))
        different = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
        drawn = self._ask("draw", [text for text, _ in different], [seed for _, seed in different], **keywords)
        return drawn if len(different) == len(pairs) else drawn[[different[pair] for pair in pairs]]

    def _ask(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Call a method with rows: lists, tuples and arrays of one length; otherwise the call is one batch."""
        lengths = {len(value) for value in (*arguments, *keywords.values()) if _has_rows(value)}
        count = lengths.pop() if len(lengths) == 1 else 0
        group = 1 + max(keywords.get("place_in_group", ()), default=0)  # a reward that compares it gets it whole
        size = max(self._size // group, 1) * group
        parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        requests = []
        for rows in parts or [slice(None)]:
            cut = [_copied(one[rows] if _has_rows(one) else one) for one in (*arguments, *keywords.values())]
            requests.append((cut[: len(arguments)], dict(zip(keywords, cut[len(arguments) :], strict=True))))
        answers = self.run(method, requests)
        if len(answers) == 1:
            return answers[0]
        if [len(one) if _has_rows(one) else None for one in answers] != [rows.stop - rows.start for rows in parts]:
            raise TypeError(
                f"{self._name}.{method} did not answer {size} rows with as many values: a judge in a pool must "
                "judge row by row, or have a batch_size that holds a whole call"
            )
        if _is_tensor(answers[0]):
            return sys.modules["torch"].cat(answers)
        if isinstance(answers[0], np.ndarray):
            return np.concatenate(answers)
        return [one for part in answers for one in part]

    def run(self, method: str, requests: Sequence[tuple[Sequence, dict]], seconds: float = math.inf) -> list[Any]:
        """Return a method's answers to some batches (arguments and keywords), in order.

        Raises PoolLost if no actor is left, the cluster is gone, or `seconds` have passed, BatchLost if a batch lost
        `ATTEMPTS` actors, and the judge's own exception.
        """
        sent: dict[Any, tuple[int, Any]] = {}
        with self._lock:
            try:
                return self._answers(method, requests, seconds, sent)
            except PoolLost as error:
                raise PoolLost(f"{self._name}: {error}") from error
            except Exception:
                self._away |= {handle.describe.remote(): handle for _, handle in sent.values()}  # after its batch
                raise

    def _answers(
        self, method: str, requests: Sequence[tuple[Sequence, dict]], seconds: float, sent: dict[Any, tuple[int, Any]]
    ) -> list[Any]:
        """Run the batches; `sent` maps the references of pending batches to their number and actor."""
        import ray

        deadline = time.monotonic() + seconds
        waiting, answers, lost = deque(range(len(requests))), [None] * len(requests), Counter()
        while sent or waiting:
            while waiting and self._free:
                number, handle = waiting.popleft(), self._free[0]
                answer = handle.answer.options(max_task_retries=0)  # Ray would retry on the same actor
                sent[attempt(answer.remote, method, *requests[number])] = number, handle
                self._free.popleft()  # an actor stays free if its batch cannot be sent
            if not (sent or self._away):
                raise PoolLost(f"no actor is left; the last: {self._last}")
            left = max(deadline - time.monotonic(), 0.0)
            came, _ = attempt(ray.wait, [*sent, *self._away], timeout=min(PROBE_SECONDS, left))
            if not came and is_gone():
                raise PoolLost("nothing answers where the Ray cluster was")
            if not (came or left):
                raise PoolLost(f"no answer within {seconds:g} s")
            for reference in came:
                number, handle = sent.pop(reference, None) or (None, self._away.pop(reference))
                try:
                    value = attempt(ray.get, reference)
                except Exception as error:
                    if isinstance(error, PoolLost) and not isinstance(error, ActorLost):
                        raise
                    self._last = told(error)
                    if number is None:  # it can no longer load
                        continue
                    self._away[handle.describe.remote()] = handle
                    if not isinstance(error, ActorLost):
                        raise
                    waiting.appendleft(number)
                    lost[number] += 1
                    if lost[number] >= ATTEMPTS:
                        spent = f"{ATTEMPTS} actors died{self._late} over one batch; the last: {error}"
                        raise BatchLost(f"{self._name}: {spent}") from error
                    continue
                self._free.append(handle)
                if number is not None:
                    answers[number] = _copied(value)
        return answers


class PooledReward(RayPool):
    """A callable judge with its signature, which selects a reward's arguments."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the judge."""
        return self._ask("", *arguments, **keywords)


def start_actors(name: str, judge: Any, section: PoolSection, *, named: bool = False) -> list[Any]:
    """Start the actors of a pool and return their handles; if `named` (NAME-0, …), any process can find them.

    UserError if the run's own cluster lacks a resource; another cluster may grow.
    """
    import ray

    resources = {"num_cpus": 1.0 if section.address else 0.0, "num_gpus": 0.0, **section.resources}
    there = ray.cluster_resources()
    for kind, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        wanted, has = section.replicas * resources[kind], there.get(resource, 0.0)
        enough = section.address is not None or wanted <= has
        require(enough, f"{name}.resources.{kind}", f"at most the {has:g} of the Ray cluster for all actors", wanted)
    if type(judge).__module__.startswith(FILE):  # send the code of a judge's file, which actors cannot import
        ray.cloudpickle.register_pickle_by_value(sys.modules[type(judge).__module__])
    options = {**resources, "runtime_env": section.runtime_env or None, "namespace": NAMESPACE}
    options |= {"max_restarts": RESTARTS, "max_task_retries": -1}
    torch = sys.modules.get("torch")
    kernels = False, False
    if torch is not None:
        kernels = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32
    given = judge, "gpu:0" if section.cards else "cpu", os.getcwd(), section.batch_timeout, kernels
    names = [f"{name}-{number}" if named else None for number in range(section.replicas)]
    try:
        return [ray.remote(JudgeActor).options(**options, name=one).remote(*given) for one in names]
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}.resources, runtime_env: {told(error)}") from error


def described(actors: Sequence[Any]) -> Description:
    """Wait until actors have loaded, and describe the judge; a loading error is raised unchanged."""
    import ray

    try:
        return attempt(ray.get, [handle.describe.remote() for handle in actors], timeout=START_SECONDS)[0]
    except ray.exceptions.GetTimeoutError as error:  # not a TimeoutError of the judge's own
        raise PoolLost(f"no answer within {START_SECONDS:g} s") from error
