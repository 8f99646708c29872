"""A reward, or an environment, in a process of its own, which may crash, hang or be killed without harm to the run.

The run sends texts and columns, pickled; what comes back is JSON: a number, an answer's text, null or a description for
each completion. Pictures stay with the run.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo_jax.config.files import parse_json
from grpo_jax.config.named import load_object
from grpo_jax.errors import StopRun, UserError, one_line
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.episodes import Answer, AnswerError, Episode, Refused, Respond, answers_of, checked, remembered
from grpo_jax.rollout.pipeline import untimed
from grpo_jax.rollout.rewards import (
    PICTURES,
    Reward,
    RewardError,
    accepted_arguments,
    as_list,
    as_number,
    finished,
    reason_of,
)

ENVIRONMENT = "environment"
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
    home = _Home(name, timeout, "reward", partial(RewardError, name.rpartition(":")[2]))
    parameters = home.first()

    def reward(**arguments: Any) -> list[Any]:
        sent = {name: value for name, value in arguments.items() if not _is_drawn(name, value)}
        if "episodes" in sent:
            sent["episodes"] = [remembered(episode, pictures=False) for episode in sent["episodes"]]
        return home.call(sent)

    reward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    reward.__name__ = home.label
    return reward


def isolate_environment(name: str, timeout: float | None) -> Respond:
    """An environment as `isolate` has rewards: it gets no pictures, and its answers can have none.

    Raises:
        UserError: As `isolate`.
    """
    home = _Home(name, timeout, ENVIRONMENT, AnswerError)
    home.first()

    def respond(rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Any]:
        plain = [replace(row, pictures=(), messages=()) for row in rows]
        told = home.call({"rows": plain, "episodes": [remembered(episode, pictures=False) for episode in episodes]})
        return [Refused(one["refused"]) if "refused" in one else Answer(**one) for one in told]

    return respond


def _is_drawn(name: str, value: Any) -> bool:
    """Whether a renderer drew it, which stays where it is; lists of a row's own pictures go."""
    return name in PICTURES and not isinstance(value, list)


# ---------------------------------------------------------------------------------------------------- the run's side


class _Home:
    """Where a reward lives: its process, and the next one where that is gone."""

    def __init__(self, name: str, timeout: float | None, kind: str, failed: Callable[[str], UserError]):
        self.place, _, self.label = name.rpartition(":")
        self.name, self.timeout, self.folder, self.kind, self.failed = name, timeout, os.getcwd(), kind, failed
        self.child: _Child | None = None

    def first(self) -> list[inspect.Parameter]:
        """As `start`; a death on the import is the user's mistake."""
        try:
            return self.start()
        except _GoneError as error:
            raise UserError(f"{self.kind} {self.name!r}: importing {Path(self.place).name}: {error}") from error

    def start(self) -> list[inspect.Parameter]:
        """Starts the process; gives the reward's parameters.

        Raises:
            UserError: What the child has against the name.
            _GoneError: It died on the import.
        """
        self.child = _Child(self.name, self.folder, self.kind)
        hello = self._answer(None, START_SECONDS)
        if "refused" in hello:
            self.end()
            raise UserError(hello["refused"])
        return [_parameter(*parameter) for parameter in hello["parameters"]]

    def call(self, arguments: dict[str, Any]) -> list[Any]:
        """The function's values. Raises its failure, or the StopRun that it raised."""
        try:
            request = pickle.dumps(arguments)
        except Exception as error:
            raise self.failed(f"isolated: a column cannot be sent: {one_line(error)}") from error
        with untimed():  # the call has its own limit, and a new process has to import the module again
            return self._values(request)

    def _values(self, request: bytes) -> list[Any]:
        try:
            if self.child is None or self.child.process.poll() is not None:
                self.end()
                self.start()
            answer = self._answer(request, self.timeout)
        except (_GoneError, UserError) as error:
            raise self.failed(one_line(error, 150)) from error
        if "stop" in answer:
            raise StopRun(answer["stop"])
        if "reason" in answer:
            raise self.failed(answer["reason"])
        return answer["values"]

    def end(self) -> None:
        """Ends the process; the next call starts another."""
        child, self.child = self.child, None
        if child is not None:
            child.end()

    def _answer(self, request: bytes | None, limit: float | None) -> dict[str, Any]:
        assert self.child is not None
        try:
            answer = parse_json(self.child.ask(request, limit))
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

    def __init__(self, name: str, folder: str, kind: str):
        self.channel, theirs = Pipe()
        words = [sys.executable, "-c", _CODE, json.dumps(sys.path), name, str(theirs.fileno()), str(os.getpid()), kind]

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
    """The life of the child: imports the function, then answers until the run is gone."""
    name, file, run, kind = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
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
        function = load_object(name, kind)
        if not callable(function):
            raise UserError(f"{kind} {name!r}: it is a {type(function).__name__}, not a function")
        parameters = inspect.signature(function).parameters.values()
        hello = {"parameters": [(p.name, p.kind.name, p.default is not p.empty) for p in parameters]}
    except UserError as error:
        _tell(channel, {"refused": str(error)})
        return
    except (TypeError, ValueError) as error:
        _tell(channel, {"refused": f"{kind} {name!r}: {one_line(error)}"})
        return
    _tell(channel, hello)
    while True:
        try:
            request = channel.recv_bytes()
        except EOFError:
            return
        _tell(channel, _answer(function, kind, request))


def _answer(function: Callable[..., Any], kind: str, request: bytes) -> dict[str, Any]:
    try:
        arguments = pickle.loads(request)
        if kind == ENVIRONMENT:
            return {"values": [_said(answer) for answer in answers_of(function, **arguments)]}
        values = as_list(finished(function(**accepted_arguments(function, arguments))))
        return {"values": [_plain(value) for value in values]}
    except StopRun as error:
        return {"stop": one_line(error, 200)}
    except BaseException as error:
        return {"reason": reason_of(error)}


def _plain(value: Any) -> float | str | None:
    """A number, None, or of anything else what it looks like."""
    number = None if value is None else as_number(value)
    return number if value is None or number is not None else one_line(value, 60)


def _said(answer: Any) -> dict[str, Any]:
    """An answer without pictures, or what is wrong with it."""
    try:
        found = checked(answer)
    except ValueError as error:
        return {"refused": str(error)}
    if found.pictures:
        return {"refused": "with a picture, which an isolated environment cannot"}
    return {"text": found.text, "done": found.done}


def _tell(channel: Connection, answer: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(answer).encode())


def _end_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, even while it is stuck outside Python."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
