"""The watch over the processes of a run: each ends, with a line, where another is gone, has failed, or is stuck.

What a process is to tell the others goes through the coordinator of `jax.distributed`, which lives in process 0.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import jax

from grpo_jax.errors import complain
from grpo_jax.models import broadcast as shared
from grpo_jax.models.broadcast import client, is_main_process, process_count, process_index

WATCH = "watch"
"""Name of the threads, which a process must not end before."""
_WATCH_SECONDS = 1.0
_SILENT_SECONDS = 8  # JAX aborts, with a stack trace, 10 to 20 seconds after process 0 fell silent
_LEAVING_SECONDS = 2.0  # for one that has left in good order to hear the coordinator say so: JAX would abort it
_STOP_SECONDS = 12.0  # after a stop, for who is stuck
_NOW = "grpo_jax/now/"  # the keys that each process looks up every second
END = f"{_NOW}end/"
_STOP, _NO_LIMIT, _WAITS = f"{_NOW}stop", f"{_NOW}no_limit", f"{_NOW}waits/"


class Watch:
    """Threads that end this process, with a line, where another is gone, has failed, or is stuck.

    A collective would wait for it for ever, and let no signal through.
    """

    def __init__(self, run_dir: str, timeout: float):
        """Begin to watch; `timeout` is in seconds, of what all processes do together."""
        self._client, self._count, self._timeout = client(), process_count(), timeout
        self._again = f"the run ends, its last checkpoint is sound; go on with --resume --run_dir {run_dir}"
        self._over = threading.Event()
        self._start = time.monotonic()  # of the clock for what is waited for
        self._asked = False  # a signal asked this process for a stop
        self._stopped: float | None = None  # when a process was asked for one
        self._now: dict[str, str] = {}
        self._silent = 0  # seconds without an answer of the coordinator
        self._no_limit = ""  # what process 0 has told of it
        self._leaving = threading.Lock()
        self._signals, self._wakeup = socket.socketpair()
        self._signals.settimeout(_WATCH_SECONDS)
        self._wakeup.setblocking(False)
        self._before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False) if _in_main() else -1
        for look in (self._look_at_processes, self._look_at_keys, self._look_at_clock):
            threading.Thread(target=look, name=WATCH, daemon=True).start()

    def over(self) -> None:
        """Stop watching: processes may end."""
        self._over.set()
        if _in_main():
            signal.set_wakeup_fd(self._before)

    def _look_at_processes(self) -> None:
        """Look for processes that are gone, or were started again: a process without heartbeats counts as gone."""
        everybody = list(range(self._count))
        first: dict[int, int] = {}
        while not self._over.wait(_WATCH_SECONDS):
            with suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone
                live = self._client.get_live_nodes(everybody)  # answered when all live ones ask
                first = first or live
                gone = [n for n in everybody if n not in live or live[n] != first.get(n, live[n])]
                if gone:
                    self._leave(_who_is_gone(gone, self._count))

    def _look_at_keys(self) -> None:
        """Tell the other processes what this one does, and look for a stop and for their ends."""
        while not self._over.wait(_WATCH_SECONDS):
            with suppress(jax.errors.JaxRuntimeError):
                now = dict(self._client.key_value_dir_get(_NOW))
                self._now, self._silent = now, 0
                self._leave_with({int(key.removeprefix(END)): code for key, code in now.items() if END in key})
                if self._asked and _STOP not in now:
                    self._write(_STOP, "1")
                if _STOP in now and self._stopped is None:
                    self._stop()
                waits = shared.waiting is not None
                if self._stopped is not None:
                    self._write(f"{_WAITS}{process_index()}", str(waits))
                self._look_at_main_process("1" if shared.without_limit and not waits else "")

    def _look_at_main_process(self, no_limit: str) -> None:
        """Let no clock run while process 0 does by itself what has no limit here."""
        if not is_main_process():
            if self._now.get(_NO_LIMIT) == "1":
                self._start = time.monotonic()
        elif no_limit != self._no_limit:
            self._no_limit = no_limit
            self._write(_NO_LIMIT, no_limit)

    def _look_at_clock(self) -> None:
        """Look for a signal and for what has taken too long; without the coordinator, which may be stuck itself."""
        while not self._over.is_set():
            try:
                self._asked |= bool({*self._signals.recv(64)} & {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT})
            except TimeoutError:  # a second without a signal
                self._silent += 1
            if self._silent > _SILENT_SECONDS:
                self._leave(f"process 0 has not answered for {_SILENT_SECONDS} s")
            waits = shared.waiting
            if waits is not None:
                self._look_at_wait(waits)

    def _look_at_wait(self, waits: shared.Waiting) -> None:
        """Leave what has taken too long, or, after a stop, waits for a process that takes no part."""
        if time.monotonic() - max(waits.since, self._start) > self._timeout:
            self._leave(f"{waits.name} has taken more than {self._timeout:g} s (--process_timeout)")
        if self._stopped is None or time.monotonic() - max(self._stopped, waits.since) < _STOP_SECONDS:
            return
        stuck = [n for n in range(self._count) if self._now.get(f"{_WAITS}{n}") != "True"]
        if stuck and process_index() not in stuck:
            self._leave(f"a stop was asked for, and {_listed(stuck)} takes no part in {waits.name}")

    def _write(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def _stop(self) -> None:
        """Begin the stop that a process was asked for; in process 0 as if the signal had come here."""
        self._stopped = time.monotonic()
        if is_main_process() and not self._asked:
            os.kill(os.getpid(), signal.SIGTERM)

    def _leave_with(self, ends: Mapping[int, str]) -> None:
        """End as another process did."""
        ends = {number: code for number, code in ends.items() if number != process_index()}
        if not ends or self._over.wait(_LEAVING_SECONDS):
            return
        if 0 in ends:  # it has told why
            os._exit(int(ends[0]))
        self._leave(_who_is_gone(sorted(ends), self._count))

    def _leave(self, reason: str) -> None:
        """End this process with a line, unless the watch is over."""
        with self._leaving:
            if self._over.is_set():
                return
            who = "" if is_main_process() else f"process {process_index()}: "
            complain(f"error: {who}{reason}: {self._again}")
            threading.Thread(target=record_end, args=(1,), daemon=True).start()  # the coordinator may not answer
            time.sleep(_LEAVING_SECONDS)
            os._exit(1)


def record_end(code: int) -> None:
    """Let the other processes know that this one ends before the run does, with an exit code."""
    with suppress(jax.errors.JaxRuntimeError):
        client().key_value_set(f"{END}{process_index()}", str(code), allow_overwrite=True)


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _listed(numbers: Sequence[int]) -> str:
    return f"process {numbers[0]}" if len(numbers) == 1 else f"each of processes {', '.join(map(str, numbers))}"


def _who_is_gone(gone: Sequence[int], count: int) -> str:
    if len(gone) == 1:
        return f"process {gone[0]} of {count} is gone"
    return f"processes {', '.join(map(str, gone))} of {count} are gone"
