"""The process that renders chat templates, which come with a policy's folder and are programs; run as a file.

It answers until the pipe that it was given closes, and allows each template so much time and memory and no more: beyond
the time the system ends it, whatever Python is doing.
"""

import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from grpo_jax.errors import one_line

SECONDS = 2.0
"""Of computing, for one conversation; an ordinary template takes less than a thousandth."""
MEMORY = 2**29
"""Bytes that rendering may take beside what this process holds when it begins."""
LONGEST = 2**22
"""Characters of a rendered conversation, beside 64 for each byte of what it was told."""


class _Tokenizer:
    """What `apply_chat_template` asks of a tokenizer."""

    def __init__(self, template: str):
        self.template = template
        self.special_tokens_map: dict[str, Any] = {}

    def get_chat_template(self, *_: Any, **__: Any) -> str:
        return self.template


def serve() -> None:
    """Renders one conversation after the other."""
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
        told = json.loads(request)
        if "template" in told:
            tokenizer = _Tokenizer(told["template"])
        tokenizer.special_tokens_map = told["special_tokens"]
        try:
            text = PreTrainedTokenizerBase.apply_chat_template(
                tokenizer, told["messages"], tokenize=False, add_generation_prompt=True, **told["switches"]
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
