"""This process among others: signals that ask it to stop, and several processes on one mesh.

The training command joins them through `runs.several`. `join_processes` is also for a program of one's own around
`grpo_jax.training.update` and `grpo_jax.models.sharding` (docs/scaling.md).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from grpo_jax.errors import Stopped, UserError, one_line

COORDINATOR, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
HEARTBEAT_SECONDS = 20
"""Seconds without a heartbeat after which a process counts as gone."""
SLURM_NUMBER = "SLURM_PROCID"
SLURM_COUNT = "SLURM_STEP_NUM_TASKS"  # of srun's step: a batch script in an allocation of many tasks is one process


class StopRequests:
    """A flag for a requested stop, checked by long waits, which then save and leave."""

    def __init__(self) -> None:
        self._asked = self._at_once = False

    def is_set(self) -> bool:
        """Return whether a stop was asked for."""
        return self._asked

    def set(self) -> None:
        """Ask for a stop."""
        self._asked = True
        if self._at_once:
            raise Stopped

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside there is nothing to save: a request raises `Stopped` wherever the main thread is."""
        self._at_once = True
        try:
            if self._asked:
                raise Stopped
            yield
        finally:
            self._at_once = False


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """SIGTERM (and SLURM's SIGUSR1) ask for a stop instead of ending the process; Ctrl-C does so the first time.

    The loop checks, saves and leaves. A second Ctrl-C interrupts at once: the last checkpoint stays valid. SIGHUP,
    sent when a terminal closes, stops nothing. Outside the main thread, where Python takes no handlers, no stop is
    ever asked for.
    """
    requests = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            return
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, handle)  # `unseen_interrupts_end` has it answer once
            if requests.is_set():
                raise KeyboardInterrupt
        requests.set()

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Announcement(NamedTuple):
    """Number of processes, and whether SLURM announces it (JAX then finds the rest itself)."""

    count: int
    slurm: bool


def announced(environment: Mapping[str, str] = os.environ) -> Announcement:
    """Number of processes started together: by JAX_NUM_PROCESSES, else by SLURM's step, else one."""
    if COUNT not in environment and COORDINATOR not in environment:
        return Announcement(_number(environment, SLURM_COUNT, 1), slurm=True)
    missing = [name for name in (COORDINATOR, COUNT, NUMBER) if name not in environment]
    if missing:
        raise UserError(f"{', '.join(missing)}: expected beside the other variables that join JAX's processes")
    if not re.fullmatch(r".+:[0-9]{1,5}", environment[COORDINATOR]):
        raise UserError(f"{COORDINATOR}: expected HOST:PORT, got {one_line(repr(environment[COORDINATOR]))}")
    return Announcement(_number(environment, COUNT, 1), slurm=False)


def number_of(environment: Mapping[str, str] = os.environ) -> int:
    """Return which of the announced processes this is, from 0; UserError as `announced`, or beyond their number."""
    count = announced(environment).count
    if count == 1:
        return 0
    name = NUMBER if COUNT in environment else SLURM_NUMBER
    number = _number(environment, name, 0)
    if number >= count:
        raise UserError(f"{name}: expected a number below {count}, that of the processes, got {number}")
    return number


def join_processes(environment: Mapping[str, str] = os.environ, *, timeout: int = 300) -> int:
    """Join the processes that were started together; nothing for one. Call it before any other use of JAX.

    Afterwards `jax.devices()` are those of all processes, and every process must run the same computations. On CPUs
    they communicate through gloo.

    Args:
        environment: JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID;
            or what srun sets.
        timeout: Seconds that the processes may wait for each other.

    Raises:
        UserError: A variable is malformed or missing, or the first process cannot have its port.
    """
    count, slurm = announced(environment)
    if count == 1 or jax.distributed.is_initialized():
        return count
    options: dict[str, Any] = {"cluster_detection_method": "slurm"}
    if not slurm:
        number = number_of(environment)
        options = {"coordinator_address": environment[COORDINATOR], "num_processes": count, "process_id": number}
        if number == 0:
            _require_free(environment[COORDINATOR])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # One that is gone is noticed by the others themselves (`watch.Watch`); JAX would abort them all.
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(**options, heartbeat_timeout_seconds=HEARTBEAT_SECONDS, initialization_timeout=timeout)
    return count


def _require_free(address: str) -> None:
    """Refuse a coordinator port that is taken: JAX may crash over it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was left a moment ago is free
        try:
            probe.bind(("", int(address.rpartition(":")[2])))
        except (OSError, OverflowError) as error:
            raise UserError(f"{COORDINATOR}: the port of {address} is not free here ({one_line(error)})") from error


def _number(environment: Mapping[str, str], name: str, least: int) -> int:
    value = environment.get(name, str(least))
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < least:
        raise UserError(f"{name}: expected a number >= {least}, got {one_line(repr(value))}")
    return int(value)
