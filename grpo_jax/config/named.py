"""Objects that a config names: built-in ones by a short name, anyone's by an import path."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_jax.config.fields import SHARED
from grpo_jax.errors import Stopped, UserError, extras_named, one_line, shown

KEY = "kind"
"""The key beside an object's fields that says its class."""

_LONGEST_NAME = 255  # characters


def find_class(name: str, places: Sequence[str], what: str) -> type:
    """The frozen dataclass that a config names.

    Args:
        name: "stable_diffusion_3" for the one of a built-in module of that name; "package.module:Class" or
            "file.py:Class" (relative to the working directory) for anyone's. Without ":Class" it is the only frozen
            dataclass that the module defines and that has a `load`.
        places: Modules of the built-in ones, with {} for the name.
        what: What the config calls it, for errors.

    Raises:
        UserError: There is no such module or class.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise UserError(f"{what}: expected a name, package.module:Class or file.py:Class, got {shown(name)}")
    place, _, wanted = name.partition(":")
    if place.isidentifier() and not wanted:
        module = _built_in(place, places, what)
    else:
        module = load_module(place, what)
    return _class_of(module, wanted, name, what)


def class_name(kind: type, places: Sequence[str]) -> str:
    """What a config calls a class; `find_class` finds it by this name, from any working directory."""
    module = kind.__module__
    for place in places:
        prefix, _, suffix = place.partition("{}")
        if module.startswith(prefix) and module.endswith(suffix):
            return module.removeprefix(prefix).removesuffix(suffix)
    origin = module if not module.startswith(_FILE) else str(Path(sys.modules[module].__file__ or "").resolve())
    return f"{origin}:{kind.__qualname__}"


def built_in_names(places: Sequence[str]) -> list[str]:
    """The short names that there are."""
    names = set()
    for place in places:
        package, _, rest = place.partition(".{}")
        ending = f"{rest.replace('.', '/')}.py"
        for folder in map(Path, importlib.import_module(package).__path__):
            names |= {str(path.relative_to(folder)).removesuffix(ending) for path in folder.glob(f"*{ending}")}
    return sorted(name for name in names if not name.startswith("_"))


@functools.cache
def _load_holder(path: str) -> Any:
    return load_object(path, "config")


def shared_holder(field: dataclasses.Field) -> Any:
    """Return the class that holds an object of a field together with a shared section (`fields.named`), or None."""
    return _load_holder(field.metadata[SHARED]) if field.metadata[SHARED] else None


def load_object(path: str, what: str) -> Any:
    """What "package.module:name" or "file.py:name" stands for.

    Raises:
        UserError: There is no such module, file or name, or importing it fails.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{what} {path!r}: write package.module:name or file.py:name")
    module = load_module(place, f"{what} {path!r}")
    found = getattr(module, name, None)
    if found is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        own = [key for key in public if getattr(getattr(module, key), "__module__", None) == module.__name__]
        raise UserError(f"{what} {path!r}: {place} has no {name} (it has: {', '.join(own) or 'nothing to call'})")
    return found


def load_module(place: str, what: str) -> ModuleType:
    """Imports "package.module" or "file.py", relative to the working directory.

    Raises:
        UserError: It does not exist, needs what is not installed, or raises.
    """
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
    """A package that this project installs, or a module of it; another distribution may install one of its name.

    Raises:
        UserError: The package that is imported is not this project's.
    """
    found = _import_own(package)
    if not getattr(found, "__grpo_jax__", False):
        raise UserError(
            f"{getattr(found, '__file__', package)} is another package called `{package}`, not grpo_jax's; uninstall "
            "it or put grpo_jax first on the path"
        )
    return importlib.import_module(f"{package}.{module}") if module else found


def _import_own(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"the package {package} is missing ({error}); install grpo_jax again") from error


_FILE = "grpo_jax_file_"


def _load_file(path: Path, what: str) -> ModuleType:
    """Imports a file under a name of its own, once."""
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
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # no such package, or another one of its name
            found = None
        if found is not None:
            return importlib.import_module(module)
    for place in places:
        own_package(place.partition(".")[0])
    known = ", ".join(built_in_names(places))
    raise UserError(f"{what}: expected {known}, package.module:Class or file.py:Class, got {name!r}")


def _class_of(module: ModuleType, wanted: str, name: str, what: str) -> type:
    own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
    fitting = [kind for kind in own if dataclasses.is_dataclass(kind) and hasattr(kind, "load")]
    chosen = [kind for kind in fitting if kind.__name__ == wanted] if wanted else fitting
    if len(chosen) == 1:
        return chosen[0]
    have = ", ".join(kind.__name__ for kind in fitting) or "none"
    where = Path(module.__file__ or module.__name__).name
    raise UserError(f"{what}: {name} must name one frozen dataclass with a `load`; {where} has: {have}")
