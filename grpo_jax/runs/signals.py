"""Stopping between two iterations when the scheduler or the user asks for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
