"""What process 0 of a run alone knows, told to all its processes: `broadcast`.

Every process runs the same program on the same config, seed and data. Process 0 alone calls judges and environments,
writes files and prints; rewards, answers, a stop and what it finds on the disk go through `broadcast`, over the mesh.
All processes must make the same calls in the same order, so only one thread at a time makes them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from jax.experimental import multihost_utils

Result = TypeVar("Result")
Tree = TypeVar("Tree")
_LENGTH_BYTES = 8
_SMALL_BYTES = 4096  # what goes in the first array, beside its length
_BARRIER_MS = 7 * 24 * 3_600_000  # however long a judge takes; the watch ends what is stuck (`runs.watch`)


def _state() -> Any:
    """Return what `jax.distributed` knows; asking `jax.process_count` would start JAX's backend."""
    from jax._src.distributed import global_state

    return global_state


def client() -> Any:
    """Return this process's client of the coordinator, which has no public name in JAX."""
    return _state().client


def process_count() -> int:
    """Return the number of processes of the run."""
    return _state().num_processes


def process_index() -> int:
    """Return which of them this is, from 0."""
    return _state().process_id


def is_main_process() -> bool:
    """Return whether this process calls judges, writes files and prints."""
    return process_index() == 0


class Waiting(NamedTuple):
    """What this process does together with the others, and since when (`time.monotonic`)."""

    name: str
    since: float


waiting: Waiting | None = None
"""None while this process works by itself."""
without_limit = False
"""Whether process 0 does what the others wait for without a time limit."""
_barriers = itertools.count(1)


@contextmanager
def together(name: str) -> Iterator[None]:
    """Mark what all processes do together, which does not return while one of them stays away."""
    global waiting
    before = waiting
    waiting = Waiting(name, time.monotonic())
    try:
        yield
    finally:
        waiting = before


@contextmanager
def others_wait() -> Iterator[None]:
    """Mark what process 0 does by itself, however long: judges have time limits of their own."""
    global without_limit
    without_limit = True
    try:
        yield
    finally:
        without_limit = False


def run_together(name: str, compute: Callable[[], Result]) -> Result:
    """Return what all processes compute together; where there are several, only once it is computed."""
    with together(name):
        result = compute()
        return jax.block_until_ready(result) if process_count() > 1 else result


def meet() -> None:
    """Wait, on the host, until all processes are here: collectives that begin minutes apart would time out."""
    if process_count() > 1:
        client().wait_at_barrier(f"grpo_jax/{next(_barriers)}", _BARRIER_MS)


def broadcast(tree: Tree | None) -> Tree:
    """Return process 0's tree of dicts, lists, arrays, numbers, texts and None; the others' arguments do not count."""
    if process_count() == 1:
        return tree
    with together("broadcast"):
        meet()
        data = np.frombuffer(msgpack_serialize(tree) if is_main_process() else b"", np.uint8)
        first = np.zeros(_LENGTH_BYTES + _SMALL_BYTES, np.uint8)
        first[:_LENGTH_BYTES] = np.frombuffer(np.uint64(len(data)).tobytes(), np.uint8)
        if len(data) <= _SMALL_BYTES:
            first[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
        first = np.asarray(multihost_utils.broadcast_one_to_all(first))
        length = int(np.frombuffer(first[:_LENGTH_BYTES].tobytes(), np.uint64)[0])
        content = first[_LENGTH_BYTES:]
        if length > _SMALL_BYTES:
            padded = np.zeros(1 << (length - 1).bit_length(), np.uint8)  # few lengths: each is compiled
            padded[: len(data)] = data
            content = np.asarray(multihost_utils.broadcast_one_to_all(padded))
        return tree if is_main_process() else msgpack_restore(content[:length].tobytes())
