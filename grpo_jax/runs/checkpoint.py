"""Checkpoints of a run with Orbax's CheckpointManager: saved in the background, verified, restored exactly.

The arrays are the trained weights, the optimizer's moments and counts, the reference and the rollout weights
(`training.state.saved_parts`), and those of a trained renderer; the metadata is a `Progress`. A resume is exact, since
everything else depends only on (seed, iteration).

Orbax commits a step by a rename. A name is a link that is replaced atomically after its step is committed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from grpo_jax.errors import UserError, complain, short_repr
from grpo_jax.models.broadcast import announce_exit, broadcast, from_main_process, is_main_process, process_count
from grpo_jax.models.variables import PyTree
from grpo_jax.runs.directory import disk_errors, disk_reason, saved_steps
from grpo_jax.runs.session import Record as Meta

EVALUATED = "variables"
"""The part of a state that evaluation needs; stored apart, so that it is read alone."""
DRAWING = "renderer"
"""The part of a state with the trained renderer, if there is one; it too is stored apart."""
MANIFEST = "checkpoint.json"
"""Step, metadata and digests of a checkpoint's files: Orbax notices damage to its trees' nodes, not to arrays."""
_UNLISTED = (MANIFEST, "_CHECKPOINT_METADATA", "commit_success.txt")  # Orbax writes the last two after the manifest
_NAMES = ("best", "final")
_REMOVAL_SECONDS = 1.0

Result = TypeVar("Result")


class Checkpoints:
    """The checkpoints of one run.

    A state is a mapping of parts, including `"variables"` for evaluation. Each part is a pytree of `jax.Array`s, NumPy
    arrays and Python numbers. Metadata is JSON. All processes must call each method together.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        read_only: bool = False,
        warning: Callable[[str], None] = lambda text: None,
    ):
        """Open a folder, created if missing, and remove the remains of an interrupted write.

        Named steps stay, and the latest `keep` others. `read_only` creates and removes nothing, since another process
        may be writing. `warning` gets a line for each damaged checkpoint set aside and each failed background write.
        """
        for library in ("absl", "asyncio"):  # they log errors that they also raise
            logging.getLogger(library).setLevel(logging.CRITICAL + 1)
        self.folder = Path(folder).absolute()
        self._read_only, self._warning = read_only, warning
        self._sound: set[Path] = set()
        self._writing: dict[str, Any] = {}  # "step" and "meta" of the background write
        if read_only and not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder; give the run directory of a training run")
        if read_only:
            return
        options = ocp.CheckpointManagerOptions(
            step_prefix="step",
            preservation_policy=_Preserved(keep, self),
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._seal,
                barrier_sync_fn=self._meet if process_count() > 1 else None,
            ),
        )
        with disk_errors(self.folder):
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=_handlers())

    def save(self, step: int, state: Mapping[str, PyTree], meta: Meta, *, wait: bool = False) -> None:
        """Save a step, in the background unless `wait`; if it exists, replace only its metadata.

        This also repairs a failed background write. UserError if that fails too.
        """
        assert not self._read_only
        meta = json.loads(json.dumps(meta, default=lambda value: np.asarray(value).tolist()))
        trees = {item: ocp.args.StandardSave(jax.tree.map(_array, tree)) for item, tree in _items(state).items()}
        path = self.folder / f"step_{step}"
        with disk_errors(self.folder):
            try:
                self._manager.wait_until_finished()  # raises the error of the previous write
            except (OSError, ValueError) as error:
                if process_count() > 1:  # one of several processes cannot write alone
                    raise
                self._warning(f"a checkpoint could not be written ({disk_reason(error)}); writing the next")
                self._remove_remains()
                self._manager.reload()
                wait = True
            self.folder.stat()  # raises if it was deleted; Orbax would create it again
            self._writing = {"step": step, "meta": meta}
            if broadcast(not path.is_dir()):
                self._manager.save(step, args=ocp.args.Composite(**trees), force=True)
            elif is_main_process():
                write_manifest(path, read_manifest(path) | self._writing)
            if wait:
                self._manager.wait_until_finished()

    def save_as(self, name: str, step: int, state: Mapping[str, PyTree], meta: Meta) -> None:
        """Save a step like `save`, wait, and name it "best" or "final"."""
        self.save(step, state, meta, wait=True)
        if not is_main_process():
            return
        target, link = self.folder / name, self.folder / f".{name}"
        with disk_errors(self.folder):
            link.unlink(missing_ok=True)
            link.symlink_to(f"step_{step}")
            if target.is_dir() and not target.is_symlink():  # a copy of the folder may have followed links
                shutil.rmtree(target)
            os.replace(link, target)

    def latest_step(self) -> int | None:
        """Return the newest valid step, or None. Damaged newer steps are set aside unless read-only."""
        return from_main_process(self._latest)

    def available(self) -> list[str]:
        """Return the names that can be restored, as on the command line."""
        return broadcast(self._available())

    def restore(self, which: int | str, template: Mapping[str, PyTree]) -> tuple[dict[str, PyTree], Meta]:
        """Restore a state with the dtypes and shardings of a template, and its meta (with `"step"`).

        `which` is a step, "latest", "best" or "final". A template of only the variables reads only these. UserError if
        the checkpoint is missing, damaged, or does not match.
        """

        def read(path: Path) -> tuple[dict[str, PyTree], Meta]:
            with closing(ocp.Checkpointer(ocp.CompositeCheckpointHandler(**_handlers()))) as reader:
                saved, wanted = reader.metadata(path).item_metadata or {}, _items(template)
                for item, tree in wanted.items():
                    _require_fits(getattr(saved.get(item), "tree", None), tree, path)
                args = {item: ocp.args.StandardRestore(jax.tree.map(_array, tree)) for item, tree in wanted.items()}
                restored = reader.restore(path, args=ocp.args.Composite(**args))
            items = {item: jax.tree.map(_as_template, tree, restored[item]) for item, tree in wanted.items()}
            return {**template, **dict(ChainMap(*items.values()))}, _meta(path)

        return self._reading(which, read)

    def read_meta(self, which: int | str) -> Meta:
        """Read a checkpoint's meta (with `"step"`). Raises UserError like `restore`."""
        return self._reading(which, _meta)

    def wait(self) -> None:
        """Wait for the background write. Raises UserError if it failed."""
        if not self._read_only:
            with disk_errors(self.folder):
                self._manager.wait_until_finished()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait, and end Orbax's threads; a failed write does not hide the error that ends the run."""
        if self._read_only:
            return
        try:
            with suppress(UserError) if kind else nullcontext():
                self.wait()
        finally:
            with suppress(Exception):  # a failed write has been reported
                self._manager.close()
            self._remove_remains()

    def _named_step(self, name: str) -> int | None:
        """Return the step of a name, if its manifest can be read."""
        with suppress(UserError):
            return read_manifest(self.folder / name)["step"]
        return None

    def _available(self) -> list[str]:
        return [*map(str, saved_steps(self.folder)), *(name for name in _NAMES if self._named_step(name) is not None)]

    def _damage(self, path: Path) -> str:
        """Return the first difference from the written checkpoint; "" if there is none."""
        damage = "" if path in self._sound else find_damage(path)
        if not damage:
            self._sound.add(path)
        return damage

    def _latest(self) -> int | None:
        self.wait()
        damaged, steps = {}, saved_steps(self.folder)
        for path in (self.folder / f"step_{step}" for step in reversed(steps)):
            damage = self._damage(path)
            if not damage:
                self._set_aside(damaged)
                return int(path.name.removeprefix("step_"))
            if saved_steps(self.folder) != steps:  # a training process has removed it, after a newer one
                return self._latest()
            damaged[path] = damage
        if damaged:
            reasons = "; ".join(f"{path.name}: {damage}" for path, damage in damaged.items())
            raise UserError(
                f"every checkpoint in {self.folder} is damaged ({reasons[:160]}): copy the folder again from where it "
                "came, or start a new run in another --run_dir"
            )
        return None

    def _set_aside(self, damaged: dict[Path, str]) -> None:
        """Move damaged steps, and a damaged "best", out of the steps."""
        if self._read_only:
            return
        best = (self.folder / "best").resolve()
        if "best" in self._available() and (damage := self._damage(best)):
            damaged[best] = damage
        for path, damage in damaged.items():
            aside = path.with_name(f"damaged_{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            self._warning(f"{path} is damaged ({damage}) and was set aside as {aside.name}")
        self._manager.reload()

    def _find(self, which: int | str) -> str:
        """Return the folder name of a valid checkpoint."""
        self.wait()
        name = str(which)
        if name not in ("latest", *_NAMES) and not (name.isascii() and name.isdigit()):
            raise UserError(f"checkpoint {short_repr(which)}: expected a step, latest, best, final or start")
        chosen, available = str(self._latest()) if name == "latest" else name, self._available()
        if chosen not in available:
            fix = f"there are: {', '.join(available)}" if available else "the run has not come to its first checkpoint"
            raise UserError(f"no checkpoint {short_repr(name)} in {self.folder}: {fix}")
        path = (self.folder / (chosen if chosen in _NAMES else f"step_{chosen}")).resolve()
        damage = self._damage(path)
        if damage:
            others = ", ".join(other for other in available if other != chosen) or "no other"
            raise UserError(f"{path} is damaged ({damage}); there are: {others}")
        return path.name

    def _reading(self, which: int | str, read: Callable[[Path], Result], *, again: bool = True) -> Result:
        """Find and read a checkpoint; try twice beside a training process, which may remove it meanwhile."""
        path = self.folder
        try:
            path /= from_main_process(lambda: self._find(which))
            return read(path)
        except Exception as error:
            if self._read_only and again:
                return self._reading(which, read, again=False)
            if isinstance(error, UserError):  # it is missing, or does not match
                raise
            raise UserError(f"{path} cannot be read ({disk_reason(error)})") from error

    def _seal(self) -> None:
        """Write the manifest of a step before its commit; Orbax calls this before the rename."""
        (written,) = self.folder.glob(f"step_{self._writing['step']}.orbax-checkpoint-tmp*")
        write_manifest(written, self._writing)

    def _meet(self, key: str, timeout_ms: int) -> None:
        """Wait for the other processes in Orbax's thread; after a failed write end, or they would wait for minutes."""
        if error := sys.exc_info()[1]:
            complain(f"error: process {jax.process_index()}: cannot write a checkpoint ({disk_reason(error)})")
            announce_exit()
            os._exit(2)
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _remove_remains(self) -> None:
        """Remove the remains of an interrupted write, to which threads of Orbax may still add for a moment."""
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while is_main_process() and (remains := [*self.folder.glob("step_*.orbax-checkpoint-tmp*")]):
            for folder in remains:
                shutil.rmtree(folder, ignore_errors=True)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


@dataclass
class _Preserved(PreservationPolicy):
    """Keeps named steps, and the newest others."""

    keep: int
    checkpoints: Checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        named = {*map(self.checkpoints._named_step, _NAMES)}
        kept = named | {*sorted({*steps} - named)[-self.keep :]}
        return [step in kept for step in steps]


def _handlers() -> dict[str, Any]:
    return {item: ocp.StandardCheckpointHandler() for item in (EVALUATED, DRAWING, "training")}


def _items(state: Mapping[str, PyTree]) -> dict[str, dict[str, PyTree]]:
    """Split a state into Orbax items: the variables, a trained renderer, and all other parts."""
    apart = {name: {name: state[name]} for name in (EVALUATED, DRAWING) if name in state}
    rest = {name: part for name, part in state.items() if name not in apart}
    return apart | ({"training": rest} if jax.tree.leaves(rest) else {})


def _meta(path: Path) -> Meta:
    content = read_manifest(path)
    return {**content["meta"], "step": content["step"]}


def _array(leaf: PyTree) -> PyTree:
    return leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else np.array(leaf)  # copy: it is written later


def _as_template(leaf: PyTree, restored: PyTree) -> PyTree:
    """Convert a restored array to its template's form: Python number, uncommitted array."""
    if isinstance(leaf, bool | int | float):
        return type(leaf)(np.asarray(restored).item())
    # an uncommitted array stays uncommitted
    return restored if getattr(leaf, "committed", True) else jnp.asarray(np.asarray(restored))


def _require_fits(saved: PyTree, wanted: PyTree, where: Path) -> None:
    """Raise UserError naming the first leaf with another shape or dtype, or missing on one side."""

    def described(tree: PyTree) -> dict[str, str]:
        named = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            array = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
            named[jax.tree_util.keystr(path, simple=True, separator=".")] = f"{array.dtype}{list(array.shape)}"
        return named

    stored, expected = described(saved), described(wanted)
    for name in dict.fromkeys([*expected, *stored]):
        if expected.get(name) != stored.get(name):
            raise UserError(
                f"{where} does not fit this configuration: {name} is {stored.get(name, 'absent')} in the checkpoint, "
                f"{expected.get(name, 'absent')} is expected; use the config.yaml that lies beside it"
            )


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write a manifest with a digest of each file, unless `content` has them, and flush it to disk."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in _UNLISTED]
    content = {"files": {str(path.relative_to(folder)): _digest(path) for path in paths}} | content
    temporary = folder / f".{MANIFEST}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({**content, "sha256": _own_digest(content)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest: "step", "meta", "files". Raises UserError if it is damaged."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if content.pop("sha256") == _own_digest(content):
            return content
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise UserError(f"{MANIFEST} is missing or damaged")


def find_damage(folder: Path) -> str:
    """Describe the first difference from the manifest; "" if there is none."""
    try:
        content = read_manifest(folder)
        if folder.name.startswith("step_") and folder.name != f"step_{content['step']}":
            return f"it was saved as step {content['step']}"
        for name, digest in content["files"].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _digest(folder / name) != digest:
                return f"{name} differs from its digest"
    except (UserError, OSError) as error:
        return str(error)
    return ""


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
