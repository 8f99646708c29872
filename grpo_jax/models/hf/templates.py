"""Chat templates rendered by a process of their own (`rendering`): one that takes for ever or too much memory is told.

A template is part of a policy's folder and a program. Jinja's sandbox keeps it from files and code, not from work.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from grpo_jax.errors import one_line
from grpo_jax.models.hf import rendering

_CODE = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


class TemplateFailed(Exception):
    """A template wrote nothing that can be used; says why in a line."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **switches: Any) -> str:
    """What the chat template of a tokenizer writes for a conversation, with the answer left open.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        messages: As `apply_chat_template` takes them.
        **switches: What the template is told beside them.

    Raises:
        TemplateFailed: It raised, took more than `rendering` allows, or there is none.
    """
    try:
        template = tokenizer.get_chat_template(tools=switches.get("tools"))
    except Exception as error:  # several, and none by the name that is asked for
        raise TemplateFailed(f"{type(error).__name__}: {one_line(error)}") from error
    return _RENDERER.render(template, messages, dict(tokenizer.special_tokens_map), switches)


def prepare() -> None:
    """Starts the process, which is ready a second later; otherwise the first conversation does, or says why not."""
    with suppress(TemplateFailed):
        _RENDERER.start()


class _Renderer:
    """The process, and the next one where that is gone."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.channel: Any = None
        self.template: str | None = None
        self.lock = threading.Lock()

    def start(self) -> None:
        """Starts the process, unless it lives."""
        with self.lock:
            self._start()

    def _start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        self._end()
        self.channel, theirs = Pipe()
        words = [sys.executable, "-c", _CODE, json.dumps(sys.path), str(Path(rendering.__file__)), str(theirs.fileno())]
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

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], special: dict[str, Any], switches: dict[str, Any]
    ) -> str:
        """A conversation's text."""
        request: dict[str, Any] = {"messages": list(messages), "special_tokens": special, "switches": switches}
        with self.lock:
            answer = self._ask(template, request)
            if answer == -signal.SIGKILL:  # from outside, where memory ran out perhaps: not the template's doing
                answer = self._ask(template, request)
        if isinstance(answer, int):
            raise TemplateFailed(_how_it_ended(answer))
        if "failed" in answer:
            raise TemplateFailed(answer["failed"])
        return answer["text"]

    def _ask(self, template: str, request: dict[str, Any]) -> dict[str, Any] | int:
        """The process's answer, or the exit code with which it ended instead."""
        self._start()
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
            self._end()
            return code
        except BaseException:  # a stop that was asked for: the answer would be taken for the next one's
            self._end()
            raise
        self.template = template
        return answer

    def end(self) -> None:
        """Ends the process."""
        with self.lock:
            self._end()

    def forget(self) -> None:
        """Leaves the process to another one, which this one was forked from."""
        self.process, self.template, self.lock = None, None, threading.Lock()

    def _end(self) -> None:
        process, self.process, self.template = self.process, None, None
        if process is not None:
            with suppress(OSError):
                self.channel.close()
            process.kill()
            process.wait()


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {rendering.SECONDS:g} s of computing"
    known = -code in set(signal.Signals)
    return f"its process ended with {signal.Signals(-code).name if known else f'exit code {code}'}"


_RENDERER = _Renderer()
atexit.register(_RENDERER.end)
os.register_at_fork(after_in_child=_RENDERER.forget)
