"""This process among others: signals that ask it to stop, and several processes on one mesh.

The training command itself runs in one process, with all the devices that this one sees. `join_processes` is for a
program of one's own around `grpo_jax.training.update` and `grpo_jax.models.sharding` (docs/scaling.md).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import jax

from grpo_jax.errors import UserError

COORDINATOR, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
SLURM_COUNT = "SLURM_STEP_NUM_TASKS"  # of srun's step: a batch script in an allocation of many tasks is one process


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """SIGTERM (and SLURM's SIGUSR1) set the event instead of ending the process; Ctrl-C does so the first time.

    The loop looks at the event after each iteration, saves and leaves. A second Ctrl-C interrupts at once: the last
    checkpoint stays valid. Outside the main thread, where Python takes no handlers, the event is never set.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGINT and event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Announcement(NamedTuple):
    """What the environment says: how many processes, and whether SLURM says so (JAX then finds the rest itself)."""

    count: int
    slurm: bool


def announced(environment: Mapping[str, str] = os.environ) -> Announcement:
    """How many processes were started together: by JAX_NUM_PROCESSES, else by SLURM's step, else one.

    Raises:
        UserError: a variable that is no number, or of JAX's three one that is missing.
    """
    if COUNT not in environment and COORDINATOR not in environment:
        return Announcement(_number(environment, SLURM_COUNT, 1), slurm=True)
    missing = [name for name in (COORDINATOR, COUNT, NUMBER) if name not in environment]
    if missing:
        raise UserError(f"{', '.join(missing)}: expected beside the other variables that join JAX's processes")
    return Announcement(_number(environment, COUNT, 1), slurm=False)


def join_processes(environment: Mapping[str, str] = os.environ) -> int:
    """Joins the processes that were started together; nothing for one. Call it before any other use of JAX.

    Afterwards `jax.devices()` are those of all processes, and every process must run the same computations. On CPUs
    they communicate through gloo.

    Args:
        environment: JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID; or
            what srun sets.

    Returns:
        The number of processes.

    Raises:
        UserError: as `announced`.
    """
    count, slurm = announced(environment)
    if count == 1:
        return 1
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if slurm:
        jax.distributed.initialize(cluster_detection_method="slurm")
    else:
        jax.distributed.initialize(environment[COORDINATOR], count, _number(environment, NUMBER, 0))
    return count


def refuse_several(environment: Mapping[str, str] = os.environ) -> None:
    """Refuses to run a command that works in one process as one of several: all would write one run directory.

    Raises:
        UserError: the environment announces several, or as `announced`.
    """
    count, slurm = announced(environment)
    if count > 1:
        variable = SLURM_COUNT if slurm else COUNT
        raise UserError(
            f"{variable} is {count}, but a run is one process that uses all cards it sees: start one task "
            "(srun --ntasks=1) and spread the policy with policy.mesh"
        )


def _number(environment: Mapping[str, str], name: str, least: int) -> int:
    value = environment.get(name, str(least))
    if not value.isdigit() or int(value) < least:
        raise UserError(f"{name}: expected a number >= {least}, got {value!r}")
    return int(value)
