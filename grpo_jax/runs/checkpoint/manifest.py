"""A list of a folder's files with their checksums, written last: what is not listed whole was not finished.

{"files": {"variables/d/7f…": {"bytes": 446356, "sha256": "ab…"}, …}}
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

MANIFEST = "manifest.json"


def seal(folder: Path) -> None:
    """Lists every file below a folder in its manifest, which is on the disk when this returns."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST)
    files = {str(path.relative_to(folder)): _described(path) for path in found}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"files": files}, file)
        file.flush()
        os.fsync(file.fileno())


def is_sealed(folder: Path) -> bool:
    """Whether there is a manifest; whether it is right, `find_damage` says."""
    return (folder / MANIFEST).is_file()


def find_damage(folder: Path) -> str:
    """What differs first from the manifest, in a few words; "" where every file is as it was written."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        listed = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was not written to its end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
