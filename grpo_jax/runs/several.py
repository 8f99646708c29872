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
_NOW, _END, _STOP, _BUSY = "grpo_jax/now/", "grpo_jax/now/end/", "grpo_jax/now/stop", "grpo_jax/now/busy"
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
        stopped: float | None = None
        start, busy = time.monotonic(), ""
        while not self._over.is_set():
            asked = False
            with suppress(TimeoutError):
                asked = bool({*self._signals.recv(64)} & {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT})
            with suppress(jax.errors.JaxRuntimeError):
                now = dict(self._client.key_value_dir_get(_NOW))
                if asked and _STOP not in now:
                    self._client.key_value_set(_STOP, "1", allow_overwrite=True)
                self._leave_with({int(key.removeprefix(_END)): code for key, code in now.items() if _END in key})
                if _STOP in now and stopped is None:
                    stopped = time.monotonic()
                    if is_main_process() and not asked:  # as if the signal had come here
                        os.kill(os.getpid(), signal.SIGTERM)
                waits = shared.waiting
                if is_main_process() and busy != (busy := "" if waits else "1"):
                    self._client.key_value_set(_BUSY, busy, allow_overwrite=True)
                if not is_main_process() and now.get(_BUSY) == "1":  # its judges have a limit of their own
                    start = time.monotonic()
                if stopped is not None:
                    self._client.key_value_set(f"{_NOW}waits/{process_index()}", str(bool(waits)), allow_overwrite=True)
                if waits is None or self._over.is_set():
                    continue
                spent = time.monotonic() - max(waits.since, start)
                if spent > self._timeout:
                    self._leave(f"{waits.name} has taken more than {self._timeout:g} s (--process_timeout)")
                if stopped is None or time.monotonic() - max(stopped, waits.since) < _STOP_SECONDS:
                    continue
                stuck = [n for n in range(self._count) if now.get(f"{_NOW}waits/{n}") != "True"]
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
