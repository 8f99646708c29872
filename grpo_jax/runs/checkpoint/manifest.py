"""The files of a checkpoint: listed with their checksums, compared with that list, shared by hard links.

    {"files": {"variables/d/7f…": {"bytes": 446356, "sha256": "ab…"}, …}}

The manifest is written last: a folder without one was not finished.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError

MANIFEST = "manifest.json"


def seal(folder: Path, listed: Mapping[str, Any] | None = None) -> None:
    """Lists every file below a folder in its manifest, which is on the disk when this returns.

    Args:
        folder: Of the checkpoint.
        listed: Entries of files that are not read again, from another manifest.
    """
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


def entries(folder: Path) -> dict[str, Any]:
    """Return a manifest's entries by file name.

    Raises:
        UserError: There is none that can be read.
    """
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
    """Makes a folder of hard links to files of another one: they outlive each other and count once on the disk.

    Args:
        names: Of the files, relative to both folders; a damaged manifest may name any.
        source: Where they are.
        target: Must not exist.

    Raises:
        OSError: A file is gone, or the file system has no hard links.
    """
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
