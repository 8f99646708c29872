"""Run a reward or an environment in a process of its own, which may crash, hang or be killed without harm to the run.

The run sends texts and columns, pickled; the answer is JSON: a number, a text, null or a description for each
completion. Pictures stay with the run. The child knows NumPy and the user's module, never JAX. It ends with the run,
however that ends.
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
from collections.abc import Callable, Mapping, Sequence
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
from grpo_jax.rollout.episodes import Answer, AnswerError, Episode, Respond, answers_of, checked, remembered
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
"""Limit of the import of the user's module."""
_POLL_SECONDS, _GRACE_SECONDS = 0.05, 5.0
_LONGEST = 2**28  # bytes of an answer; more is nobody's numbers
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from grpo_jax.rollout.isolated import serve; serve()"
_PR_SET_PDEATHSIG = 1


class _GoneError(Exception):
    """The process gave no answer; says why."""


def isolate(name: str, timeout: float | None) -> Reward:
    """Return a reward that is imported and called in a process of its own; UserError if importing fails.

    It raises RewardError where the process died, and has a fresh one for the next call. One call may take `timeout`
    seconds; its process is killed after them.
    """
    label = name.rpartition(":")[2]
    worker = _Worker(name, timeout, "reward", partial(RewardError, label))

    def reward(**arguments: object) -> list[object]:
        # What a renderer drew stays where it is; lists of a row's own pictures go.
        sent = {key: value for key, value in arguments.items() if key not in PICTURES or isinstance(value, list)}
        if isinstance(episodes := sent.get("episodes"), list):
            sent["episodes"] = [remembered(episode, pictures=False) for episode in episodes]
        return worker.call(sent)

    reward.__signature__ = inspect.Signature(worker.parameters)  # type: ignore[attr-defined]
    reward.__name__ = label
    return reward


def isolate_environment(name: str, timeout: float | None) -> Respond:
    """Return an environment in a process of its own, as `isolate` does; it neither gets nor answers pictures."""
    worker = _Worker(name, timeout, ENVIRONMENT, AnswerError)

    def respond(rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Answer | ValueError]:
        plain = [replace(row, pictures=(), messages=()) for row in rows]
        texts = [remembered(episode, pictures=False) for episode in episodes]
        answers = worker.call({"rows": plain, "episodes": texts})
        return [ValueError(answer["refused"]) if "refused" in answer else Answer(**answer) for answer in answers]

    return respond


# ---------------------------------------------------------------------------------------------------- the run's side


class _Worker:
    """A function in a process of its own, and in the next one where that is gone."""

    def __init__(self, name: str, timeout: float | None, kind: str, failed: Callable[[str], UserError]):
        self.name = name
        self.timeout = timeout
        self.kind = kind
        self.failed = failed
        self.folder = os.getcwd()
        self.process: subprocess.Popen | None = None
        try:
            self.parameters = self._start()
        except _GoneError as error:  # a death on the import is the user's mistake
            module = Path(name.rpartition(":")[0]).name
            raise UserError(f"{kind} {name!r}: importing {module}: {error}") from error

    def call(self, arguments: Mapping[str, object]) -> list[Any]:
        """Return the function's values; raises its failure, or the StopRun that it raised."""
        try:
            request = pickle.dumps(arguments)
        except Exception as error:
            raise self.failed(f"isolated: a column cannot be sent: {one_line(error)}") from error
        with untimed():  # the call has its own limit, and a new process has to import the module again
            try:
                if self.process is None or self.process.poll() is not None:
                    self._start()
                answer = self._ask(request, self.timeout)
            except (_GoneError, UserError) as error:
                raise self.failed(one_line(error, 150)) from error
        if "stop" in answer:
            raise StopRun(answer["stop"])
        if "reason" in answer:
            raise self.failed(answer["reason"])
        return answer["values"]

    def _start(self) -> list[inspect.Parameter]:
        """Start a process, in place of the one before; return the function's parameters."""
        self._end()
        self.channel, theirs = Pipe()
        arguments = (json.dumps(sys.path), self.name, str(theirs.fileno()), str(os.getpid()), self.kind)
        try:
            self.process = (
                _starter()
                .submit(
                    subprocess.Popen,
                    [sys.executable, "-c", _CODE, *arguments],
                    cwd=self.folder,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # the terminal's Ctrl-C does not reach it
                    **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
                )
                .result()
            )
        except OSError as error:
            raise _GoneError(f"its process cannot be started ({error.strerror})") from error
        finally:
            theirs.close()
        self._finalize = weakref.finalize(self, _end, self.process, self.channel)
        hello = self._ask(None, START_SECONDS)
        if "refused" in hello:
            self._end()
            raise UserError(hello["refused"])
        return [
            inspect.Parameter(
                name, getattr(inspect.Parameter, kind), default=None if optional else inspect.Parameter.empty
            )
            for name, kind, optional in hello["parameters"]
        ]

    def _end(self) -> None:
        if self.process is not None:
            self.process = None
            self._finalize()

    def _ask(self, request: bytes | None, limit: float | None) -> dict[str, Any]:
        """Send a request, if there is one, and wait for the answer; after `limit` seconds the process is killed."""
        process = self.process
        assert process is not None
        overdue = threading.Event()

        def kill() -> None:
            overdue.set()
            _kill_group(process)

        timer = threading.Timer(threading.TIMEOUT_MAX if limit is None else limit, kill)
        timer.daemon = True
        timer.start()  # it also frees a `send` that nobody reads
        try:
            if request is not None:
                self.channel.send_bytes(request)
            while not self.channel.poll(_POLL_SECONDS):
                if process.poll() is not None and not self.channel.poll(0):
                    raise EOFError  # what it has forked may hold the pipe open
            answer = parse_json(self.channel.recv_bytes(_LONGEST))
        except (EOFError, OSError) as error:
            reason = f"no result after {limit:g} s" if overdue.is_set() else _how_it_ended(process)
            self._end()
            raise _GoneError(reason) from error
        except ValueError as error:  # somebody else wrote into the pipe
            self._end()
            raise _GoneError("its process answered with what is no JSON") from error
        finally:
            timer.cancel()
        if overdue.is_set():  # it was just in time, and is killed
            self._end()
        return answer


@functools.cache
def _starter() -> ThreadPoolExecutor:
    """Return a thread that lives as long as the run: Linux ends a child with the thread that started it."""
    return ThreadPoolExecutor(1, thread_name_prefix="isolated")


def _how_it_ended(process: subprocess.Popen) -> str:
    try:
        code = process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return "its process closed the pipe that it answers through"
    if code >= 0:
        return f"its process ended with exit code {code}"
    named = -code in set(signal.Signals)
    return f"its process was killed by {signal.Signals(-code).name if named else f'signal {-code}'}"


def _end(process: subprocess.Popen, channel: Connection) -> None:
    _kill_group(process)
    with suppress(OSError):
        channel.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)


def _kill_group(process: subprocess.Popen) -> None:
    """Kill a child and what it has forked."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------- the child's side


def serve() -> None:
    """Run the child: import the function, then answer until the run is gone."""
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
    except (UserError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, UserError) else f"{kind} {name!r}: {one_line(error)}"
        _send(channel, {"refused": reason})
        return
    _send(channel, hello)
    while True:
        try:
            request = channel.recv_bytes()
        except EOFError:
            return
        _send(channel, _answer(function, kind, request))


def _answer(function: Reward, kind: str, request: bytes) -> dict[str, object]:
    try:
        arguments = pickle.loads(request)
        if kind == ENVIRONMENT:
            return {"values": [_plain_answer(answer) for answer in answers_of(function, **arguments)]}
        values = as_list(finished(function(**accepted_arguments(function, arguments))))
        return {"values": [_plain(value) for value in values]}
    except StopRun as error:
        return {"stop": one_line(error, 200)}
    except BaseException as error:
        return {"reason": reason_of(error)}


def _plain(value: object) -> float | str | None:
    """Return a number or None; of anything else its text."""
    if value is None:
        return None
    number = as_number(value)
    return one_line(value, 60) if number is None else number


def _plain_answer(value: object) -> dict[str, object]:
    """Return an answer without pictures, or the reason of its refusal."""
    try:
        answer = checked(value)
    except ValueError as error:
        return {"refused": str(error)}
    if answer.pictures:
        return {"refused": "with a picture, which an isolated environment cannot"}
    return {"text": answer.text, "done": answer.done}


def _send(channel: Connection, answer: Mapping[str, object]) -> None:
    channel.send_bytes(json.dumps(answer).encode())


def _end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, even while it is stuck outside Python."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
