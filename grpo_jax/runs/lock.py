"""One process at a time on a run directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_jax.config.files import parse_json
from grpo_jax.errors import UserError

NAME = "run.lock"
_BEAT_SECONDS, _STALE_SECONDS = 20.0, 90.0


class RunLock:
    """The lock of a folder: a file that says who has it, locked by the system for as long as that process lives.

    What a process left that was killed is free again at once. Other machines do not see such locks on every network
    file system; for them the holder touches the file every 20 seconds, and 90 seconds without that make it free.
    """

    def __init__(self, folder: Path):
        """Takes the lock.

        Raises:
            UserError: Another process, or another run of this one, has it; names it.
            OSError: The folder is not writable.
        """
        self._path = folder / NAME
        self._handle = self._take()
        _write(self._handle, {"host": socket.gethostname(), "process": os.getpid()})
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def release(self) -> None:
        """Gives it back; a second time does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        if _is_same(self._handle, self._path):
            self._path.unlink(missing_ok=True)
        with suppress(OSError):  # a judge may have closed it
            os.close(self._handle)

    def _take(self) -> int:
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = _read(handle)
                os.close(handle)
                if not _is_dead(holder):
                    raise self._refusal(holder) from None
                self._path.unlink(missing_ok=True)  # a child of it has the lock still: another file is another lock
                continue
            if not _is_same(handle, self._path):  # given back, and removed, since it was opened
                os.close(handle)
                continue
            holder = _read(handle)
            if holder.get("host") not in (None, socket.gethostname()) and self._age() < _STALE_SECONDS:
                os.close(handle)
                raise self._refusal(holder)
            return handle

    def _refusal(self, holder: dict[str, Any]) -> UserError:
        who = "another process"
        if holder:
            who = f"process {holder.get('process')} on {holder.get('host')}"
        return UserError(
            f"{self._path.parent} is in use by {who}: wait until that run ends, stop it, or choose another --run_dir "
            f"(if there is no such process: remove {NAME} in it)"
        )

    def _age(self) -> float:
        """Seconds since the holder touched it, by the file system's own clock."""
        with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=f".{NAME}.") as now:
            return os.stat(now.name).st_mtime - self._path.stat().st_mtime

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            try:
                os.utime(self._path)
            except OSError:  # the folder is gone, or away for a moment
                continue


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether it ran on this machine and does no longer."""
    process = holder.get("process")
    if holder.get("host") != socket.gethostname() or not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _read(handle: int) -> dict[str, Any]:
    try:
        return parse_json(os.pread(handle, 4096, 0))
    except (OSError, ValueError):
        return {}


def _write(handle: int, holder: dict[str, Any]) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode(), 0)
