"""Checkpoints of a run, through Orbax: saved in the background, checked when read, restored exactly.

```
checkpoints/step_20, step_40, …   the last K, for --resume
checkpoints/best/version_3        the best by validation
checkpoints/final/version_1       the end of training
```

Each is written elsewhere, listed in a manifest with the checksums of its files and only then put in its place
(`series`); `best` and `final` are replaced by writing the next version and then deleting the previous one. So
whatever has a name is whole, and later damage is noticed. Checkpoints of one step share their arrays' files
(`series.link_files`). Orbax sees nested dictionaries of arrays: the types of the state (optax's tuples, typed keys,
Python numbers) come back from the template, not from the file.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from grpo_jax.errors import UserError, complain, one_line, short_repr
from grpo_jax.models.broadcast import broadcast, is_main_process, process_count
from grpo_jax.models.variables import PyTree
from grpo_jax.runs.directory import MAX_ATTEMPTS, retry_write
from grpo_jax.runs.progress import Record as Meta
from grpo_jax.runs.series import (
    EVALUATED,
    Series,
    as_template,
    check_fits,
    disk_usage,
    find_damage,
    items,
    leaves,
    storable,
)
from grpo_jax.runs.several import end_in_all

Result = TypeVar("Result")
_NAMED = ("best", "final")


class _Removed(Exception):
    """A running training replaced the checkpoint that was being read by a newer one."""


class _Entry(NamedTuple):
    series: Series
    number: int

    @property
    def path(self) -> Path:
        return self.series.path(self.number)


class Checkpoints:
    """The checkpoints of one run.

    A state is a mapping of parts, `"variables"` (for evaluation) among them; each part is a pytree of `jax.Array`s
    (typed keys included), NumPy arrays and Python numbers. `meta` is JSON.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        keep_bytes: float = 0,
        read_only: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ):
        """Open a folder, made if absent, and remove what an interrupted write left in it.

        Args:
            keep: Number of `step_N` checkpoints that stay; older ones are deleted after a newer one is committed.
            keep_bytes: Bound on all, `best` and `final` included: the oldest `step_N` but the newest go; 0 for none.
            read_only: Nothing is made or removed (another process may be writing).
            note: Called with the message of a failed write that is tried again.
        """
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        _silence_libraries()
        self.folder = Path(folder).absolute()
        self._read_only = read_only
        self._note = note
        self._keep_bytes = keep_bytes
        self._sound: set[Path] = set()
        self._stored: tuple[int, Path] | None = None  # a step whose state is on the disk, and where
        if read_only and not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder; give the run directory of a training run")
        try:
            opened = partial(Series, read_only=read_only, committed=self._make_room, failed=self._end)
            self._steps = opened(self.folder, "step", keep)
            self._named = {name: opened(self.folder / name, "version", 1) for name in _NAMED}
        except OSError as error:
            raise self._unwritable(error) from error

    def save(self, step: int, state: Mapping[str, PyTree], meta: Meta, *, wait: bool = False) -> None:
        """Save `step_<step>`, in the background unless `wait`; a saved step is not rewritten.

        After a write that failed in the background, this one is waited for. UserError if it fails as well.
        """
        if broadcast(step != self._steps.writing and step not in self._steps.numbers()):
            self._write(_Entry(self._steps, step), state, meta | {"step": step}, wait=wait)
        elif wait:
            self.wait()

    def save_best(self, step: int, state: Mapping[str, PyTree], meta: Meta) -> None:
        """Replace `best` and wait; the previous one stays until this one is committed."""
        self._save_named("best", step, state, meta)

    def save_final(self, step: int, state: Mapping[str, PyTree], meta: Meta) -> None:
        """Replace `final` and wait; the previous one stays until this one is committed."""
        self._save_named("final", step, state, meta)

    def latest_step(self) -> int | None:
        """Return the step that `restore("latest")` would continue from; None if there is none."""

        def look() -> int | None:
            entry = self._latest()[0]
            return None if entry is None else self._meta(entry)["step"]

        return broadcast(self._looking(look) if is_main_process() else None)

    def set_aside_damaged(self) -> list[str]:
        """Set aside damaged checkpoints that a resumed run would meet, and a damaged `best`; a line for each."""
        if not is_main_process():
            return []
        damaged = self._looking(lambda: self._latest()[1] + self._newest_sound(self._named["best"])[1])
        for entry, _ in damaged:
            entry.series.set_aside(entry.number)
        return [f"{entry.path} is damaged ({damage}) and was set aside" for entry, damage in damaged]

    def available(self) -> list[str]:
        """Return the names that can be restored, as written on the command line."""
        named = [name for name, series in self._named.items() if series.numbers()]
        return broadcast([*map(str, self._steps.numbers()), *named])

    def restore(self, which: int | str, template: Mapping[str, PyTree]) -> tuple[dict[str, PyTree], Meta]:
        """Restore a whole state, with the types and places of a template, and its meta (with `"step"`).

        `which` is a step, "latest", "best" or "final". UserError if it is absent, damaged, or does not fit.
        """

        def read() -> tuple[dict[str, PyTree], Meta]:
            entry = self._find_in_all(which)
            restored: dict[str, PyTree] = {}
            for item, part in items(template).items():
                restored |= self._read(entry, item, part)
            meta = broadcast(self._meta(entry) if is_main_process() else None)
            self._stored = meta["step"], entry.path
            return {name: restored[name] for name in template}, meta

        return self._looking(read)

    def read_meta(self, which: int | str) -> Meta:
        """Read a checkpoint's meta (with `"step"`). Raises UserError as `restore` does."""
        return broadcast(self._looking(lambda: self._meta(self._find(which))) if is_main_process() else None)

    def restore_variables(self, which: int | str, template: PyTree = None) -> tuple[PyTree, Meta]:
        """Restore the variables alone; without a template they go to the first device."""

        def read() -> tuple[PyTree, Meta]:
            entry = self._find(which)
            part = {EVALUATED: template}
            if template is None:
                sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
                with self._reading(entry):
                    saved = entry.series.described(entry.number, EVALUATED)
                part = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), saved)
            return self._read(entry, EVALUATED, part)[EVALUATED], self._meta(entry)

        return self._looking(read)

    def wait(self) -> None:
        """Block until the background write is done. Raises UserError if it failed."""
        try:
            self._steps.wait()
        except Exception as error:
            if not _is_disk_error(error):
                raise
            self._steps.clear()
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Wait for writes and end the background threads."""
        try:
            self.wait()
        finally:
            for series in (self._steps, *self._named.values()):
                with suppress(Exception):  # of a write that failed, and was reported already
                    series.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; a failed background write does not replace the error that ends the run."""
        try:
            self.close()
        except UserError as error:
            if kind is None:
                raise
            self._note(str(error))

    def _save_named(self, name: str, step: int, state: Mapping[str, PyTree], meta: Meta) -> None:
        series = self._named[name]
        # versions count up whatever the step: a resumed run may find its best at an earlier step than before
        number = broadcast(max(series.numbers(), default=0) + 1)
        self._write(_Entry(series, number), state, meta | {"step": step}, wait=True)

    def _write(self, entry: _Entry, state: Mapping[str, PyTree], meta: Meta, *, wait: bool) -> None:
        if self._read_only:
            raise ValueError("these checkpoints were opened with read_only=True")
        trees = {item: storable(part) for item, part in items(state).items()}
        meta = json.loads(json.dumps(meta, default=_plain))
        if broadcast(is_main_process() and self._link(entry, meta)):
            return
        self._stored = meta["step"], entry.path
        series, retrying = entry.series, False

        def write() -> None:
            try:
                series.save(entry.number, trees, meta)
                if wait or retrying:
                    series.wait()
            except Exception as error:
                if _is_disk_error(error):
                    series.clear()
                raise

        def may_pass(error: Exception) -> bool:
            return _is_disk_error(error) and self.folder.is_dir()

        def on_retry(error: Exception, pause: float) -> None:
            nonlocal retrying
            retrying = True
            self._note(f"a checkpoint could not be written ({_reason(error)}); trying again in {pause:g} s")

        try:
            # Of several processes one cannot begin again alone: they end, and the run is resumed.
            max_attempts = MAX_ATTEMPTS if process_count() == 1 else 1
            retry_write(write, may_pass=may_pass, on_retry=on_retry, max_attempts=max_attempts)
        except Exception as error:
            if not _is_disk_error(error):
                raise
            raise self._unwritable(error) from error

    def _link(self, entry: _Entry, meta: Meta) -> bool:
        """Link the files of the checkpoint written or restored last, if it is of the same step."""
        if self._stored is None or self._stored[0] != meta["step"]:
            return False
        try:
            self._steps.wait()  # they may be on their way
            entry.series.link(entry.number, self._stored[1], meta)
        except (OSError, UserError):  # then it is written in full
            return False
        return True

    def _make_room(self) -> None:
        if not self._keep_bytes:
            return
        for old in self._steps.numbers()[:-1]:
            every = (self._steps, *self._named.values())
            if disk_usage(series.path(number) for series in every for number in series.numbers()) <= self._keep_bytes:
                return
            self._steps.remove(old)

    def _end(self, error: BaseException) -> None:
        """End this process, one of several, whose background write has failed: the others wait for it at once."""
        told = self._unwritable(error) if _is_disk_error(error) else error
        if is_main_process():
            complain(f"error: {' '.join(str(told).split())}")
        end_in_all(told)
        os._exit(2 if isinstance(told, UserError) else 1)

    def _unwritable(self, error: BaseException) -> UserError:
        if not self._read_only and isinstance(error, FileNotFoundError) and not self.folder.is_dir():
            return UserError(f"{self.folder} is gone: it was deleted under the run, and nothing more can be saved")
        return UserError(
            f"cannot write a checkpoint to {self.folder} ({_reason(error)}); the checkpoints"
            " committed so far stay valid: make room or mend the permissions, then continue with --resume"
        )

    def _read(self, entry: _Entry, item: str, part: PyTree) -> PyTree:
        wanted = leaves(part)
        with self._reading(entry):
            saved = entry.series.described(entry.number, item)
            check_fits(leaves(saved), wanted, entry.path)
            arrays = leaves(entry.series.read(entry.number, item, part)) if saved else {}
        restored = [as_template(leaf, arrays[name]) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(part), restored)

    def _meta(self, entry: _Entry) -> Meta:
        with self._reading(entry):
            return entry.series.read_meta(entry.number)

    def _damage(self, entry: _Entry) -> str:
        if entry.path in self._sound:
            return ""
        damage = find_damage(entry.path) or self._misplaced(entry)
        if not damage:
            self._sound.add(entry.path)
        elif entry.number not in entry.series.numbers():
            raise _Removed
        return damage

    def _misplaced(self, entry: _Entry) -> str:
        step = self._meta(entry).get("step")
        if not isinstance(step, int):
            return "its meta names no step"
        same = entry.series is not self._steps or step == entry.number
        return "" if same else f"it was saved as that of step {step}"

    def _latest(self) -> tuple[_Entry | None, list[tuple[_Entry, str]]]:
        """Return the furthest sound one of `step_N` and `final`, and the damaged ones met on the way."""
        self.wait()
        sound: list[_Entry] = []
        damaged: list[tuple[_Entry, str]] = []
        for series in (self._steps, self._named["final"]):
            entry, newer = self._newest_sound(series)
            damaged += newer
            if entry is not None:
                sound.append(entry)
        if damaged and not sound:
            reasons = "; ".join(f"{entry.path.name}: {damage}" for entry, damage in damaged)
            raise UserError(
                f"every checkpoint in {self.folder} is damaged ({reasons[:160]}): copy the folder again from where it "
                "came, or start a new run in another --run_dir"
            )
        return max(sound, key=lambda entry: self._meta(entry)["step"], default=None), damaged

    def _newest_sound(self, series: Series) -> tuple[_Entry | None, list[tuple[_Entry, str]]]:
        """Return the newest sound checkpoint of a series, and the damaged ones that are newer."""
        damaged = []
        for number in reversed(series.numbers()):
            entry = _Entry(series, number)
            damage = self._damage(entry)
            if not damage:
                return entry, damaged
            damaged.append((entry, damage))
        return None, damaged

    def _looking(self, look: Callable[[], Result]) -> Result:
        """Return `look()`, repeated while its checkpoint was removed meanwhile."""
        while True:
            with suppress(_Removed):
                return look()

    def _find(self, which: int | str) -> _Entry:
        self.wait()
        name = str(which)
        entry = None
        if name == "latest":
            entry = self._latest()[0]
        elif name in _NAMED:
            series = self._named[name]
            entry = next((_Entry(series, number) for number in reversed(series.numbers())), None)
        elif name.isascii() and name.isdigit():
            entry = next((_Entry(self._steps, number) for number in self._steps.numbers() if str(number) == name), None)
        else:
            raise UserError(f"checkpoint {short_repr(which)}: expected a step, latest, best or final")
        if entry is None:
            names = ", ".join(self.available())
            mend = f"there are: {names}" if names else "it holds none; the run has not come to its first checkpoint"
            raise UserError(f"no checkpoint {short_repr(name)} in {self.folder}: {mend}")
        if damage := self._damage(entry):
            others = [other for other in self.available() if other != name]
            mend = f"there are: {', '.join(others)}" if others else "there is no other"
            raise UserError(f"{entry.path} is damaged ({damage}); {mend}")
        return entry

    def _find_in_all(self, which: int | str) -> _Entry:
        """Find a checkpoint as process 0 finds it."""
        every = [self._steps, *self._named.values()]
        entry = self._find(which) if is_main_process() else None
        place, number = broadcast(None if entry is None else [every.index(entry.series), entry.number])
        return _Entry(every[place], number)

    @contextmanager
    def _reading(self, entry: _Entry) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if entry.number not in entry.series.numbers():
                raise _Removed from error
            if isinstance(error, UserError):  # it can be, and does not fit
                raise
            raise UserError(f"{entry.path} cannot be read ({_reason(error)})") from error


def restore_params(run_dir: str | Path, which: int | str = "best", template: PyTree = None) -> tuple[PyTree, Meta]:
    """Restore a run's variables ("latest", "best", "final" or a step), and the checkpoint's meta."""
    with Checkpoints(Path(run_dir) / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.restore_variables(which, template)


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return np.asarray(value).tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"meta: {type(value).__name__} cannot be written as JSON")


def _is_disk_error(error: BaseException) -> bool:
    """Return whether a write failed for the machine's reasons; tensorstore reports those as ValueError."""
    text = str(error)
    return isinstance(error, OSError) or "OS error" in text or "os_error_code" in text or "No space left" in text


def _reason(error: BaseException) -> str:
    """Return the system's own words for a disk error, or the first line of any other."""
    text = str(error)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.EFBIG, errno.ENOMEM):
        if os.strerror(code) in text:
            return os.strerror(code)
    return one_line(error, 80)


_LATE = "Event loop is closed"  # tensorstore tells a loop that has ended of a write that failed beside another


def _silence_libraries() -> None:
    """Silence what Orbax and tensorstore print of errors that they also raise."""
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    if not getattr(sys.excepthook, "__grpo_jax__", False):
        sys.excepthook = _without_late_errors(sys.excepthook)
        sys.unraisablehook = _without_late_errors(sys.unraisablehook)
        threading.excepthook = _without_late_errors(threading.excepthook)


def _without_late_errors(hook: Callable[..., object]) -> Callable[..., object]:
    def called(*arguments: PyTree) -> None:
        error = arguments[1] if len(arguments) == 3 else arguments[0].exc_value
        if not (isinstance(error, RuntimeError) and str(error) == _LATE):
            hook(*arguments)

    called.__grpo_jax__ = True  # pyright: ignore[reportFunctionMemberAccess]
    return called
