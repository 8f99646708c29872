"""Joins the processes that the environment announces, takes their part in a run, and parts from them."""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

import jax
import orbax.checkpoint as ocp

from grpo_jax.config import Config
from grpo_jax.config.fields import require
from grpo_jax.errors import ABANDONED, StageError, Stopped, UserError, complain
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import on_host
from grpo_jax.runs.iteration import LearningBrief, led_learner
from grpo_jax.runs.parts import ask_for_determinism
from grpo_jax.runs.policy import load_run_policy
from grpo_jax.runs.processes import StopRequests, announced, join_processes, number_of
from grpo_jax.runs.series import READ, WRITE, handler, read_tree, write_trees
from grpo_jax.runs.several.channel import CoordinatorChannel, Watch, ask_to_stop, joined, part, wait_for_the_watch
from grpo_jax.runs.several.company import ALONE, Company, Follower, Leader
from grpo_jax.runs.several.devices import place_policy, policy_devices
from grpo_jax.runs.several.led import Brief, led_samplers, led_see
from grpo_jax.runs.warm_start import led_sft

_POLL_SECONDS = 0.5  # how often who joins looks up where a signal does not wake it
_PATIENCE_SECONDS = 10.0  # for processes to hear that the run failed: they may wait in a collective


def join(config: object, stop: StopRequests) -> Company:
    """Join the processes that the environment announces; `Stopped` if a stop is asked for meanwhile."""
    count = announced().count
    if count == 1:
        return ALONE
    _require_fit(config, count)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    with _told_by_itself():
        _join_unless_stopped(stop)
    joined.set()
    atexit.register(part)
    return (Follower if jax.process_index() else Leader)(count, CoordinatorChannel())


def _join_unless_stopped(stop: StopRequests) -> None:
    """Join in a thread of its own: JAX waits for the others where no signal comes through."""
    count: Future[int] = Future()

    def work() -> None:
        try:
            count.set_result(join_processes())
        except BaseException as error:  # raised where it is waited for
            count.set_exception(error)

    thread = threading.Thread(target=work, name="join", daemon=True)
    thread.start()
    while wait([count], _POLL_SECONDS).not_done:
        if stop.is_set():
            thread.name = ABANDONED + thread.name
            raise Stopped
    count.result()


def _require_fit(config: object, count: int) -> None:
    if not isinstance(config, Config):
        raise UserError(f"task: this one runs in one process, and {count} were started: start one (srun --ntasks=1)")
    mesh, lag = config.policy.mesh, config.training.lag
    require(mesh.size % count == 0, "policy.mesh", f"fsdp x tensor a multiple of the {count} processes", mesh.size)
    require(lag == 0, "training.lag", f"0 with a policy over {count} processes", lag)


@contextmanager
def leading(company: Company, config: Config) -> Iterator[None]:
    """Run as process 0 inside; afterwards the others may go. Nothing where the run is one process."""
    if not isinstance(company, Leader):
        yield
        return

    def stop() -> None:  # as if the signal had come here
        os.kill(os.getpid(), signal.SIGTERM)

    again = f"the run ends, its last checkpoint is sound; go on with --resume --run_dir {config.run_dir}"
    watch = Watch(company.processes, told=again, stop=stop)
    try:
        yield
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            wait_for_the_watch()
        watch.over()
        company.end(2 if isinstance(error, UserError | StageError) else 1, patience=_PATIENCE_SECONDS)
        raise
    watch.over()
    company.end(0)


def take_part(config: Config, follower: Follower, stop: StopRequests) -> dict[str, object]:
    """Run any other process to its end: it prints nothing, and passes a stop asked of it to process 0.

    SystemExit if process 0 ended with an error, or if a part in the config is not on this machine.
    """
    watch = Watch(follower.processes)
    with _signals_passed_on(), _told_by_itself():
        if stop.is_set():
            ask_to_stop()
        try:
            code = follow(config, follower)
        except jax.errors.JaxRuntimeError:
            wait_for_the_watch()
            raise
    watch.over()
    if code:
        raise SystemExit(code)
    return {}


@contextmanager
def _told_by_itself() -> Iterator[None]:
    """Print this process's UserError, since process 0 would only see it gone; process 0 raises its own."""
    try:
        yield
    except UserError as error:
        if not number_of():
            raise
        complain(f"error: process {number_of()}: {' '.join(str(error).split())}")
        raise SystemExit(2) from error


@contextmanager
def _signals_passed_on() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handle: Callable[..., None] = lambda *_: ask_to_stop()  # noqa: E731
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(config: Config, follower: Follower) -> object:
    """Take part in a run until process 0 ends it, and return what it ended with."""
    if config.deterministic:
        ask_for_determinism(torch_too=False)
    places = place_policy(config, processes=follower.processes)
    devices = policy_devices(places, config.policy, processes=follower.processes)
    loaded: list[Policy] = []

    def load(run_dir: str, pictures: bool) -> Policy:
        own = dataclasses.replace(config, run_dir=run_dir)
        loaded.append(load_run_policy(own, devices[: config.policy.mesh.size], lambda *_: None, pictures=pictures))
        return loaded[0]

    def sampling(brief: Brief) -> None:
        led_samplers(config, loaded[0], brief, follower)
        led_see(loaded[0], brief, follower)

    def learning(brief: LearningBrief) -> None:
        led_learner(config, loaded[0], brief, follower)

    def sft(brief: LearningBrief) -> None:
        led_sft(config, loaded[0], brief, follower)

    for function in (load, sampling, learning, sft):
        follower.lead(function.__name__, function)
    follower.lead("whole", on_host)
    checkpointer = ocp.AsyncCheckpointer(handler())
    follower.lead(WRITE, lambda path, trees: write_trees(checkpointer, path, trees))
    follower.lead(READ, read_tree)
    try:
        return follower.follow()
    finally:
        checkpointer.close()
