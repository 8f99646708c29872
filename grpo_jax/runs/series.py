"""Numbered checkpoints of one kind in a folder: `step_20`, `step_40`, …; each whole or not there.

Orbax writes a checkpoint under `.writing/`, in the background; then its files are listed in a manifest, and a rename
gives it its place. Older ones go only after that. Where another checkpoint holds the same arrays, `link` takes its
files. Trees are stored as nested dictionaries of arrays, whatever types they had.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from grpo_jax.config.build import nested
from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError
from grpo_jax.models.broadcast import is_main_process, meet, process_count, together
from grpo_jax.models.variables import PyTree
from grpo_jax.runs.progress import Record

_WRITING, _META = ".writing", "meta.json"


class Series:
    """Checkpoints `prefix_N` of a folder, of which the newest `keep` stay."""

    def __init__(
        self,
        folder: Path,
        prefix: str,
        keep: int,
        *,
        read_only: bool,
        committed: Callable[[], None] = lambda: None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ):
        """Open a series' own folder, which may hold other series' folders, and remove what an interrupted write left.

        With `read_only` nothing is made or removed. The writing thread calls `committed` when a checkpoint has its
        place, and in a run of several processes `failed` with the error of a write.
        """
        self.folder = folder
        self.writing: int | None = None  # the number of the write in the background
        self._prefix = prefix
        self._keep = keep
        self._committed = committed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failed = failed
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        if not read_only and is_main_process():
            folder.mkdir(parents=True, exist_ok=True)
            self.clear()

    def clear(self) -> None:
        """Remove what an interrupted write left."""
        shutil.rmtree(self.folder / _WRITING, ignore_errors=True)

    def path(self, number: int) -> Path:
        """Return where a checkpoint lies."""
        return self.folder / f"{self._prefix}_{number}"

    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints that are there, sound or damaged, rising."""
        if not self.folder.is_dir():
            return []
        pattern = re.compile(rf"{self._prefix}_(0|[1-9][0-9]{{0,17}})")
        matches = (pattern.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def save(self, number: int, trees: Mapping[str, PyTree], meta: Mapping[str, object]) -> None:
        """Copy the arrays and write them in the background; errors of Orbax or the system come here or in `wait`.

        Each of several processes writes its parts, and process 0 gives the checkpoint its place.
        """
        written = self._start_writing(number)
        with together("checkpoint"):
            meet()  # what an interrupted write left is gone
            args = {name: ocp.args.StandardSave(tree) for name, tree in trees.items() if tree}
            self._opened().save(written, args=ocp.args.Composite(**args))
        self.writing = number
        arguments = (written, number, json.dumps(meta))
        self._thread = threading.Thread(target=self._commit, args=arguments, name="commit", daemon=True)
        self._thread.start()

    def link(self, number: int, source: Path, meta: Mapping[str, object]) -> None:
        """Make a checkpoint of the same array files as another one, with its own meta, at once."""
        written = self._start_writing(number)
        listed = {name: entry for name, entry in entries(source).items() if name != _META}
        link_files(listed, source, written)
        self._put_in_place(written, number, json.dumps(meta), listed)

    def wait(self) -> None:
        """Wait for the write in the background; raises its error once."""
        if self._thread is not None:
            with together("checkpoint"):
                self._thread.join()
            self._thread = self.writing = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def remove(self, number: int) -> None:
        """Remove a checkpoint, as far as the system lets it: its name at once, so that none is half there."""
        removed = self.folder / _WRITING / f"removed_{number}"
        with suppress(OSError):
            removed.parent.mkdir(exist_ok=True)
            self.path(number).rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def set_aside(self, number: int) -> None:
        """Take a damaged checkpoint out of the series: `step_20.damaged`."""
        aside = self.path(number).with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        self.path(number).rename(aside)

    def read(self, number: int, item: str, template: PyTree) -> PyTree:
        """Read a tree of a checkpoint in shapes and places of `template`, the parts of it that this process holds."""
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(target(template))})
        with together("checkpoint"), closing(ocp.Checkpointer(handler())) as reader:
            return reader.restore(self.path(number), args=args)[item]

    def read_meta(self, number: int) -> Record:
        """Read the meta of a checkpoint."""
        return load_json(self.path(number) / _META)

    def described(self, number: int, item: str) -> PyTree:
        """Return shapes and dtypes of a tree of a checkpoint; {} where it holds none."""
        with closing(ocp.Checkpointer(handler())) as reader:
            metadata = (reader.metadata(self.path(number)).item_metadata or {}).get(item)
        tree = getattr(metadata, "tree", metadata)
        return {} if tree is None else tree

    def close(self) -> None:
        """Wait for the write in the background and end Orbax's threads."""
        try:
            self.wait()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()

    def _start_writing(self, number: int) -> Path:
        self.wait()
        if is_main_process():
            if not self.folder.is_dir():
                raise FileNotFoundError(f"{self.folder} is gone")
            self.clear()
        return self.folder / _WRITING / self.path(number).name

    def _commit(self, written: Path, number: int, meta: str) -> None:
        try:
            self._opened().wait_until_finished()
            if is_main_process():
                self._put_in_place(written, number, meta)
        except BaseException as error:
            self._error = error
            if process_count() > 1:  # the others wait for it
                self._failed(error)

    def _put_in_place(self, written: Path, number: int, meta: str, listed: Mapping[str, object] | None = None) -> None:
        (written / _META).write_text(meta, encoding="utf-8")
        seal(written, listed)
        os.rename(written, self.path(number))
        _sync(self.folder)
        for old in self.numbers()[: -self._keep]:
            if old != number:
                self.remove(old)
        self._committed()

    def _opened(self) -> ocp.AsyncCheckpointer:
        if self._checkpointer is None:
            self._checkpointer = ocp.AsyncCheckpointer(handler())
        return self._checkpointer


def _sync(folder: Path) -> None:
    """Make a rename in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


MANIFEST = "manifest.json"


def seal(folder: Path, listed: Mapping[str, object] | None = None) -> None:
    """List every file below a folder in its manifest, which is on the disk when this returns."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            name = str(path.relative_to(folder))
            entry = (listed or {}).get(name)
            files[name] = entry or {"bytes": path.stat().st_size, "sha256": _checksum(path)}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"files": files}, file)
        file.flush()
        os.fsync(file.fileno())


def entries(folder: Path) -> Record:
    """Return a manifest's entries by file name."""
    files = load_json(folder / MANIFEST).get("files")
    if not isinstance(files, dict):
        raise UserError(f"{folder / MANIFEST} lists no files")
    return files


def find_damage(folder: Path) -> str:
    """Return the first difference from the manifest in a few words, "" where every file is as it was written."""
    if not (folder / MANIFEST).exists():
        return f"it has no {MANIFEST}: it was not written to its end"
    try:
        listed = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries(folder).items()}
    except (UserError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    if not listed:
        return f"{MANIFEST} lists nothing"
    for name, (size, checksum) in listed.items():
        damage = _compare(folder / name, size, checksum)
        if damage:
            return f"{name} {damage}"
    return ""


def _compare(path: Path, size: int, checksum: str) -> str:
    try:
        if path.stat().st_size != size:
            return f"has {path.stat().st_size} bytes, not {size}"
        return "" if _checksum(path) == checksum else "has another checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link_files(names: Iterable[str], source: Path, target: Path) -> None:
    """Make a folder of hard links to files of another one: they outlive each other and count once on the disk."""
    wanted = set(names)
    existing = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    if not wanted <= existing:
        raise FileNotFoundError(f"{source} has no {min(wanted - existing)}")
    target.mkdir(parents=True)
    for name in wanted:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(source / name, target / name)


def disk_usage(folders: Iterable[Path]) -> int:
    """Return the bytes of all files in folders, each file once however many names it has."""
    sizes = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):  # removed meanwhile
                    status = os.lstat(os.path.join(parent, name))
                    sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


EVALUATED = "variables"  # the part of a state that evaluation needs; stored apart so that it is read alone
ITEMS = (EVALUATED, "training")


def items(state: Mapping[str, PyTree]) -> dict[str, dict[str, PyTree]]:
    """Split a state into Orbax's items: the variables, and all other parts as one."""
    if not isinstance(state, Mapping) or EVALUATED not in state:
        raise TypeError(f"state: expected a mapping with the part {EVALUATED!r}, got {type(state).__name__}")
    training = {name: part for name, part in state.items() if name != EVALUATED}
    return {EVALUATED: {EVALUATED: state[EVALUATED]}, "training": training}


def leaves(tree: PyTree) -> dict[str, PyTree]:
    """Return `{"optimizer.0.mu.kernel": leaf}` in the tree's own order."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    if len(named) != len(flat):
        raise ValueError("state: two leaves have the same path; keys of one dictionary must differ as text")
    return named


def _is_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def storable(part: PyTree) -> dict[str, PyTree]:
    """Return nested dictionaries of arrays; all but `jax.Array`s are copied, since they are written later."""

    def convert(name: str, leaf: PyTree) -> jax.Array | np.ndarray:
        if _is_key(leaf):
            return jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array):
            return leaf
        array = np.array(leaf)
        if array.dtype.kind in "OUSMm":
            raise TypeError(
                f"state: {name} is a {type(leaf).__name__}; expected arrays and numbers (text goes to meta)"
            )
        return array

    return nested((name.split("."), convert(name, leaf)) for name, leaf in leaves(part).items())


def target(part: PyTree) -> dict[str, PyTree]:
    """Describe the shapes, dtypes and shardings of a template, which Orbax restores to."""

    def describe(leaf: PyTree) -> jax.ShapeDtypeStruct | np.ndarray:
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return np.asarray(leaf)

    return nested((name.split("."), describe(leaf)) for name, leaf in leaves(part).items())


def as_template(leaf: PyTree, restored: PyTree) -> PyTree:
    """Give a restored array the form of its template: key, Python number, uncommitted array."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(restored, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        # an array that was free to follow others to their devices stays free
        return restored if getattr(leaf, "committed", True) else jnp.asarray(np.asarray(restored))
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(np.asarray(restored).item())
    return restored


def check_fits(saved: Mapping[str, PyTree], wanted: Mapping[str, PyTree], where: Path) -> None:
    """Raise UserError naming the first leaf whose shape or dtype differs, or that one side lacks."""

    def describe(leaf: PyTree) -> str:
        if leaf is None:
            return "absent"
        leaf = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        leaf = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"

    for name in [*wanted, *(name for name in saved if name not in wanted)]:
        expected, came = describe(wanted.get(name)), describe(saved.get(name))
        if expected != came:
            raise UserError(
                f"{where} does not fit this configuration: {name} is {came} in the checkpoint,"
                f" {expected} is expected; use the config.yaml that lies beside it"
            )


def handler() -> ocp.CompositeCheckpointHandler:
    """Make the Orbax handler of a checkpoint's trees."""
    trees: dict[str, PyTree] = {name: ocp.StandardCheckpointHandler() for name in ITEMS}
    return ocp.CompositeCheckpointHandler(**trees)
