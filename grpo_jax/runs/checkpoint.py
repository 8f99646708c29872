"""Checkpoints of a run, through Orbax: saved in the background, committed by a rename, restored exactly.

```
checkpoints/step_20, step_40, …   the last K, for --resume
checkpoints/best/version_3        the best by validation
checkpoints/final/version_1       the end of training
```

`best` and `final` are replaced by writing the next version and only then deleting the previous one, so each
of them is whole at any moment. What Orbax sees is nested dictionaries of arrays: the types of the state
(optax's tuples, typed keys, Python numbers) come back from the template, not from the file.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from grpo_jax.errors import UserError
from grpo_jax.runs.checkpoint_tree import EVALUATED, as_template, check_fits, items, leaves, plain, storable, target

PyTree = Any


class Checkpoints:
    """The checkpoints of one run.

    A state is a mapping of parts, one of them `"variables"` (what evaluation needs); each part is a pytree of
    `jax.Array`s (typed keys included), NumPy arrays and Python numbers. `meta` is whatever JSON can hold.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, read_only: bool = False):
        """Opens a folder and removes what an interrupted write left in it.

        Args:
          folder: the `checkpoints` folder of a run; made if absent.
          keep: how many `step_N` checkpoints stay; older ones are deleted after a newer one is committed.
          read_only: open for restoring only: nothing is made or removed (another process may be writing).

        Raises:
          UserError: the folder cannot be made or written, or is absent with `read_only`.
        """
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs tracebacks of errors it also raises
        self.folder = Path(folder).absolute()
        self._read_only = read_only
        if read_only and not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder; give the run directory of a training run")
        with self._writing():
            self._steps = _open(self.folder, "step", keep, read_only)
            self._named = {
                name: _open(self.folder / name, "version", 1, read_only)
                for name in ("best", "final")
                if not read_only or (self.folder / name).is_dir()
            }

    def save(self, step: int, state: Mapping[str, PyTree], meta: dict, *, wait: bool = False) -> None:
        """Saves `step_<step>`, in the background unless `wait`. A saved step is not rewritten.

        Raises:
          UserError: this write, or an earlier one still in the background, failed (full disk, permissions).
        """
        if step not in self._steps.all_steps():
            self._write(self._steps, step, state, meta | {"step": step})
        if wait:
            self.wait()

    def save_best(self, step: int, state: Mapping[str, PyTree], meta: dict, *, wait: bool = False) -> None:
        """Replaces `best`; the previous one stays until this one is committed."""
        self._save_named("best", step, state, meta, wait)

    def save_final(self, step: int, state: Mapping[str, PyTree], meta: dict, *, wait: bool = True) -> None:
        """Replaces `final`; the previous one stays until this one is committed."""
        self._save_named("final", step, state, meta, wait)

    def latest_step(self) -> int | None:
        """The step that `restore("latest")` would continue from: of `step_N` and `final`; None if neither."""
        self.wait()
        found = self._latest()
        return None if found is None else found[2]

    def available(self) -> list[str]:
        """Names that can be restored, as they are written on the command line."""
        steps = [str(step) for step in sorted(self._steps.all_steps())]
        return steps + [name for name, manager in self._named.items() if manager.latest_step() is not None]

    def restore(self, which: int | str, template: Mapping[str, PyTree]) -> tuple[dict[str, PyTree], dict]:
        """Restores a whole state.

        Args:
          which: a step, or "latest", "best", "final".
          template: a state of the same structure; its shapes and dtypes must be those of the checkpoint, and
            each array is placed as the template's is.

        Returns:
          The state, of the template's types, and its meta (with `"step"`).

        Raises:
          UserError: there is no such checkpoint, it cannot be read, or it does not fit the template.
        """
        manager, number = self._find(which)
        restored = {}
        for item, part in items(template).items():
            restored |= self._read(manager, number, item, part)
        return {name: restored[name] for name in template}, self._meta(manager, number)

    def read_meta(self, which: int | str) -> dict:
        """The meta of a checkpoint alone (with `"step"`). Raises UserError as `restore` does."""
        return self._meta(*self._find(which))

    def restore_variables(self, which: int | str, template: PyTree = None) -> tuple[PyTree, dict]:
        """Restores the variables alone; without a template they go to the first device."""
        manager, number = self._find(which)
        if template is not None:
            part = {EVALUATED: template}
        else:
            place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            saved = self._metadata(manager, number, EVALUATED)
            part = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), saved)
        return self._read(manager, number, EVALUATED, part)[EVALUATED], self._meta(manager, number)

    def wait(self) -> None:
        """Waits for writes in the background. Raises UserError if one failed."""
        with self._writing():
            for manager in (self._steps, *self._named.values()):
                manager.wait_until_finished()

    def close(self) -> None:
        """Waits for writes and ends the background threads."""
        try:
            self.wait()
        finally:
            for manager in (self._steps, *self._named.values()):
                manager.close()

    def __enter__(self) -> "Checkpoints":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def _save_named(self, name, step, state, meta, wait):
        manager = self._named[name]
        # versions count up whatever the step: a resumed run may find its best at an earlier step than before
        self._write(manager, (manager.latest_step() or 0) + 1, state, meta | {"step": step})
        if wait:
            self.wait()

    def _write(self, manager, number, state, meta):
        if self._read_only:
            raise ValueError("these checkpoints were opened with read_only=True")
        parts = {item: storable(part) for item, part in items(state).items()}
        args = {item: ocp.args.StandardSave(part) for item, part in parts.items() if part}
        meta = json.loads(json.dumps(meta, default=plain))
        with self._writing():
            manager.save(number, args=ocp.args.Composite(**args, meta=ocp.args.JsonSave(meta)))

    def _read(self, manager, number, item, part):
        saved = self._metadata(manager, number, item)
        check_fits(leaves(saved), leaves(part), _path(manager, number))
        if not saved:
            return part
        with self._reading(manager, number):
            args = ocp.args.Composite(**{item: ocp.args.StandardRestore(target(part))})
            found = leaves(manager.restore(number, args=args)[item])
        restored = [as_template(leaf, found[name]) for name, leaf in leaves(part).items()]
        return jax.tree.unflatten(jax.tree.structure(part), restored)

    def _metadata(self, manager, number, item):
        with self._reading(manager, number):
            metadata = manager.item_metadata(number).get(item)
        tree = getattr(metadata, "tree", metadata)
        return {} if tree is None else tree

    def _meta(self, manager, number):
        with self._reading(manager, number):
            return manager.restore(number, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def _latest(self):
        """(manager, number, step) of the furthest of `step_N` and `final`, or None."""
        found = []
        if (step := self._steps.latest_step()) is not None:
            found.append((self._steps, step, step))
        final = self._named.get("final")
        if final is not None and (version := final.latest_step()) is not None:
            found.append((final, version, self._meta(final, version)["step"]))
        return max(found, key=lambda entry: entry[2], default=None)

    def _find(self, which):
        """(manager, number) of a checkpoint by name; waits for it if it is still being written."""
        self.wait()
        if which == "latest":
            found = self._latest()
            if found is not None:
                return found[:2]
        elif which in ("best", "final"):
            manager = self._named.get(which)
            if manager is not None and manager.latest_step() is not None:
                return manager, manager.latest_step()
        elif str(which).isdigit():
            if int(which) in self._steps.all_steps():
                return self._steps, int(which)
        else:
            raise UserError(f"checkpoint {which!r}: expected a step, latest, best or final")
        there = ", ".join(self.available())
        mend = f"there are: {there}" if there else "it holds none; the run was stopped before its first checkpoint"
        raise UserError(f"no checkpoint {str(which)!r} in {self.folder}: {mend}")

    @contextmanager
    def _reading(self, manager, number) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{_path(manager, number)} cannot be read, it is damaged ({_first_line(error)});"
                f" there are: {', '.join(self.available())}"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns a failed write into a UserError, and makes the managers forget it."""
        try:
            yield
        except Exception as error:
            if not _is_disk_error(error):
                raise
            self._forget_failed_writes()
            raise UserError(
                f"cannot write a checkpoint to {self.folder} ({_first_line(error)}); the checkpoints"
                " committed so far stay valid: make room or mend the permissions, then continue with --resume"
            ) from error

    def _forget_failed_writes(self):
        managers = [getattr(self, "_steps", None), *getattr(self, "_named", {}).values()]
        for manager in filter(None, managers):
            try:
                manager.wait_until_finished()
            except Exception as error:
                if not _is_disk_error(error):
                    raise
            _remove_temporary(manager.directory)
            manager.reload()


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


def _open(folder, prefix, keep, read_only):
    if not read_only:
        _remove_temporary(folder)  # Orbax's own cleaning spares folders killed before their first file
    options = ocp.CheckpointManagerOptions(
        max_to_keep=None if read_only else keep,
        step_prefix=prefix,
        create=not read_only,
        cleanup_tmp_directories=not read_only,
        read_only=read_only,
    )
    handlers = {
        EVALUATED: ocp.StandardCheckpointHandler(),
        "training": ocp.StandardCheckpointHandler(),
        "meta": ocp.JsonCheckpointHandler(),
    }
    return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)


def _remove_temporary(folder) -> None:
    for left in Path(folder).glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(left, ignore_errors=True)


def _path(manager, number) -> Path:
    folder = Path(manager.directory)
    return folder / f"{'version' if folder.name in ('best', 'final') else 'step'}_{number}"


def _is_disk_error(error: BaseException) -> bool:
    """Whether a write failed for the machine's reasons; tensorstore reports those as ValueError."""
    text = str(error)
    return isinstance(error, OSError) or "os_error_code" in text or "No space left" in text


def _first_line(error: BaseException) -> str:
    text = str(error)
    for known in (
        "No space left on device",
        "Permission denied",
        "Read-only file system",
        "Disk quota exceeded",
    ):
        if known in text:
            return known
    line = (text.strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else line[:200] + "…"
