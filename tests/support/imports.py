"""Imports from the syntax trees: the imported module, when, and on which line."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DYNAMIC = ("import_module", "__import__", "own_package")


class Import(NamedTuple):
    module: str  # as far down as it is one of the packages': a name taken from it stands in `module` too
    lazy: bool  # inside a function
    line: int
    types: bool = False  # for type checkers alone


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {dotted(path): path for folder in ("grpo_jax", "bridges") for path in sorted((ROOT / folder).rglob("*.py"))}


def within(module: str, prefixes) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def target(module: str) -> str:
    """The file that an import loads: the module itself, or the one that a name is taken from."""
    while module not in FILES and module.partition(".")[0] in ("grpo_jax", "bridges") and "." in module:
        module = module.rpartition(".")[0]
    return module


def literal_module(node) -> str | None:
    """What import_module("…") or own_package("package", "module") imports, as far as it is written out."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in DYNAMIC:
        return None
    found = []
    for argument in node.args:
        if isinstance(argument, ast.JoinedStr) and argument.values:
            argument = argument.values[0]
        value = getattr(argument, "value", None)
        if not isinstance(value, str):
            break
        found.append(value.strip("."))
    return ".".join(found) or None


def read_imports(source: str, module: str, package: bool = False) -> list[Import]:
    """Every import of a module."""

    def visit(node, lazy, types) -> Iterator[Import]:
        types = types or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, lazy, node.lineno, types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) - node.level + package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(f"{origin}.{alias.name}", lazy, node.lineno, types) for alias in node.names)
        elif (name := literal_module(node)) is not None:
            yield Import(name, lazy, node.lineno, types)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside, types)

    return list(visit(ast.parse(source), False, False))


@functools.cache
def all_imports(name: str) -> list[Import]:
    path = FILES[name]
    return read_imports(path.read_text(encoding="utf-8"), name, package=path.name == "__init__.py")


def imports_of(name: str, types: bool = False) -> list[Import]:
    """What a module imports, lazily too; with `types` also what it imports for type checkers alone."""
    return [one for one in all_imports(name) if types or not one.types]
