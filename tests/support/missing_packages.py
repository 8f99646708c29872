"""An environment in which packages are not installed, though they are: for commands in processes of their own."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_HIDE = """
from importlib.machinery import PathFinder

hidden, find = {hidden!r}, PathFinder.find_spec


@classmethod
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find(name, path, target)


PathFinder.find_spec = find_spec
"""


def without(folder: Path, *packages: str) -> dict[str, str]:
    """Environment variables under which Python finds everything but these packages."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_HIDE.format(hidden=set(packages)))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
