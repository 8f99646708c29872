"""End a process whose interpreter lock is held for ever, by calls of the C library that need no Python.

A judge that never gives the lock back (a catastrophic regular expression) stops all threads of Python: nobody sees
its time limit pass, or a Ctrl-C come. A POSIX timer needs nobody: its own thread calls `fflush` on a line that was
written ahead, then `_exit`. A SIGINT that Python has not looked at when the next one comes is left to the system,
which ends the process. Linux only; elsewhere nothing here does anything.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

EXIT_CODE = 2  # that of a judge which fails
_STEP_SECONDS = 0.1  # between the lines of one watchdog
_END_SECONDS = 1.0  # from the last of them to the end: a busy machine may start its thread late
_SIGEV_THREAD, _SA_RESETHAND, _IOFBF = 2, 0x80000000, 0
_BUFFER_BYTES = 4096


# Linux's structures, as `struct` packs them.
_SIGNAL_EVENT = "PiiPP32x"  # sigevent: value, signal, notify, function, attributes
_TIMER_TIME = "4l"  # itimerspec: seconds and nanoseconds between two times, and until the first
_SIGNAL_ACTION = "P128sIP"  # sigaction: handler, mask, flags, restorer


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The C library; None where it has no timers."""
    if sys.platform != "linux":
        return None
    for name in (None, "librt.so.1"):  # glibc before 2.34 has the timers apart
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            library.timer_create, library["__fpurge"]  # an AttributeError where they are not
            library.fdopen.restype = ctypes.c_void_p
            return library
    return None


class Watchdog:
    """Ends this process, with a line, unless it is disarmed in time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._timers: list[ctypes.c_void_p] = []
        self._files: list[ctypes.c_void_p] = []
        self._closed = False
        _watchdogs.add(self)

    def arm(self, seconds: float, line: str) -> None:
        """Arm it anew; not after `close`.

        After `seconds` the process ends with `EXIT_CODE`, and writes the line to standard error and the log
        (`last_words`).
        """
        library = _library()
        with self._lock:
            self.disarm()
            if self._closed or library is None:
                return
            text = f"{line}{_last_words}\n".encode()[-_BUFFER_BYTES + 1 :]
            for descriptor in _descriptors():
                file = ctypes.c_void_p(library.fdopen(descriptor, b"w"))
                library.setvbuf(file, None, _IOFBF, _BUFFER_BYTES)
                library.fputs(text, file)
                self._files.append(file)
            flushed = len(self._files) * _STEP_SECONDS
            calls = [(library.fflush, file, place * _STEP_SECONDS) for place, file in enumerate(self._files)]
            calls.append((library._exit, ctypes.c_void_p(EXIT_CODE), flushed + _END_SECONDS))
            for function, value, later in calls:
                address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
                event = struct.pack(_SIGNAL_EVENT, value.value, 0, _SIGEV_THREAD, address, 0)
                timer = ctypes.c_void_p()
                if library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)):
                    return  # no more timers: then there is no last resort
                self._timers.append(timer)
                nanoseconds = int((max(seconds, 0.0) + later) * 1e9) + 1  # 0 would disarm it
                library.timer_settime(timer, 0, struct.pack(_TIMER_TIME, 0, 0, *divmod(nanoseconds, 10**9)), None)

    def disarm(self) -> None:
        """Disarm it, until it is armed again."""
        library = _library()
        if library is None:
            return
        with self._lock:
            while self._timers:
                library.timer_delete(self._timers.pop())
            while self._files:
                file = self._files.pop()
                library["__fpurge"](file)
                library.fclose(file)

    def close(self) -> None:
        """Disarm it for good."""
        with self._lock:
            self._closed = True
            self.disarm()

    def forget_line(self) -> None:
        """Discard the line in a forked process, whose end must not write it."""
        for file in self._files:
            _library()["__fpurge"](file)  # type: ignore[index]


_watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [watchdog.forget_line() for watchdog in _watchdogs])

_last_words = ""
_log: Path | None = None


@contextmanager
def last_words(text: str, log: Path) -> Iterator[None]:
    """Add a text to a watchdog's line inside, and a file that gets the line too."""
    global _last_words, _log
    before = _last_words, _log
    _last_words, _log = text, log
    try:
        yield
    finally:
        _last_words, _log = before


def _descriptors() -> list[int]:
    descriptors = []
    with suppress(OSError):
        descriptors.append(os.dup(2))
    if _log is not None:
        with suppress(OSError):
            descriptors.append(os.open(_log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
    return descriptors


@contextmanager
def unseen_interrupts_end() -> Iterator[None]:
    """End the process inside on a Ctrl-C while Python has not looked at the one before; in the main thread."""
    library = _library()
    if library is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = ctypes.create_string_buffer(struct.calcsize(_SIGNAL_ACTION))
    library.sigaction(signal.SIGINT, None, before)
    handler, mask, flags, restorer = struct.unpack(_SIGNAL_ACTION, before.raw)
    once = struct.pack(_SIGNAL_ACTION, handler, mask, flags | _SA_RESETHAND, restorer)
    library.sigaction(signal.SIGINT, once, None)
    try:
        yield
    finally:
        library.sigaction(signal.SIGINT, before, None)
