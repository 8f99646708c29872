"""Import the modules and objects that a config names: package.module, or file.py relative to the working directory."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_jax.errors import Stopped, UserError, extras_named, one_line

FILE = "grpo_jax_file_"
"""Prefix of the names of modules that are files."""


def load_object(path: str, what: str) -> Any:
    """Return the function or class of "package.module:name" or "file.py:name"; UserError if there is none."""
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{what} {path!r}: write package.module:name or file.py:name")
    try:
        module = load_module(place)
    except UserError as error:
        raise UserError(f"{what} {path!r}: {error}") from error
    value = getattr(module, name, None)
    if not callable(value):
        own = [key for key, one in vars(module).items() if callable(one) and key[0] != "_"]
        own = [key for key in own if getattr(getattr(module, key), "__module__", None) == module.__name__]
        wrong = f"{place} has no {name}" if value is None else f"it is a {type(value).__name__}, not a function"
        raise UserError(f"{what} {path!r}: {wrong} (it has: {', '.join(own) or 'nothing to call'})")
    return value


def load_module(place: str) -> ModuleType:
    """Import "package.module" or "file.py"; UserError if that fails."""
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise UserError(f"the file {place} does not exist")
    try:
        with extras_named():
            return _load_file(Path(place)) if is_file else importlib.import_module(place)
    except (UserError, Stopped):
        raise
    except ModuleNotFoundError as error:
        if not is_file and error.name and f"{place}.".startswith(f"{error.name}."):
            raise UserError(f"no module {place}; a file is written as file.py:name") from None
        raise UserError(f"{place} needs the module {error.name}, which is not installed") from error
    except BaseException as error:  # sys.exit in a user's file would end the command, with its own exit code
        name = Path(place).name if is_file else place
        raise UserError(f"importing {name} raised {type(error).__name__}: {one_line(error)}") from error


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, once."""
    name = f"{FILE}{path.stem}_{abs(hash(str(path.resolve()))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file has a loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # pickle looks it up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def own_package(package: str, module: str = "") -> Any:
    """Return a package that this project installs, or a module of it; UserError if it is not this project's."""
    try:
        imported = importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"the package {package} is missing ({error}); install grpo_jax again") from error
    if not getattr(imported, "__grpo_jax__", False):
        place = getattr(imported, "__file__", package)
        raise UserError(f"{place} is another package called `{package}`; uninstall it or put grpo_jax before it")
    return importlib.import_module(f"{package}.{module}") if module else imported
