"""A reward in a process of its own, which may crash, hang or be killed without harm to the run.

The run sends texts and columns, pickled; what comes back is JSON: a number, null or a description for each completion.
The child knows NumPy and the user's module, never JAX. It ends with the run, however that ends.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo_jax.config.named import load_object
from grpo_jax.errors import StopRun, UserError, one_line
from grpo_jax.rollout.pipeline import untimed
from grpo_jax.rollout.rewards import PICTURES, Reward, RewardError, accepted_arguments, as_list, as_number, reason_of

START_SECONDS = 600.0
"""How long the user's module may take to be imported."""
_POLL_SECONDS, _GRACE_SECONDS = 0.05, 5.0
_LONGEST = 2**28  # bytes of an answer; more is nobody's numbers
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from grpo_jax.rollout.isolated import serve; serve()"
_PR_SET_PDEATHSIG = 1


class _GoneError(Exception):
    """The child gave no answer; says why."""


def isolate(name: str, timeout: float | None) -> Reward:
    """A reward that is called in a process of its own, imported there and nowhere else.

    Args:
        name: package.module:function or file.py:function.
        timeout: Seconds one call may take; its process is killed after them. None for no limit.

    Returns:
        A reward that raises RewardError where the process died, and has a fresh one for the next call.

    Raises:
        UserError: There is no such function, or importing it fails.
    """
    home = _Home(name, timeout)
    try:
        parameters = home.start()
    except _GoneError as error:
        raise UserError(f"reward {name!r}: importing {Path(home.place).name}: {error}") from error

    def reward(**arguments: Any) -> list[Any]:
        with untimed():  # the call has its own limit, and a new process has to import the module again
            return home.call({key: value for key, value in arguments.items() if key not in PICTURES})

    reward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    reward.__name__ = home.label
    return reward


# ---------------------------------------------------------------------------------------------------- the run's side


class _Home:
    """Where a reward lives: its process, and the next one where that is gone."""

    def __init__(self, name: str, timeout: float | None):
        self.place, _, self.label = name.rpartition(":")
        self.name, self.timeout, self.folder = name, timeout, os.getcwd()
        self.child: _Child | None = None

    def start(self) -> list[inspect.Parameter]:
        """Starts the process; gives the reward's parameters.

        Raises:
            UserError: What the child has against the name.
            _GoneError: It died on the import.
        """
        self.child = _Child(self.name, self.folder)
        hello = self._answer(None, START_SECONDS)
        if "refused" in hello:
            self.end()
            raise UserError(hello["refused"])
        return [_parameter(*parameter) for parameter in hello["parameters"]]

    def call(self, arguments: dict[str, Any]) -> list[Any]:
        """The reward's values. Raises RewardError, or the StopRun that the reward raised."""
        try:
            request = pickle.dumps(arguments)
        except Exception as error:
            raise RewardError(self.label, f"isolated: a column cannot be sent: {one_line(error)}") from error
        try:
            if self.child is None or self.child.process.poll() is not None:
                self.end()
                self.start()
            answer = self._answer(request, self.timeout)
        except (_GoneError, UserError) as error:
            raise RewardError(self.label, one_line(error, 150)) from error
        if "stop" in answer:
            raise StopRun(answer["stop"])
        if "reason" in answer:
            raise RewardError(self.label, answer["reason"])
        return answer["values"]

    def end(self) -> None:
        """Ends the process; the next call starts another."""
        child, self.child = self.child, None
        if child is not None:
            child.end()

    def _answer(self, request: bytes | None, limit: float | None) -> dict[str, Any]:
        assert self.child is not None
        try:
            answer = json.loads(self.child.ask(request, limit))
        except _GoneError:
            self.end()
            raise
        except ValueError as error:  # somebody else wrote into the pipe
            self.end()
            raise _GoneError("its process answered with what is no JSON") from error
        if self.child.overdue:  # it was just in time, and is killed
            self.end()
        return answer


class _Child:
    """One process and the pipe to it."""

    def __init__(self, name: str, folder: str):
        self.channel, theirs = Pipe()
        words = [sys.executable, "-c", _CODE, json.dumps(sys.path), name, str(theirs.fileno()), str(os.getpid())]

        def start() -> subprocess.Popen:
            null = subprocess.DEVNULL
            # In a session of its own the terminal's Ctrl-C does not reach it.
            return subprocess.Popen(
                words,
                cwd=folder,
                pass_fds=[theirs.fileno()],
                stdin=null,
                stdout=null,
                stderr=null,
                start_new_session=True,
            )

        try:
            self.process = _starter().submit(start).result()
        except OSError as error:
            raise _GoneError(f"its process cannot be started ({error.strerror})") from error
        finally:
            theirs.close()
        self.overdue = False
        self.end: Callable[[], Any] = weakref.finalize(self, _end, self.process, self.channel)

    def ask(self, request: bytes | None, limit: float | None) -> bytes:
        """Sends a request, if there is one, and waits for the next answer.

        Raises:
            _GoneError: The process ended, or was killed after `limit` seconds.
        """
        timer = None if limit is None else threading.Timer(limit, self._kill)
        if timer is not None:  # it also frees a `send` that nobody reads
            timer.daemon = True
            timer.start()
        try:
            if request is not None:
                self.channel.send_bytes(request)
            while not self.channel.poll(_POLL_SECONDS):
                if self.process.poll() is not None and not self.channel.poll(0):
                    raise EOFError  # what it has forked may hold the pipe open
            return self.channel.recv_bytes(_LONGEST)
        except (EOFError, OSError) as error:
            reason = f"no result after {limit:g} s" if self.overdue else self._how_it_ended()
            raise _GoneError(reason) from error
        finally:
            if timer is not None:
                timer.cancel()

    def _kill(self) -> None:
        self.overdue = True
        _kill_group(self.process)

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process closed the pipe that it answers through"
        if code >= 0:
            return f"its process ended with exit code {code}"
        known = -code in set(signal.Signals)
        return f"its process was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


@functools.cache
def _starter() -> ThreadPoolExecutor:
    """A thread that lives as long as the run: Linux ends a child with the thread that started it."""
    return ThreadPoolExecutor(1, thread_name_prefix="isolated")


def _end(process: subprocess.Popen, channel: Connection) -> None:
    _kill_group(process)
    with suppress(OSError):
        channel.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)


def _kill_group(process: subprocess.Popen) -> None:
    """Kills a child and what it has forked."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _parameter(name: str, kind: str, has_default: bool) -> inspect.Parameter:
    default = None if has_default else inspect.Parameter.empty
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default)


# ------------------------------------------------------------------------------------------------- the child's side


def serve() -> None:
    """The life of the child: imports the reward, then answers until the run is gone."""
    name, file, run = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    sys.argv[1:] = []
    channel = Connection(file)
    os.register_at_fork(after_in_child=channel.close)  # what the reward forks has no part in this
    os.register_at_fork(after_in_child=_end_with_parent)
    _end_with_parent()
    if os.getppid() != run:
        return
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, this one goes and not the run
    try:
        reward = load_object(name, "reward")
        if not callable(reward):
            raise UserError(f"reward {name!r}: it is a {type(reward).__name__}, not a function")
        parameters = inspect.signature(reward).parameters.values()
        hello = {"parameters": [(p.name, p.kind.name, p.default is not p.empty) for p in parameters]}
    except UserError as error:
        _tell(channel, {"refused": str(error)})
        return
    except (TypeError, ValueError) as error:
        _tell(channel, {"refused": f"reward {name!r}: {one_line(error)}"})
        return
    _tell(channel, hello)
    while True:
        try:
            request = channel.recv_bytes()
        except EOFError:
            return
        _tell(channel, _answer(reward, request))


def _answer(reward: Reward, request: bytes) -> dict[str, Any]:
    try:
        values = as_list(reward(**accepted_arguments(reward, pickle.loads(request))))
        return {"values": [_plain(value) for value in values]}
    except StopRun as error:
        return {"stop": one_line(error, 200)}
    except BaseException as error:
        return {"reason": reason_of(error)}


def _plain(value: Any) -> float | str | None:
    """A number, None, or of anything else what it looks like."""
    number = None if value is None else as_number(value)
    return number if value is None or number is not None else one_line(value, 60)


def _tell(channel: Connection, answer: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(answer).encode())


def _end_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, even while it is stuck outside Python."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
