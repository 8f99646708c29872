"""Several processes that run the same program: how they join, compare themselves, watch each other, and part.

What they compute together lies in `models.broadcast`. Here is what goes through the coordinator of `jax.distributed`,
which lives in process 0: facts of the start, which must be the same in all; who is alive; and the end of each.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import jax

from grpo_jax.config import Config
from grpo_jax.config.fields import require
from grpo_jax.errors import ABANDONED, StageError, Stopped, UserError, complain
from grpo_jax.models import broadcast as shared
from grpo_jax.models.broadcast import client, is_main_process, process_count, process_index
from grpo_jax.runs.processes import HEARTBEAT_SECONDS, StopRequests, announced, join_processes
from grpo_jax.runs.sameness import require_same_facts, start_facts

_POLL_SECONDS = 0.5  # how often who joins looks up where a signal does not wake it
_WATCH_SECONDS = 1.0
_LEAVING_SECONDS = 2.0  # for one that has left in good order to hear the coordinator say so: JAX would abort it
_PARTING_SECONDS = 30.0
_SAME_END_SECONDS = 5.0  # how long a mistake waits to be reported by process 0, which may have made it too
_STOP_SECONDS = 12.0  # after a stop, for who is stuck
_START_MS = 300_000
_RUN_DIR = "grpo_jax/run_dir"
_NOW = "grpo_jax/now/"  # the keys that each process looks up every second
_END, _STOP, _BUSY, _WAITS = f"{_NOW}end/", f"{_NOW}stop", f"{_NOW}busy", f"{_NOW}waits/"
_WATCH = "watch"

joined = threading.Event()
"""Set once all are there: only then is there anything to leave."""


def join(config: Any, stop: StopRequests) -> Any:
    """Join the processes that the environment announces, and return the config with the run_dir of process 0.

    Raises:
        Stopped: A stop was asked for meanwhile.
        UserError: The processes differ in what must be the same (`runs.sameness`).
    """
    count = announced().count
    if count == 1:
        return config
    if not isinstance(config, Config):
        raise UserError(f"task: this one runs in one process, and {count} were started: start one (srun --ntasks=1)")
    mesh, lag = config.policy.mesh, config.training.lag
    require(mesh.size % count == 0, "policy.mesh", f"fsdp x tensor a multiple of the {count} processes", mesh.size)
    require(lag == 0, "training.lag", f"0 with a policy over {count} processes", lag)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    run_dir: list[str] = []

    def work() -> None:
        join_processes()
        joined.set()
        require_same_facts("start", lambda: start_facts(config))
        if is_main_process():
            client().key_value_set(_RUN_DIR, str(config.run_dir))
        run_dir.append(client().blocking_key_value_get(_RUN_DIR, _START_MS))

    atexit.register(part)
    _unless_stopped(work, stop)
    return dataclasses.replace(config, run_dir=run_dir[0])


def _unless_stopped(work: Callable[[], object], stop: StopRequests) -> None:
    """Work in a thread of its own: JAX waits for the others where no signal comes through."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:  # raised where it is waited for
            done.set_exception(error)

    thread = threading.Thread(target=run, name="join", daemon=True)
    thread.start()
    while wait([done], _POLL_SECONDS).not_done:
        if stop.is_set():
            thread.name = ABANDONED + thread.name
            raise Stopped
    done.result()


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
        self._stopped: float | None = None  # when a stop was asked for
        self._busy = ""
        self._leaving = threading.Lock()
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False) if _in_main() else -1
        for look in (self._look_at_processes, self._look_at_clock):
            threading.Thread(target=look, name=_WATCH, daemon=True).start()

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
            with suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone: JAX ends this process
                live = self._client.get_live_nodes(everybody)  # answered when all live ones ask
                first = first or live
                gone = [n for n in everybody if n not in live or live[n] != first.get(n, live[n])]
                if gone and not self._over.is_set():
                    self._leave(_who_is_gone(gone, self._count))

    def _look_at_clock(self) -> None:
        """Look for a signal, for the ends of other processes, and for what has taken too long."""
        self._signals.settimeout(_WATCH_SECONDS)
        while not self._over.is_set():
            asked = self._heard_signal()
            with suppress(jax.errors.JaxRuntimeError):
                now = dict(self._client.key_value_dir_get(_NOW))
                if asked and _STOP not in now:
                    self._write(_STOP, "1")
                self._leave_with({int(key.removeprefix(_END)): code for key, code in now.items() if _END in key})
                if _STOP in now and self._stopped is None:
                    self._stop(asked)
                waits = shared.waiting
                self._look_at_main_process(now, waits)
                if self._stopped is not None:
                    self._write(f"{_WAITS}{process_index()}", str(waits is not None))
                if waits is not None and not self._over.is_set():
                    self._look_at_wait(now, waits)

    def _heard_signal(self) -> bool:
        """Wait a moment for a signal that asks for a stop."""
        with suppress(TimeoutError):
            return bool({*self._signals.recv(64)} & {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT})
        return False

    def _write(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def _stop(self, asked: bool) -> None:
        """Begin the stop that a process was asked for; in process 0 as if the signal had come here."""
        self._stopped = time.monotonic()
        if is_main_process() and not asked:
            os.kill(os.getpid(), signal.SIGTERM)

    def _look_at_main_process(self, now: Mapping[str, str], waits: shared.Waiting | None) -> None:
        """Let no clock run while process 0 works by itself: its judges have a limit of their own."""
        if not is_main_process():
            if now.get(_BUSY) == "1":
                self._start = time.monotonic()
            return
        busy = "" if waits else "1"
        if busy != self._busy:
            self._busy = busy
            self._write(_BUSY, busy)

    def _look_at_wait(self, now: Mapping[str, str], waits: shared.Waiting) -> None:
        """Leave what has taken too long, or, after a stop, waits for a process that takes no part."""
        if time.monotonic() - max(waits.since, self._start) > self._timeout:
            self._leave(f"{waits.name} has taken more than {self._timeout:g} s (--process_timeout)")
        if self._stopped is None or time.monotonic() - max(self._stopped, waits.since) < _STOP_SECONDS:
            return
        stuck = [n for n in range(self._count) if now.get(f"{_WAITS}{n}") != "True"]
        if stuck and process_index() not in stuck:
            self._leave(f"a stop was asked for, and {_listed(stuck)} takes no part in {waits.name}")

    def _leave_with(self, ends: Mapping[int, str]) -> None:
        """End as another process did."""
        ends = {number: code for number, code in ends.items() if number != process_index()}
        if not ends or self._over.wait(_LEAVING_SECONDS):
            return
        if 0 in ends:  # it has told why
            os._exit(int(ends[0]))
        self._leave(_who_is_gone(sorted(ends), self._count))

    def _leave(self, reason: str) -> NoReturn:
        with self._leaving:
            who = "" if is_main_process() else f"process {process_index()}: "
            complain(f"error: {who}{reason}: {self._again}")
            record_end(1)
            time.sleep(_LEAVING_SECONDS)
            os._exit(1)


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _listed(numbers: Sequence[int]) -> str:
    return f"process {numbers[0]}" if len(numbers) == 1 else f"each of processes {', '.join(map(str, numbers))}"


def _who_is_gone(gone: Sequence[int], count: int) -> str:
    if len(gone) == 1:
        return f"process {gone[0]} of {count} is gone"
    return f"processes {', '.join(map(str, gone))} of {count} are gone"


@contextmanager
def watching(config: Config) -> Iterator[None]:
    """Watch the other processes inside, and let them know of an error. Nothing where the run is one process."""
    if process_count() == 1:
        yield
        return
    watch = Watch(str(config.run_dir), config.process_timeout)
    try:
        yield
        with shared.together("the end"):  # files of process 0 may take a while
            shared.meet()
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(HEARTBEAT_SECONDS + 10)  # another process is gone: the watch reports it and ends this one
        watch.over()
        end_in_all(error)
        raise
    watch.over()


def end_in_all(error: BaseException) -> None:
    """Let the other processes know that this one ends, and print a mistake of this one alone."""
    code = 2 if isinstance(error, UserError | StageError) else 1
    if is_main_process() or code == 1:
        record_end(code)
        return
    with suppress(jax.errors.JaxRuntimeError):
        client().blocking_key_value_get(f"{_END}0", int(1000 * _SAME_END_SECONDS))
        return  # process 0 made the same mistake, and tells it
    complain(f"error: process {process_index()}: {' '.join(str(error).split())}")
    record_end(code)


def record_end(code: int) -> None:
    """Let the other processes know that this one ends before the run does, with an exit code."""
    with suppress(jax.errors.JaxRuntimeError):
        client().key_value_set(f"{_END}{process_index()}", str(code), allow_overwrite=True)


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
        if is_main_process():  # JAX aborts who finds the coordinator gone; a call is answered when all live ones ask
            while set(client().get_live_nodes(list(range(process_count())))) - {0}:
                pass
        for thread in threading.enumerate():
            if thread.name == _WATCH:  # Python's end aborts the process where a thread is still inside JAX
                thread.join()
        jax.distributed.shutdown()
