"""Several processes that run the same program: how they join, compare themselves, and part.

What they compute together lies in `models.broadcast`; how they watch each other in `runs.watch`.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any

import jax

from grpo_jax.config import Config
from grpo_jax.config.fields import require
from grpo_jax.errors import ABANDONED, StageError, Stopped, UserError, complain
from grpo_jax.models import broadcast as shared
from grpo_jax.models.broadcast import client, is_main_process, process_count, process_index
from grpo_jax.runs.processes import HEARTBEAT_SECONDS, StopRequests, announced, join_processes, number_of
from grpo_jax.runs.sameness import require_same_facts, start_facts
from grpo_jax.runs.watch import END, WATCH, Watch, record_end

_POLL_SECONDS = 0.5  # how often who joins looks up where a signal does not wake it
_PARTING_SECONDS = 30.0
_SAME_END_SECONDS = 5.0  # how long a mistake waits to be reported by process 0, which may have made it too
_NO_LIMIT = 7 * 24 * 3600  # of JAX's own, in seconds: `--process_timeout` comes first
_RUN_DIR = "grpo_jax/run_dir"

joined = threading.Event()
"""Set once all are there: only then is there anything to leave."""


def join(config: Any, stop: StopRequests) -> Any:
    """Join the processes that the environment announces, and return the config with the run_dir of process 0.

    Raises:
        Stopped: A stop was asked for meanwhile.
        UserError: The processes differ in what must be the same (`runs.sameness`), or are not all there in time.
    """
    count = announced().count
    if count == 1:
        return config
    if not isinstance(config, Config):
        raise UserError(f"task: this one runs in one process, and {count} were started: start one (srun --ntasks=1)")
    require_for_processes(config, count)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    run_dir: list[str] = []

    def work() -> None:
        join_processes(timeout=_NO_LIMIT)
        joined.set()
        require_same_facts("start", lambda: start_facts(config))
        if is_main_process():
            client().key_value_set(_RUN_DIR, str(config.run_dir))
        run_dir.append(client().blocking_key_value_get(_RUN_DIR, 1000 * _NO_LIMIT))

    atexit.register(part)
    _in_time(work, config.process_timeout, stop)
    return dataclasses.replace(config, run_dir=run_dir[0])


def require_for_processes(config: Config, count: int) -> None:
    """Refuse what a policy over so many processes does not take."""
    mesh, lag = config.policy.mesh, config.training.lag
    require(mesh.size % count == 0, "policy.mesh", f"fsdp x tensor a multiple of the {count} processes", mesh.size)
    require(count == 1 or lag == 0, "training.lag", f"0 with a policy over {count} processes", lag)


def _in_time(work: Callable[[], object], timeout: float, stop: StopRequests) -> None:
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
    end = time.monotonic() + timeout
    while wait([done], _POLL_SECONDS).not_done and not stop.is_set() and time.monotonic() < end:
        pass
    if done.done() and not stop.is_set():
        return done.result()
    thread.name = ABANDONED + thread.name
    if stop.is_set():
        raise Stopped
    count, number = announced().count, number_of()
    reason = f"expected all {count} processes to begin within {timeout:g} s (--process_timeout), and some did not"
    if number:  # the command prints for process 0 alone
        complain(f"error: process {number}: {reason}")
    raise UserError(reason)


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
        client().blocking_key_value_get(f"{END}0", int(1000 * _SAME_END_SECONDS))
        return  # process 0 made the same mistake, and tells it
    complain(f"error: process {process_index()}: {' '.join(str(error).split())}")
    record_end(code)


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
            if thread.name == WATCH:  # Python's end aborts the process where a thread is still inside JAX
                thread.join()
        jax.distributed.shutdown()
