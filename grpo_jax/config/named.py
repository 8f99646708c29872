"""Find the objects that a config names: built-in ones by a short name, others by an import path."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_jax.errors import Stopped, UserError, extras_named, one_line, short_repr

KEY = "kind"
"""The key beside an object's fields that says its class."""

_LONGEST_NAME = 255  # characters


def find_class(name: str, places: Sequence[str], what: str) -> type:
    """Return the frozen dataclass that a config names; UserError if there is none.

    Args:
        name: "stable_diffusion_3" for the one of a built-in module of that name; "package.module:Class" or
            "file.py:Class" (relative to the working directory) for anyone's. Without ":Class" it is the only frozen
            dataclass that the module defines and that has a `load`.
        places: Modules of the built-in ones, with {} for the name.
        what: Its name in errors.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise UserError(f"{what}: expected a name, package.module:Class or file.py:Class, got {short_repr(name)}")
    place, _, wanted = name.partition(":")
    if place.isidentifier() and not wanted:
        module = _built_in(place, places, what)
    else:
        module = load_module(place, what)
    return _class_of(module, wanted, name, what)


def class_name(kind: type, places: Sequence[str]) -> str:
    """Return the name by which `find_class` finds a class, from any working directory."""
    module = kind.__module__
    for place in places:
        prefix, _, suffix = place.partition("{}")
        if module.startswith(prefix) and module.endswith(suffix):
            return module.removeprefix(prefix).removesuffix(suffix)
    origin = module if not module.startswith(_FILE) else str(Path(sys.modules[module].__file__ or "").resolve())
    return f"{origin}:{kind.__qualname__}"


def built_in_names(places: Sequence[str]) -> list[str]:
    """Return the built-in short names."""
    names = set()
    for place in places:
        package, _, rest = place.partition(".{}")
        ending = f"{rest.replace('.', '/')}.py"
        for folder in map(Path, importlib.import_module(package).__path__):
            names |= {str(path.relative_to(folder)).removesuffix(ending) for path in folder.glob(f"*{ending}")}
    return sorted(name for name in names if not name.startswith("_"))


def load_object(path: str, what: str) -> Any:
    """Return the object of "package.module:name" or "file.py:name"; UserError if importing it fails."""
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{what} {path!r}: write package.module:name or file.py:name")
    module = load_module(place, f"{what} {path!r}")
    value = getattr(module, name, None)
    if value is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        defined = [key for key in public if getattr(getattr(module, key), "__module__", None) == module.__name__]
        raise UserError(f"{what} {path!r}: {place} has no {name} (it has: {', '.join(defined) or 'nothing to call'})")
    return value


def load_module(place: str, what: str) -> ModuleType:
    """Import "package.module" or "file.py", relative to the working directory; UserError if that fails."""
    is_file = place.endswith(".py")
    try:
        with extras_named():
            return _load_file(Path(place), what) if is_file else importlib.import_module(place)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if not is_file and error.name and (place == error.name or place.startswith(error.name + ".")):
            raise UserError(f"{what}: no module {place}; a file is written as file.py:name") from None
        raise UserError(f"{what}: {place} needs the module {error.name}, which is not installed") from error
    except Stopped:
        raise
    except BaseException as error:  # sys.exit in a user's file would end the command, with its own exit code
        name = Path(place).name if is_file else place
        raise UserError(f"{what}: importing {name} raised {type(error).__name__}: {one_line(error)}") from error


def own_package(package: str, module: str = "") -> Any:
    """Return a package that this project installs, or a module of it; UserError if it is not this project's."""
    try:
        imported = importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"the package {package} is missing ({error}); install grpo_jax again") from error
    if not getattr(imported, "__grpo_jax__", False):
        place = getattr(imported, "__file__", package)
        raise UserError(
            f"{place} is another package called `{package}`, not grpo_jax's; uninstall it or put grpo_jax first on the "
            "path"
        )
    return importlib.import_module(f"{package}.{module}") if module else imported


_FILE = "grpo_jax_file_"


def _load_file(path: Path, what: str) -> ModuleType:
    """Import a file under a name of its own, once."""
    if not path.is_file():
        raise UserError(f"{what}: the file {path} does not exist")
    name = f"{_FILE}{path.stem}_{abs(hash(str(path.resolve()))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _built_in(name: str, places: Sequence[str], what: str) -> ModuleType:
    for place in places:
        module = place.format(name)
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # no such package, or another one of its name
            spec = None
        if spec is not None:
            return importlib.import_module(module)
    for place in places:
        own_package(place.partition(".")[0])
    names = ", ".join(built_in_names(places))
    raise UserError(f"{what}: expected {names}, package.module:Class or file.py:Class, got {name!r}")


def _class_of(module: ModuleType, wanted: str, name: str, what: str) -> type:
    defined = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
    fitting = [kind for kind in defined if dataclasses.is_dataclass(kind) and hasattr(kind, "load")]
    chosen = [kind for kind in fitting if kind.__name__ == wanted] if wanted else fitting
    if len(chosen) == 1:
        return chosen[0]
    have = ", ".join(kind.__name__ for kind in fitting) or "none"
    where = Path(module.__file__ or module.__name__).name
    raise UserError(f"{what}: {name} must name one frozen dataclass with a `load`; {where} has: {have}")
