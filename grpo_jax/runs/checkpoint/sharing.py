"""Files that several checkpoints have in common: hard links, which outlive each other and count once on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def share(names: Iterable[str], source: Path, to: Path) -> None:
    """Gives files of a folder a second name in another one, which is made.

    Args:
        names: Of the files, relative to both folders; within them, whatever a damaged manifest says.
        source: Where they are.
        to: Must not exist.

    Raises:
        OSError: A file is gone, or the file system has no hard links.
    """
    wanted, there = set(names), {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    if not wanted <= there:
        raise FileNotFoundError(f"{source} has no {min(wanted - there)}")
    to.mkdir(parents=True)
    for name in wanted:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(source / name, to / name)


def bytes_held(folders: Iterable[Path]) -> int:
    """What the files in folders take on the disk together, each file once however many names it has."""
    sizes = {}
    for path in (os.path.join(at, name) for folder in folders for at, _, names in os.walk(folder) for name in names):
        with suppress(OSError):  # removed meanwhile
            found = os.lstat(path)
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())
