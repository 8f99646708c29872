"""Import the modules and objects that a config names, and name objects passed in Python.

A name is package.module:object, or file.py:object relative to the working directory.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_jax.errors import Stopped, UserError, extras_named, one_line

FILE = "grpo_jax_file_"
"""Prefix of the names of modules that are files."""
IN_PYTHON = "<given>"
"""Stands in a config for data given to `run` in Python: as data.prompts, and as the place of a function."""
GIVEN_TOOLS: dict[str, Callable[..., Any]] = {}
"""Tools given in Python, by their name in a config: an import path, else "<given>:label", then "<given>:label#2"."""


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
    if is_file and not os.path.isfile(os.path.expanduser(place)):
        raise UserError(f"the file {place} does not exist")
    try:
        with extras_named():
            return _load_file(Path(os.path.expanduser(place))) if is_file else importlib.import_module(place)
    except (UserError, Stopped, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        if not is_file and error.name and f"{place}.".startswith(f"{error.name}."):
            raise UserError(f"no module {place}; a file is written as file.py:name") from None
        raise UserError(f"{place} needs the module {error.name}, which is not installed") from error
    except BaseException as error:  # sys.exit in a user's file must not end the command
        name = Path(place).name if is_file else place
        raise UserError(f"importing {name} raised {type(error).__name__}: {one_line(error)}") from error


def _load_file(path: Path) -> ModuleType:
    """Import a file once; a changed file is another module, even if its time and size are the same."""
    path, code = path.absolute(), path.read_bytes()
    digest = hashlib.sha256(str(path.resolve()).encode() + code).hexdigest()
    name = f"{FILE}{path.stem}_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    sys.modules[name] = module = ModuleType(name)  # pickle needs the entry
    module.__file__ = str(path)
    try:
        exec(compile(code, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def own_package(package: str, module: str = "") -> Any:
    """Import a package of this project, or a module of it; UserError if another project's package has its name."""
    imported = importlib.import_module(package)
    if not getattr(imported, "__grpo_jax__", False):
        place = getattr(imported, "__file__", package)
        raise UserError(f"{place} is another package called `{package}`; uninstall it or put grpo_jax before it")
    return importlib.import_module(f"{package}.{module}") if module else imported


def fixed_options(function: Callable[..., Any], options: Mapping[str, object]) -> dict[str, object]:
    """Return a reward's options; a shipped reward's are all fixed, so that no column of that name is one."""
    shipped = getattr(function, "__module__", "") == "grpo_jax.rewards"
    return {**((shipped and getattr(function, "__kwdefaults__", None)) or {}), **options}


def import_path(function: Callable[..., Any], label: str) -> str:
    """Return an import path of a function or class that works in any folder, else "<given>:label".

    It is "file.py:function" for a user's single-file module, else "package.module:function". Functions of the main
    script, lambdas, methods and objects have no such path.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    home = sys.modules.get(module or "")
    file = Path(getattr(home, "__file__", None) or "")
    stem = file.parent.name if file.name == "__init__.py" else file.stem
    importable = module != "__main__" and name and getattr(home, name, None) is function
    # A file loaded under another name, like a config's file.py, cannot be imported by that name.
    if module is None or not importable or stem != module.rpartition(".")[2]:
        return f"{IN_PYTHON}:{label}"
    installed = {"site-packages", "dist-packages"} & {*file.parts}
    return f"{module}:{name}" if "." in module or installed else f"{file.resolve()}:{name}"


def name_tools(tools: Any) -> Any:
    """Replace functions and classes by their names, in a list of tools, a mapping {name: class} or a single tool."""
    tools = [tools] if callable(tools) or isinstance(tools, str | Mapping) else tools
    return [*map(_named, tools)] if isinstance(tools, list | tuple) else tools


def _named(tool: Any) -> Any:
    if isinstance(tool, Mapping):
        return {name: _named(value) for name, value in tool.items()}
    if not callable(tool):
        return tool
    name = import_path(tool, getattr(tool, "__name__", type(tool).__name__))
    if not name.startswith(IN_PYTHON):
        GIVEN_TOOLS[name] = tool  # importing its file again would make another module, with its own globals
        return name
    numbered = (f"{name}#{number}" if number > 1 else name for number in itertools.count(1))
    return next(one for one in numbered if GIVEN_TOOLS.setdefault(one, tool) == tool)  # bound methods are only equal


def without_numbers(value: object) -> str:
    """Describe a config's value without the numbers of tools from Python, which depend on earlier configs."""
    return re.sub(rf"({IN_PYTHON}:[^'#]*)#\d+", r"\1", repr(value))
