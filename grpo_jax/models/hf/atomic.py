"""Folders that appear at once when they are complete, and replace nothing but an earlier one of their kind."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_jax.errors import UserError


def refuse_foreign(folder: Path, marker: str, kind: str) -> None:
    """Refuse a place that is in use for something else.

    Args:
        folder: where something will be written.
        marker: file that every folder of this kind has.
        kind: what to call it.

    Raises:
        UserError: it is a file, or a folder that holds something and lacks the marker.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / marker).exists()):
        raise UserError(f"{folder} exists and is not {kind}: choose another place or remove it")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes its name when the block ends; an earlier one stays until then."""
    work = folder.parent / f".{folder.name}.writing-{os.getpid()}"
    old = folder.parent / f".{folder.name}.old-{os.getpid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        yield work
        if folder.exists():
            os.rename(folder, old)
        os.rename(work, folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
