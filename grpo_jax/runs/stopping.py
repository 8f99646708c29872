"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_jax.errors import Stopped


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
    """Take SIGTERM, SLURM's SIGUSR1 and the first Ctrl-C as requests to stop; yield the flag.

    A second Ctrl-C interrupts at once: the last checkpoint stays valid. SIGHUP, sent when a terminal closes, stops
    nothing. Outside the main thread, where Python takes no handlers, no stop is ever asked for.
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
