"""A list of a folder's files with their checksums, written last: what is not listed whole was not finished.

{"files": {"variables/d/7f…": {"bytes": 446356, "sha256": "ab…"}, …}}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError

MANIFEST = "manifest.json"


def seal(folder: Path, known: Mapping[str, Any] | None = None) -> None:
    """Lists every file below a folder in its manifest, which is on the disk when this returns.

    Args:
        folder: Of the checkpoint.
        known: Entries of files that are not read again, of another manifest.
    """
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST)
    names = {str(path.relative_to(folder)): path for path in found}
    files = {name: (known or {}).get(name) or _described(path) for name, path in names.items()}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"files": files}, file)
        file.flush()
        os.fsync(file.fileno())


def entries(folder: Path) -> dict[str, Any]:
    """What a manifest says of each file.

    Raises:
        UserError: There is none that can be read.
    """
    files = load_json(folder / MANIFEST).get("files")
    if not isinstance(files, dict):
        raise UserError(f"{folder / MANIFEST} lists no files")
    return files


def find_damage(folder: Path) -> str:
    """What differs first from the manifest, in a few words; "" where every file is as it was written."""
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


def _described(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": _checksum(path)}


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
