"""Chat templates rendered by a process of their own, which runs this file: one that takes too long is ended.

A template is part of a policy's folder and a program. Jinja's sandbox keeps it from files and code, not from work: the
process allows each so much time and memory and no more, and answers until the pipe that it was given closes.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from grpo_jax.errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = Any

SECONDS = 2.0
"""Computing time for one conversation; an ordinary template takes less than a thousandth."""
MEMORY = 2**29
"""Bytes that rendering may take beside what this process holds when it begins."""
LONGEST = 2**22
"""Characters of a rendered conversation, beside 64 for each byte of the request."""

_CODE = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


class TemplateFailed(Exception):
    """A template wrote nothing that can be used; the message says why in a line."""


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Json]], **switches: Json) -> str:
    """Render a conversation by a tokenizer's chat template, with the answer left open; `switches` are its variables.

    TemplateFailed where it raised, took more time or memory than is allowed, or there is none.
    """
    try:
        template = tokenizer.get_chat_template(tools=switches.get("tools"))
    except Exception as error:  # several, and none by the name that is asked for
        raise TemplateFailed(f"{type(error).__name__}: {one_line(error)}") from error
    request = {"messages": list(messages), "special_tokens": dict(tokenizer.special_tokens_map), "switches": switches}
    return _RENDERER.render(template, request)


def prepare() -> None:
    """Start the process, which is ready a second later; otherwise the first conversation does, or says why not."""
    with suppress(TemplateFailed):
        _RENDERER.start()


class _Renderer:
    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.channel: Connection | None = None
        self.template: str | None = None
        self.lock = threading.RLock()

    def start(self) -> None:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.end()
                self._spawn()

    def _spawn(self) -> None:
        self.channel, theirs = Pipe()
        words = [sys.executable, "-c", _CODE, json.dumps(sys.path), __file__, str(theirs.fileno())]
        null = subprocess.DEVNULL
        try:
            self.process = subprocess.Popen(
                words,
                pass_fds=[theirs.fileno()],
                stdin=null,
                stdout=null,
                stderr=null,
                start_new_session=True,  # the terminal's Ctrl-C does not reach it
            )
        except OSError as error:
            raise TemplateFailed(f"no process can be started for it, {error.strerror}") from error
        finally:
            theirs.close()

    def render(self, template: str, request: dict[str, Json]) -> str:
        with self.lock:
            answer = self._ask(template, request)
            if answer == -signal.SIGKILL:  # from outside, where memory ran out perhaps: not the template's doing
                answer = self._ask(template, request)
        if isinstance(answer, int):
            raise TemplateFailed(_how_it_ended(answer))
        if "failed" in answer:
            raise TemplateFailed(answer["failed"])
        return answer["text"]

    def _ask(self, template: str, request: dict[str, Json]) -> dict[str, Json] | int:
        """The process's answer, or the exit code with which it ended instead."""
        self.start()
        if template != self.template:
            request = {**request, "template": template}
        try:
            message = json.dumps(request, default=str).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFailed(f"it cannot be told these messages, {one_line(error)}") from error
        try:
            self.channel.send_bytes(message)
            answer = json.loads(self.channel.recv_bytes())
        except (EOFError, OSError):
            code = self.process.wait() if self.process is not None else 0
            self.end()
            return code
        except BaseException:  # a stop that was asked for: the answer would be taken for the next one's
            self.end()
            raise
        self.template = template
        return answer

    def end(self) -> None:
        with self.lock:
            process = self.process
            self.process = None
            self.template = None
            if process is not None:
                with suppress(OSError):
                    self.channel.close()
                process.kill()
                process.wait()

    def forget(self) -> None:
        """Leave the process to another one, which this one was forked from."""
        self.process = None
        self.template = None
        self.lock = threading.RLock()


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {SECONDS:g} s of computing"
    if -code in set(signal.Signals):
        return f"its process ended with {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


_RENDERER = _Renderer()
atexit.register(_RENDERER.end)
os.register_at_fork(after_in_child=_RENDERER.forget)


class _Tokenizer:
    def __init__(self, template: str):
        self.template = template
        self.special_tokens_map: dict[str, Json] = {}

    def get_chat_template(self, *_: object, **__: object) -> str:
        return self.template


def serve() -> None:
    """Render one conversation after the other."""
    channel = Connection(int(sys.argv[1]))
    from transformers import PreTrainedTokenizerBase

    _limit_memory()
    tokenizer = _Tokenizer("")
    while True:
        try:
            request = channel.recv_bytes()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        task = json.loads(request)
        if "template" in task:
            tokenizer = _Tokenizer(task["template"])
        tokenizer.special_tokens_map = task["special_tokens"]
        try:
            text = PreTrainedTokenizerBase.apply_chat_template(
                tokenizer, task["messages"], tokenize=False, add_generation_prompt=True, **task["switches"]
            )
            many = len(text) > LONGEST + 64 * len(request)
            answer = {"failed": f"it writes {len(text):,} characters"} if many else {"text": text}
        except BaseException as error:  # a template raises what it likes
            answer = {"failed": f"{type(error).__name__}: {one_line(error)}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.send_bytes(json.dumps(answer).encode())


def _limit_memory() -> None:
    if sys.platform == "linux":  # elsewhere address space is not counted so
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))


if __name__ == "__main__":
    serve()
