"""The run directory: its lock, its paths, and writes that survive a full disk or a kill."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.config.files import parse_json, read_bytes
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError, one_line, short_name
from grpo_jax.rollout.pictures import png
from grpo_jax.tasks.task import EpisodeEntry, GalleryEntry

LOCK = "run.lock"


class RunLock:
    """The lock of a folder: a file that names its holder, locked by the OS while that process lives."""

    def __init__(self, folder: Path):
        """Take the lock. UserError if another process holds it."""
        self._handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder: dict[str, object] = {}
            with suppress(OSError, ValueError):
                holder = parse_json(os.pread(self._handle, 4096, 0))
            self.release()
            who = f"process {holder.get('process')} on {holder.get('host')}" if holder else "another process"
            raise UserError(
                f"{folder} is in use by {who}: wait until that run ends, stop it, or choose another --run_dir (if "
                f"there is no such process: remove {LOCK} in it)"
            ) from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode(), 0)
        os.register_at_fork(after_in_child=self.release)  # else a reward's child process would keep the lock

    def release(self) -> None:
        """Release the lock, idempotently. The file stays: another process may have opened it."""
        if self._handle >= 0:
            with suppress(OSError):  # a judge may have closed it
                os.close(self._handle)
            self._handle = -1


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Convert a disk error, which tensorstore reports as ValueError, to a UserError that names the path."""
    try:
        yield
    except (OSError, ValueError) as error:
        words = ("OS error", "os_error_code", "No space left")
        if not isinstance(error, OSError) and not any(word in str(error) for word in words):
            raise
        fix = "make room or fix the permissions, then continue with --resume, or start again if nothing was saved yet"
        message, folder = f"cannot write {path} ({disk_reason(error)}): {fix}", Path(path).parent
        if not folder.exists():
            message = f"{folder} is gone: it was deleted under the run, and nothing more can be saved"
        raise UserError(message) from error


def disk_reason(error: BaseException) -> str:
    """Return the OS's message of a disk error, or the first line of any other error."""
    messages = map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.EFBIG))
    message = next((text for text in messages if text in str(error)), "")
    return message or getattr(error, "strerror", None) or one_line(error, 80)


def write_atomically(path: str | Path, data: bytes | str | Iterator[bytes]) -> None:
    """Write a file atomically, through a temporary file beside it. An iterator yields pieces of large data."""
    path = Path(path)
    content = data.encode() if isinstance(data, str) else data
    with disk_errors(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


class AppendedFile:
    """File for appended text, without a buffer that a kill would lose or a close would repeat."""

    def __init__(self, path: str | Path):
        self._path = path
        with disk_errors(path):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 closed by close()

    def write(self, text: str) -> None:
        """Append text. Raises UserError on a full disk."""
        data = memoryview(text.encode(errors="backslashreplace"))
        with disk_errors(self._path):
            while data:
                data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RunDirectory:
    """Paths of a run, and its atomically written files."""

    def __init__(self, path: str | Path):
        """Define the paths, without touching the disk."""
        self.path = Path(os.path.expanduser(path)).absolute()
        self.config = self.path / "config.yaml"
        self.prompts = self.path / "prompts.jsonl"  # prompts passed to `run` in Python
        self.log = self.path / "train.log"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.completions = self.path / "completions"
        self.images = self.path / "images"
        self.report = self.path / "report.html"
        self.end = self.path / "report.json"  # contents of the report that no other file holds
        self.checkpoints = self.path / "checkpoints"
        self.policy = self.path / "policy"
        self.adapter = self.path / "adapter"  # trained adapters, in PEFT's format
        self.start = self.path / "policy_start"  # a new policy before any training
        self.summary = self.path / "summary.json"
        self._lock: RunLock | None = None
        self._made: list[Path] = []  # folders that `open` created, innermost first

    @classmethod
    def open(cls, path: str | Path, *, resume: bool = False) -> RunDirectory:
        """Create the folder, or with `resume` open an earlier run's. UserError if a run exists, or none to resume."""
        run = cls(path)
        try:
            if run.path.exists() and not run.path.is_dir():
                raise UserError(f"{run.path} is a file; choose another --run_dir")
            if resume and not run.config.is_file():
                raise UserError(f"{run.path} holds no run to resume (no config.yaml); start it without --resume")
            run._made = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
            run.path.mkdir(parents=True, exist_ok=True)
            known = (run.path / LOCK).is_file()  # of an earlier run
            run._lock = RunLock(run.path)
        except (OSError, ValueError) as error:  # ValueError: a null byte
            _remove_empty(run._made)
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot write {short_name(run.path)} ({reason}): choose another --run_dir") from error
        try:
            for folder in () if resume else run._began_only(known):
                shutil.rmtree(folder, ignore_errors=True)
        except UserError:
            run._lock.release()
            if not known:
                (run.path / LOCK).unlink(missing_ok=True)
            raise
        return run

    def close(self) -> None:
        """Release the folder to other processes."""
        if self._lock is not None:
            self._lock.release()

    def holds_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        return bool(saved_steps(self.checkpoints))

    def take_back(self) -> None:
        """Remove the folder if `open` created it."""
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)
            _remove_empty(self._made[1:])

    def _began_only(self, known: bool) -> tuple[Path, ...]:
        """Return the folders of a `known` run that never trained an iteration. UserError if data would be lost."""
        trained = max(saved_steps(self.checkpoints), default=0) or read_metrics(self.metrics)
        began = (self.start, self.checkpoints) if known and not trained else ()
        passing = {self.path / LOCK, *((self.config, self.log, self.prompts) if began else ())}
        for path in self.path.rglob("*"):
            reused = path in passing or {self.tensorboard, *began} & {*path.parents}
            if not reused and path.is_file() and path.stat().st_size:
                raise UserError(f"{self.path} is not empty; continue it with --resume or choose another --run_dir")
        return began

    def write_images(self, gallery: Sequence[GalleryEntry], episodes: Sequence[EpisodeEntry]) -> None:
        """Write the rendered pictures: images/000_before.png, 000_after.png, 000_turn_1.png, …."""
        drawn: dict[str, np.ndarray | None] = {}
        for index, entry in enumerate(gallery):
            drawn |= {f"{index:03d}_{name}": getattr(entry, name) for name in ("before", "between", "after")}
        for index, episode in enumerate(episodes):
            drawn |= {f"{index:03d}_turn_{number}": turn.image for number, turn in enumerate(episode.turns, 1)}
        for name, picture in drawn.items():
            if picture is not None:
                with disk_errors(self.images):
                    self.images.mkdir(exist_ok=True)
                write_atomically(self.images / f"{name}.png", png(picture))

    def write_completions(self, step: int, columns: Mapping[str, Sequence[object]]) -> None:
        """Write completions/step_00000N.parquet, one row per completion."""
        import pyarrow
        import pyarrow.parquet

        rows = len(next(iter(columns.values()), ()))
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table({"step": np.full(rows, step, np.int64), **columns}), sink)
        with disk_errors(self.completions):
            self.completions.mkdir(exist_ok=True)
        write_atomically(self.completions / f"step_{step:06d}.parquet", sink.getvalue().to_pybytes())

    def forget_completions(self, step: int) -> None:
        """Remove the completions of iterations after a checkpoint's step."""
        with disk_errors(self.completions):
            for path in self.completions.glob("step_*.parquet"):
                number = path.stem.removeprefix("step_")
                if number.isascii() and number.isdigit() and int(number) > step:
                    path.unlink()


class Output(nullcontext["Output"]):
    """A run's folder, terminal and files of metrics; of this class in processes other than 0, it writes nothing.

    `reports.output.RunOutput` writes.
    """

    def __init__(self, config: Config):
        """Define the run directory, without touching the disk."""
        super().__init__(self)
        self.directory = RunDirectory(str(config.run_dir))

    def truncate(self, step: int, *, rows: int | None = None) -> int:
        """Remove the output after a step; return the number of rows of metrics."""
        return step if rows is None else rows

    def info(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    warning = start = completions = iteration = finish = info


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, without a last line that a kill truncated."""
    return [row for _, row in _metrics(Path(path))]


def truncate_metrics(path: str | Path, step: int) -> None:
    """Truncate a metrics.jsonl to the rows up to a step, which stay byte for byte."""
    kept = [line + b"\n" for line, row in _metrics(Path(path)) if row["step"] <= step]
    if Path(path).is_file():
        write_atomically(path, b"".join(kept))


def _metrics(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield lines with their JSON objects."""
    if not path.is_file():
        return
    try:
        *lines, last = read_bytes(path, 2**32).split(b"\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate([*lines, last], 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.decode("utf-8", "replace"))
            if not isinstance(row.get("step"), int):
                raise ValueError("no step")
        except ValueError as error:
            if number > len(lines):
                return
            raise UserError(f"{path}, line {number}: not a row of metrics; fix or delete the line") from error
        yield line, row


def finite(value: object) -> Any:
    """Convert to strict JSON: plain numbers and lists, null for NaN and infinities, other values as texts."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and JAX, numbers and arrays
        return finite(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def saved_steps(checkpoints: Path) -> list[int]:
    """Return the steps in a folder of checkpoints, valid or damaged, in ascending order."""
    names = [path.name.removeprefix("step_") for path in checkpoints.glob("step_*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii() and str(int(name)) == name)


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError, ValueError):
        for folder in folders:
            folder.rmdir()
