"""Stop requests: signals, Ctrl-C and callbacks."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_jax.errors import Stopped, complain


class StopRequests:
    """Flag of a stop request; long waits poll it, then save and leave."""

    def __init__(self) -> None:
        self._requested = self._immediate = False

    def is_set(self) -> bool:
        """Return whether a stop was requested."""
        return self._requested

    def acknowledge(self, signals: int) -> None:
        """Print a line for each signal that is written to a pipe, until it is closed.

        Python's handlers run between its own instructions, so not before a compilation of a minute is over.
        """
        interrupted = False
        with open(signals, "rb", buffering=0) as pipe:
            for number in iter(lambda: pipe.read(1), b""):
                name = signal.Signals(number[0]).name
                when = "stopping" if self._immediate else "stopping after this iteration"
                if name == "SIGINT":
                    complain("stopping now" if interrupted else f"{when}; Ctrl-C again stops now")
                    interrupted = True
                elif name in ("SIGTERM", "SIGUSR1"):
                    complain(f"{name}: {when}")

    def set(self) -> None:
        """Request a stop."""
        self._requested = True
        if self._immediate:
            raise Stopped

    @contextmanager
    def raise_immediately(self) -> Iterator[None]:
        """Raise `Stopped` in the main thread at once on a request, while there is nothing to save."""
        self._immediate = True
        try:
            if self._requested:
                raise Stopped
            yield
        finally:
            self._immediate = False


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Treat SIGTERM, SLURM's SIGUSR1 and the first Ctrl-C as stop requests; yield the flag.

    Each is acknowledged at once. A second Ctrl-C interrupts at once; the last checkpoint stays valid. SIGHUP, sent when
    a terminal closes, is ignored. Outside the main thread, Python allows no handlers, so there are no stop requests.
    """
    requests = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGINT and requests.is_set():
            raise KeyboardInterrupt
        if number != signal.SIGHUP:
            requests.set()

    def unraisable(dropped: sys.UnraisableHookArgs) -> None:
        if isinstance(dropped.exc_value, Stopped):  # by a callback of the garbage collector: raise it again
            threading.Timer(0.1, _thread.interrupt_main, [signal.SIGTERM]).start()
        else:
            hook(dropped)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    lines = threading.Thread(target=requests.acknowledge, args=[read_end], daemon=True)
    lines.start()
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        yield requests
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(write_end)
        lines.join()
