"""Communication between the processes of a run: `broadcast` sends process 0's values to all of them.

Every process runs the same program on the same config, seed and data. Only process 0 calls rewards and environments,
writes files and prints. All processes must make the calls of this module in the same order. So only one thread at a
time may call it, and never code that runs in one process alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import jax
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from jax.experimental import multihost_utils

from grpo_jax.errors import UserError

_Result = TypeVar("_Result")
_Tree = TypeVar("_Tree")
_LEAST_BYTES = 4096
_WAIT_MS = 7 * 24 * 3_600_000  # longer than any reward; JAX's heartbeat ends the wait for a dead process
_REPORT_MS = 5000
_calls = itertools.count(1)
ALIVE = "grpo_jax/alive"  # prefix of the keys in which processes show each other that they live, or leave


def _state() -> Any:
    """Return the state of `jax.distributed`; `jax.process_count` would start JAX's backend."""
    from jax._src.distributed import global_state

    return global_state


def distributed_client() -> Any:
    """Return JAX's client of the coordinator, with its key-value store and barriers."""
    return _state().client


def announce_exit() -> None:
    """Let the other processes know that this one leaves the run, so that they need not find out."""
    with suppress(jax.errors.JaxRuntimeError):
        distributed_client().key_value_set(f"{ALIVE}/gone", "1", allow_overwrite=True)


def process_count() -> int:
    """Return the number of processes of the run."""
    return _state().num_processes


def process_index() -> int:
    """Return the index of this process, from 0."""
    return _state().process_id


def is_main_process() -> bool:
    """Return whether this process calls rewards, writes files and prints."""
    return process_index() == 0


def barrier() -> None:
    """Wait on the host for all processes: collectives that begin minutes apart would time out."""
    if process_count() > 1:
        distributed_client().wait_at_barrier(f"grpo_jax/{next(_calls)}", _WAIT_MS)


def broadcast(tree: _Tree) -> _Tree:
    """Return process 0's tree of dicts, lists, arrays, numbers, strings and None; other arguments are ignored."""
    if process_count() == 1:
        return tree
    barrier()
    data = np.frombuffer(msgpack_serialize(tree) if is_main_process() else b"", np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    padded = np.zeros(max(_LEAST_BYTES, 1 << (length - 1).bit_length()), np.uint8)  # few sizes: each compiles once
    padded[: len(data)] = data
    content = np.asarray(multihost_utils.broadcast_one_to_all(padded))[:length]
    return tree if is_main_process() else msgpack_restore(content.tobytes())


def exchange(text: str) -> list[str]:
    """Return every process's string, through the coordinator, which needs no JAX backend."""
    client, key = distributed_client(), f"grpo_jax/{next(_calls)}"
    client.key_value_set(f"{key}/{process_index()}", text)
    return [client.blocking_key_value_get(f"{key}/{number}", _WAIT_MS) for number in range(process_count())]


def is_reported() -> bool:
    """Return whether process 0 also fails and reports it; every failing process must call this."""
    client = distributed_client()
    with suppress(jax.errors.JaxRuntimeError):
        if is_main_process():
            client.key_value_set("grpo_jax/reported", "1")
        client.blocking_key_value_get("grpo_jax/reported", _REPORT_MS)
        return True
    return False


def any_process(flag: bool) -> bool:
    """Return in all processes whether the flag is set in any of them."""
    return flag if process_count() == 1 else "1" in exchange("1" if flag else "0")


def on_all_processes(compute: Callable[[], _Result]) -> _Result:
    """Return this process's result. Raises UserError in all processes if one of them raises it."""
    if process_count() == 1:
        return compute()
    result, mistake = None, ""
    try:
        result = compute()
    except UserError as error:
        mistake = str(error)
    for message in filter(None, exchange(mistake)):
        raise UserError(message)
    return cast(_Result, result)


def from_main_process(compute: Callable[[], _Result]) -> _Result:
    """Return process 0's JSON result in all processes; the others do not compute it."""
    if process_count() == 1:
        return compute()
    result = on_all_processes(lambda: json.dumps(compute()) if is_main_process() else "")
    return json.loads(exchange(result)[0])
