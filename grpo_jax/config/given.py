"""Name functions and classes that a config is given in Python: a config holds import paths."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_jax.config.files import Values

IN_PYTHON = "<given>"
"""Stands in a config for data given to `run` in Python: as data.prompts, and as the place of a function."""

GIVEN_TOOLS: dict[str, Callable[..., Any]] = {}
"""Tools of this process that nothing can import, by their name in a config."""


def import_path(function: Callable[..., Any], label: str) -> str:
    """Return the path that finds a function or class again from any folder, else "<given>:label".

    It is "file.py:function" for a module that is one file of the user's, "package.module:function" otherwise.
    A function of a script that was run, a lambda, a method or an object has no such path.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    home = sys.modules.get(module or "")
    file = Path(getattr(home, "__file__", None) or "")
    stem = file.parent.name if file.name == "__init__.py" else file.stem
    importable = module != "__main__" and name and getattr(home, name, None) is function
    # A file that was loaded under another name, as a config's file.py is, is not found by that name.
    if module is None or not importable or stem != module.rpartition(".")[2]:
        return f"{IN_PYTHON}:{label}"
    installed = {"site-packages", "dist-packages"} & {*file.parts}
    return f"{module}:{name}" if "." in module or installed else f"{file.resolve()}:{name}"


def with_named_tools(values: Values) -> Values:
    """Return the values of a config with names in place of the functions and classes in data.tools."""
    data = values.get("data")
    tools = data.get("tools") if isinstance(data, Mapping) else None
    if callable(tools):
        tools = [tools]
    if not isinstance(tools, list | tuple) or not any(map(callable, tools)):
        return values
    return {**values, "data": {**data, "tools": [_named(tool) if callable(tool) else tool for tool in tools]}}


def _named(tool: Callable[..., Any]) -> str:
    name = import_path(tool, getattr(tool, "__name__", type(tool).__name__))
    if name.startswith(IN_PYTHON):
        GIVEN_TOOLS[name] = tool
    return name
