"""The manifest of a checkpoint: its step, its metadata, and the digests of its files.

Orbax notices damage to the nodes of its trees, but none to arrays. The manifest holds a digest of itself, so that its
metadata can be replaced in one move while the arrays stay.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

MANIFEST = "checkpoint.json"
_UNLISTED = (MANIFEST, "_CHECKPOINT_METADATA", "commit_success.txt")  # Orbax writes the last two after the manifest


class Damaged(ValueError):
    """A checkpoint differs from what was written; the message says how."""


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write a manifest with a digest of each file, unless `content` has them; it is on the disk when this returns."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in _UNLISTED]
    content = {"files": {str(path.relative_to(folder)): _digest(path) for path in paths}} | content
    temporary = folder / f".{MANIFEST}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({**content, "sha256": _own_digest(content)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest: "step", "meta", "files". Raises Damaged."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if content.pop("sha256") == _own_digest(content):
            return content
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise Damaged(f"{MANIFEST} is missing or differs from what was written")


def find_damage(folder: Path, step: int | None = None) -> str:
    """Return the first difference from the manifest in a few words; "" if there is none."""
    try:
        content = read_manifest(folder)
        if step not in (None, content["step"]):
            return f"it was saved as step {content['step']}"
        for name, digest in content["files"].items():
            if _digest(folder / name) != digest:
                return f"{name} differs from what was written"
    except FileNotFoundError as error:
        return f"{os.path.relpath(error.filename, folder)} is missing"
    except (Damaged, OSError) as error:
        return str(error)
    return ""


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
