"""Messages through the coordinator of `jax.distributed`, in process 0, and the watch for processes that are gone.

Its client, which Orbax uses too, has no public name in JAX; it is asked for here alone.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from grpo_jax.errors import ABANDONED, complain
from grpo_jax.runs.processes import HEARTBEAT_SECONDS

_ATTEMPT_MS = 1_000  # one wait for a message, which no signal interrupts; it is asked for again
_BARRIER_MS = 3_600_000  # who still compiles or loads the step before is waited for: whoever is gone ends the run
_WATCH_SECONDS = 1.0
_PARTING_SECONDS = 30.0
_LEAVING_SECONDS = 2.0  # for one that has left in good order to hear the coordinator say so: JAX would abort it
_STOP = "grpo_jax/stop"
_WATCH = "watch"


def client() -> Any:
    """Return this process's client of the coordinator."""
    from jax._src.distributed import global_state

    return global_state.client


_count = itertools.count(1)  # the coordinator knows a name for as long as the processes live, whatever run they make


class CoordinatorChannel:
    """Messages as values of the coordinator's store, which stay until all have them."""

    def __init__(self) -> None:
        """Begin without a message."""
        self._client = client()

    def tell(self, message: bytes, patience: float | None = None) -> None:
        """Send a message to all; returns when all have it, or after `patience` seconds."""
        name = self._name()
        self._client.key_value_set_bytes(name, message)
        try:
            self._client.wait_at_barrier(f"{name}/heard", _BARRIER_MS if patience is None else int(1000 * patience))
        except jax.errors.JaxRuntimeError:
            if patience is None:
                raise
        self._client.key_value_delete(name)

    def hear(self) -> bytes:
        """Return the next message, once there is one and all have it."""
        name = self._name()
        while True:
            try:
                message = self._client.blocking_key_value_get_bytes(name, _ATTEMPT_MS)
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        self._client.wait_at_barrier(f"{name}/heard", _BARRIER_MS)
        return message

    def _name(self) -> str:
        return f"grpo_jax/call/{next(_count)}"


class Watch:
    """A thread that ends this process, with a line, when another is gone: a collective would wait for ever for it."""

    def __init__(self, count: int, *, told: str = "", stop: Callable[[], None] | None = None):
        """Begin to watch `count` processes.

        `told` is the rest of the line, "" for no line: one process prints for all. Process 0's `stop` is called when
        another process was asked to stop.
        """
        self._client, self._told, self._stop, self._over = client(), told, stop, threading.Event()
        self._everybody = list(range(count))
        threading.Thread(target=self._look, name=_WATCH, daemon=True).start()

    def over(self) -> None:
        """Stop watching: processes may end."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(_WATCH_SECONDS):
            with suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone: JAX ends this process
                live = self._client.get_live_nodes(self._everybody)
                gone = sorted(set(self._everybody) - set(live))
                if gone and not self._over.is_set():
                    self._leave(gone)
                if self._stop is not None and self._client.key_value_try_get(_STOP):
                    self._client.key_value_delete(_STOP)
                    self._stop()

    def _leave(self, gone: list[int]) -> None:
        who = f"process {gone[0]} of {len(self._everybody)} is gone"
        if len(gone) > 1:
            who = f"processes {', '.join(map(str, gone))} of {len(self._everybody)} are gone"
        if self._told:
            complain(f"error: {who}: {self._told}")
        time.sleep(_LEAVING_SECONDS)
        os._exit(1)


joined = threading.Event()
"""Set once all are there: only then is there anything to leave."""


def part() -> None:
    """Leave the group, once, at the end of a process; process 0, in which the coordinator runs, is the last."""
    if not joined.is_set():
        return
    joined.clear()
    parting = threading.Thread(target=_part, name="part", daemon=True)
    parting.start()
    parting.join(_PARTING_SECONDS)
    if parting.is_alive():
        parting.name = ABANDONED + parting.name


def _part() -> None:
    with suppress(jax.errors.JaxRuntimeError):
        if (
            jax.process_index() == 0
        ):  # JAX aborts who finds the coordinator gone; a call is answered when all live ones ask
            while set(client().get_live_nodes(list(range(jax.process_count())))) - {0}:
                pass
        for thread in threading.enumerate():
            if thread.name == _WATCH:  # Python's end aborts the process where a thread is still inside JAX
                thread.join()
        jax.distributed.shutdown()


def ask_to_stop() -> None:
    """Ask process 0, from another one, to stop the run."""
    with suppress(jax.errors.JaxRuntimeError):  # it was asked already
        client().key_value_set(_STOP, "1")


def wait_for_the_watch() -> None:
    """Wait, after a call failed because another process is gone, until the watch reports it and ends this one."""
    time.sleep(HEARTBEAT_SECONDS + 10)
