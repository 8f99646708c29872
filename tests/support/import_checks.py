"""Find imports that cannot be resolved, also inside functions.

The packages are imported. Scripts are read: what they would import of the packages or of the scripts beside them must
be there, and so must what they take from a module by its name (`trainer.make_update`).
"""

import ast
import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

from support.imports import FILES, ROOT

from grpo_jax.errors import EXTRAS

PACKAGES = ("grpo_jax", "bridges")
SCRIPTS = ("benchmarks", "docs", "scripts", "examples", "tests")
HELPERS = ROOT / "tests"  # support.NAME and oracles.NAME of the tests

Has = Callable[[str], bool]


def import_failures() -> Iterator[str]:
    """The modules that cannot be imported; not those that need a package of an extra that is not installed."""
    for name in FILES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                yield f"{name}: {error}"
        except Exception as error:
            yield f"{name}: {type(error).__name__}: {error}"


def dangling(path: Path) -> Iterator[str]:
    """The imports of a file that lead nowhere, and what it takes from a module that has no such name."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    compile(tree, str(path), "exec")  # what no parser sees: `return` outside of a function
    bound: dict[str, Has] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                has = names_in(alias.name, path.parent)
                if has is None:
                    yield f"{path}:{node.lineno} no module {alias.name}"
                elif alias.asname or "." not in alias.name:
                    bound[alias.asname or alias.name] = has
        elif isinstance(node, ast.ImportFrom) and not node.level:
            has = names_in(node.module, path.parent)
            if has is None:
                yield f"{path}:{node.lineno} no module {node.module}"
                continue
            for alias in node.names:
                package = is_ours(node.module) or (HELPERS / node.module).is_dir()
                inner = names_in(f"{node.module}.{alias.name}", path.parent) if package else None
                if inner is not None:
                    bound[alias.asname or alias.name] = inner
                elif not has(alias.name):
                    yield f"{path}:{node.lineno} {node.module} has no {alias.name}"
    # A name that is given another value as well may be that one.
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    taken |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in bound and name not in taken and not bound[name](node.attr):
                yield f"{path}:{node.lineno} {name} has no {node.attr}"


def is_ours(module: str) -> bool:
    """Whether a module belongs to the packages."""
    return module.partition(".")[0] in PACKAGES


@functools.cache
def names_in(module: str, folder: Path) -> Has | None:
    """Which names a module has: of the packages, or a script in `folder`. None if it should be there and is not."""
    if not is_ours(module):
        return names_beside(module, folder)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return None if is_ours(error.name or "") else lambda name: True
    return lambda name: hasattr(found, name)


def names_beside(module: str, folder: Path) -> Has | None:
    """As `names_in`, for what is no package of ours: scripts, the tests' helpers, and others' modules, which have all.

    A folder of helpers has the files in it.
    """
    parts = Path(*module.split("."))
    beside = [] if (folder / "__init__.py").is_file() else [folder / parts]  # modules of a package are no scripts
    for script in (*beside, HELPERS / parts):
        if script.with_suffix(".py").is_file():
            return top_names(script.with_suffix(".py")).__contains__
    if (HELPERS / parts).is_dir():
        return lambda name: (HELPERS / parts / f"{name}.py").is_file()
    return None if (HELPERS / parts.parts[0]).is_dir() else lambda name: True


def top_names(script: Path) -> set[str]:
    """Return the names that a script defines or imports outside functions, with their places."""
    names = {"__file__"}
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def sources() -> list[Path]:
    """Every Python file of the checkout that the checks read."""
    return [path for folder in (*PACKAGES, *SCRIPTS) for path in sorted((ROOT / folder).rglob("*.py"))]
