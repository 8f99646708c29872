"""Checkpoints of a run, through Orbax: saved in the background, checked when read, restored exactly.

```
checkpoints/step_20, step_40, …   the last K, for --resume
checkpoints/best/version_3        the best by validation
checkpoints/final/version_1       the end of training
```

Each is written elsewhere, listed in a manifest with the checksums of its files and only then put in its place
(`series`); `best` and `final` are replaced by writing the next version and then deleting the previous one. So whatever
has a name is whole, and what a disk did to it later is noticed. Checkpoints of one step have their arrays' files in
common (`sharing`). What Orbax sees is nested dictionaries of arrays: the types of the state (optax's tuples, typed
keys, Python numbers) come back from the template, not from the file.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax

from grpo_jax.errors import UserError, shown
from grpo_jax.runs import directory
from grpo_jax.runs.checkpoint.disk_errors import first_line, is_disk_error
from grpo_jax.runs.checkpoint.echoes import silence
from grpo_jax.runs.checkpoint.manifest import find_damage
from grpo_jax.runs.checkpoint.series import Series
from grpo_jax.runs.checkpoint.sharing import bytes_held
from grpo_jax.runs.checkpoint.tree import EVALUATED, as_template, check_fits, items, leaves, plain, storable
from grpo_jax.runs.several.company import ALONE, Company

PyTree = Any
_NAMED = ("best", "final")


class _Gone(Exception):
    """A run that goes on removed the checkpoint that was being looked at; it has a newer one."""


class Checkpoints:
    """The checkpoints of one run.

    A state is a mapping of parts, one of them `"variables"` (what evaluation needs); each part is a pytree of
    `jax.Array`s (typed keys included), NumPy arrays and Python numbers. `meta` is whatever JSON can hold.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        keep_bytes: float = 0,
        read_only: bool = False,
        note: Callable[[str], None] = lambda text: None,
        pauses: Sequence[float] | None = None,
        company: Company = ALONE,
    ):
        """Opens a folder and removes what an interrupted write left in it.

        Args:
          folder: the `checkpoints` folder of a run; made if absent.
          keep: how many `step_N` checkpoints stay; older ones are deleted after a newer one is committed.
          keep_bytes: what all may take, `best` and `final` included; beyond it the oldest `step_N` are deleted, never
            the newest. 0 for no bound.
          read_only: for restoring alone: nothing is made or removed (another process may be writing).
          note: tells of a write that failed and is tried again.
          pauses: seconds before each further try; None for `runs.directory.PAUSES`.
          company: the processes of the run.

        Raises:
          UserError: the folder cannot be made or written, or is absent with `read_only`.
        """
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        silence()
        self.folder = Path(folder).absolute()
        self._read_only, self._note = read_only, note
        self._pauses = tuple(directory.PAUSES if pauses is None else pauses)
        self._keep_bytes = keep_bytes
        self._sound: set[Path] = set()
        self._held: tuple[int, Path] | None = None  # a step whose state is on the disk, and where
        if read_only and not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder; give the run directory of a training run")
        try:
            opened = partial(Series, read_only=read_only, committed=self._make_room, company=company)
            self._steps = opened(self.folder, "step", keep)
            self._named = {name: opened(self.folder / name, "version", 1) for name in _NAMED}
        except OSError as error:
            raise self._unwritable(error) from error

    def save(self, step: int, state: Mapping[str, PyTree], meta: dict, *, wait: bool = False) -> None:
        """Saves `step_<step>`, in the background unless `wait`. A saved step is not rewritten.

        A write that failed in the background is noted, and this one is waited for in its place.

        Raises:
          UserError: writing failed (full disk, permissions), also when it was tried again.
        """
        if step != self._steps.writing and step not in self._steps.numbers():
            self._write(self._steps, step, state, meta | {"step": step}, wait=wait)
        elif wait:
            self.wait()

    def save_best(self, step: int, state: Mapping[str, PyTree], meta: dict) -> None:
        """Replaces `best`; the previous one stays until this one is committed. It is when this returns."""
        self._save_named("best", step, state, meta)

    def save_final(self, step: int, state: Mapping[str, PyTree], meta: dict) -> None:
        """Replaces `final`; the previous one stays until this one is committed. It is when this returns."""
        self._save_named("final", step, state, meta)

    def latest_step(self) -> int | None:
        """The step that `restore("latest")` would continue from: of `step_N` and `final`; None if there is neither.

        Raises:
          UserError: there are some, and all are damaged.
        """
        found = self._as_it_stands(self._latest)
        return None if found is None else found[2]

    def set_aside_damaged(self) -> list[str]:
        """Takes those out of the way that are damaged and newer than the one that `restore("latest")` goes on from.

        Those before it are not read: nothing goes on from them.

        Returns:
          What is wrong with each, in a line; also with `best`.

        Raises:
          UserError: no sound one of `step_N` and `final` would remain.
        """
        damaged = self._as_it_stands(lambda: self._newest()[1] + self._first_sound(self._named["best"])[1])
        for series, number, _ in damaged:
            series.set_aside(number)
        return [f"{series.path(number)} is damaged ({why}) and was set aside" for series, number, why in damaged]

    def available(self) -> list[str]:
        """Names that can be restored, as they are written on the command line."""
        named = [name for name, series in self._named.items() if series.numbers()]
        return [*map(str, self._steps.numbers()), *named]

    def restore(self, which: int | str, template: Mapping[str, PyTree]) -> tuple[dict[str, PyTree], dict]:
        """Restores a whole state.

        Args:
          which: a step, or "latest", "best", "final".
          template: a state of the same structure; its shapes and dtypes must be those of the checkpoint, and
            each array is placed as the template's is.

        Returns:
          The state, of the template's types, and its meta (with `"step"`).

        Raises:
          UserError: there is no such checkpoint, it is damaged, or it does not fit the template.
        """

        def read(series, number):
            restored = {}
            for item, part in items(template).items():
                restored |= self._read(series, number, item, part)
            meta = self._meta(series, number)
            self._held = meta["step"], series.path(number)
            return {name: restored[name] for name in template}, meta

        return self._as_it_stands(lambda: read(*self._find(which)))

    def read_meta(self, which: int | str) -> dict:
        """The meta of a checkpoint alone (with `"step"`). Raises UserError as `restore` does."""
        return self._as_it_stands(lambda: self._meta(*self._find(which)))

    def restore_variables(self, which: int | str, template: PyTree = None) -> tuple[PyTree, dict]:
        """Restores the variables alone; without a template they go to the first device."""

        def read(series, number):
            if template is not None:
                part = {EVALUATED: template}
            else:
                place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
                saved = self._described(series, number, EVALUATED)
                part = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), saved)
            return self._read(series, number, EVALUATED, part)[EVALUATED], self._meta(series, number)

        return self._as_it_stands(lambda: read(*self._find(which)))

    def wait(self) -> None:
        """Waits for the write in the background. Raises UserError if it failed."""
        try:
            self._steps.wait()
        except Exception as error:
            if not is_disk_error(error):
                raise
            self._steps.clear()
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Waits for writes and ends the background threads."""
        try:
            self.wait()
        finally:
            for series in self._every():
                with suppress(Exception):  # of a write that failed, and was told already
                    series.close()

    def __enter__(self) -> "Checkpoints":
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes; what a write in the background raises does not take the place of the error that ends the run."""
        try:
            self.close()
        except UserError as error:
            if kind is None:
                raise
            self._note(str(error))

    def _save_named(self, name, step, state, meta):
        series = self._named[name]
        # versions count up whatever the step: a resumed run may find its best at an earlier step than before
        number = max(series.numbers(), default=0) + 1
        self._write(series, number, state, meta | {"step": step}, wait=True)

    def _write(self, series, number, state, meta, *, wait):
        if self._read_only:
            raise ValueError("these checkpoints were opened with read_only=True")
        trees = {item: storable(part) for item, part in items(state).items()}
        meta = json.loads(json.dumps(meta, default=plain))
        if self._shares(series, number, meta):
            return
        self._held = meta["step"], series.path(number)
        for pause in (*self._pauses, None):
            try:
                series.save(number, trees, meta)
                if wait:
                    series.wait()
                return
            except Exception as error:
                if not is_disk_error(error):
                    raise
                series.clear()
                if pause is None or not self.folder.is_dir():
                    raise self._unwritable(error) from error
                self._note(f"a checkpoint could not be written ({first_line(error)}); trying again in {pause:g} s")
            time.sleep(pause)
            wait = True

    def _shares(self, series, number, meta) -> bool:
        """Makes a checkpoint of a step whose arrays this object wrote or restored last, if it is, of their files."""
        if self._held is None or self._held[0] != meta["step"]:
            return False
        try:
            self._steps.wait()  # they may be on their way
            series.link(number, self._held[1], meta)
        except (OSError, UserError):  # then it is written in full
            return False
        return True

    def _make_room(self) -> None:
        for old in self._steps.numbers()[:-1] if self._keep_bytes else ():
            every = (series.path(number) for series in self._every() for number in series.numbers())
            if bytes_held(every) <= self._keep_bytes:
                return
            self._steps.remove(old)

    def _every(self) -> tuple[Series, ...]:
        return self._steps, *self._named.values()

    def _unwritable(self, error: BaseException) -> UserError:
        if not self._read_only and isinstance(error, FileNotFoundError) and not self.folder.is_dir():
            return UserError(f"{self.folder} is gone: it was deleted under the run, and nothing more can be saved")
        return UserError(
            f"cannot write a checkpoint to {self.folder} ({first_line(error)}); the checkpoints"
            " committed so far stay valid: make room or mend the permissions, then continue with --resume"
        )

    def _read(self, series, number, item, part):
        wanted = leaves(part)
        with self._reading(series, number):
            saved = series.described(number, item)
            check_fits(leaves(saved), wanted, series.path(number))
            found = leaves(series.read(number, item, part)) if saved else {}
        restored = [as_template(leaf, found[name]) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(part), restored)

    def _described(self, series, number, item):
        with self._reading(series, number):
            return series.described(number, item)

    def _meta(self, series, number):
        with self._reading(series, number):
            return series.read_meta(number)

    def _damage(self, series, number) -> str:
        """What is wrong with a checkpoint; it is looked at once, if nothing is."""
        path = series.path(number)
        if path in self._sound:
            return ""
        damage = find_damage(path) or self._misplaced(series, number)
        if not damage:
            self._sound.add(path)
        elif number not in series.numbers():
            raise _Gone
        return damage

    def _misplaced(self, series, number) -> str:
        """What is wrong with the step that a sound checkpoint says it is of; "" where nothing is."""
        step = self._meta(series, number).get("step")
        if not isinstance(step, int):
            return "its meta names no step"
        return "" if series is not self._steps or step == number else f"it was saved as that of step {step}"

    def _latest(self):
        """(series, number, step) of the furthest sound one of `step_N` and `final`; None if there is nothing."""
        return self._newest()[0]

    def _newest(self):
        """What `_latest` gives, and (series, number, what is wrong) of the damaged ones met on the way."""
        self.wait()
        found, damaged = [], []
        for series in (self._steps, self._named["final"]):
            number, met = self._first_sound(series)
            damaged += met
            if number is not None:
                found.append((series, number, number if series is self._steps else self._meta(series, number)["step"]))
        if damaged and not found:
            told = "; ".join(f"{series.path(number).name}: {why}" for series, number, why in damaged)
            raise UserError(
                f"every checkpoint in {self.folder} is damaged ({told[:160]}): copy the folder again from where it "
                "came, or start a new run in another --run_dir"
            )
        return max(found, key=lambda entry: entry[2], default=None), damaged

    def _first_sound(self, series):
        """The newest sound number of a series, or None; and (series, number, what is wrong) of those above it."""
        damaged = []
        for number in reversed(series.numbers()):
            damage = self._damage(series, number)
            if not damage:
                return number, damaged
            damaged.append((series, number, damage))
        return None, damaged

    def _as_it_stands(self, look):
        """What `look()` gives; once more where what it looked at was removed meanwhile."""
        while True:
            with suppress(_Gone):
                return look()

    def _find(self, which):
        """(series, number) of a sound checkpoint by name; waits for it if it is still being written."""
        self.wait()
        if which == "latest":
            found = self._latest()
            if found is not None:
                return found[:2]
        elif which in _NAMED:
            if numbers := self._named[which].numbers():
                return self._checked(self._named[which], numbers[-1], which)
        elif str(which).isascii() and str(which).isdigit():
            number = next((number for number in self._steps.numbers() if str(number) == str(which)), None)
            if number is not None:
                return self._checked(self._steps, number, which)
        else:
            raise UserError(f"checkpoint {shown(which)}: expected a step, latest, best or final")
        there = ", ".join(self.available())
        mend = f"there are: {there}" if there else "it holds none; the run has not come to its first checkpoint"
        raise UserError(f"no checkpoint {shown(str(which))} in {self.folder}: {mend}")

    def _checked(self, series, number, which):
        if damage := self._damage(series, number):
            others = [name for name in self.available() if name != str(which)]
            mend = f"there are: {', '.join(others)}" if others else "there is no other"
            raise UserError(f"{series.path(number)} is damaged ({damage}); {mend}")
        return series, number

    @contextmanager
    def _reading(self, series, number) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if number not in series.numbers():
                raise _Gone from error
            if isinstance(error, UserError):  # it can be, and does not fit
                raise
            raise UserError(f"{series.path(number)} cannot be read ({first_line(error)})") from error


def restore_params(run_dir: str | Path, which: int | str = "best", template: PyTree = None) -> tuple[PyTree, dict]:
    """Restores the policy's variables of a run for evaluation, without its optimizer.

    Args:
      run_dir: the run directory.
      which: a step, or "latest", "best", "final".
      template: variables whose placement is wanted; None puts every array on the first device.

    Returns:
      The variables and the checkpoint's meta.

    Raises:
      UserError: no such run or checkpoint.
    """
    with Checkpoints(Path(run_dir) / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.restore_variables(which, template)
