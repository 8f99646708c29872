"""Find imports that cannot be resolved, also inside functions, and calls whose arguments do not fit.

The packages are imported. Scripts are read: what they would import of the packages, of the scripts beside them or of
other packages must be there, and so must what they take from a module by its name (`trainer.make_update`).
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

from support.imports import FILES, ROOT

from grpo_jax.errors import EXTRAS

PACKAGES = ("grpo_jax", "bridges")
SCRIPTS = ("benchmarks", "docs", "scripts", "examples", "tests")
HELPERS = ROOT / "tests"  # support.NAME and oracles.NAME of the tests
ABSENT = {*EXTRAS, "vllm", "trl", "tunix", "peft", "gymnasium", "matplotlib"}
"""Packages of benchmarks that the tests' environment may lack."""
IMPORTED = {*FILES.values()}  # by `import_failures`, as test files are by pytest
KINDS = (ast.Import, ast.ImportFrom, ast.Name, ast.arg, ast.Attribute)
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
    if path not in IMPORTED and not path.name.startswith("test_"):
        compile(tree, str(path), "exec")  # what no parser sees: `return` outside of a function
    bound: dict[str, Has] = {}
    nodes = [node for node in ast.walk(tree) if isinstance(node, KINDS)]
    for node in nodes:
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
    taken = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    taken |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
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
    for script in scripts_named(module, folder):
        return top_names(script).__contains__
    parts = Path(*module.split("."))
    if (HELPERS / parts).is_dir():
        return lambda name: (HELPERS / parts / f"{name}.py").is_file()
    top = parts.parts[0]
    # Other scripts may add folders to the path.
    is_gone = "benchmarks" in folder.parts and top not in ABSENT and importlib.util.find_spec(top) is None
    return None if is_gone or (HELPERS / top).is_dir() else lambda name: True


def scripts_named(module: str, folder: Path) -> list[Path]:
    """The files that a script in `folder` can import by this name."""
    parts = Path(*module.split("."))
    beside = [] if (folder / "__init__.py").is_file() else [folder / parts]  # modules of a package are no scripts
    beside += [folder.parent / parts] if folder.parent.name == "benchmarks" else []  # benchmarks/gpu takes them
    return [path for script in (*beside, HELPERS / parts) if (path := script.with_suffix(".py")).is_file()]


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


def unfit_calls(path: Path) -> Iterator[str]:
    """The calls of a file, and its `partial`s, whose arguments do not fit the function of ours that they name."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    modules, names = named_functions(tree, path)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function, arguments, kind = call.func, call.args, "bind"
        if ast.unparse(function) in ("partial", "functools.partial") and arguments:
            function, arguments, kind = arguments[0], arguments[1:], "bind_partial"
        holder, _, name = ast.unparse(function).rpartition(".")
        module, name = (modules.get(holder), name) if holder else names.get(name, (None, ""))
        signature = signature_of(module, name, path.parent) if module else None
        words = [keyword.arg for keyword in call.keywords]
        if signature is None or None in words or any(isinstance(argument, ast.Starred) for argument in arguments):
            continue
        try:
            getattr(signature, kind)(*arguments, **dict.fromkeys(words))
        except TypeError as error:
            yield f"{path}:{call.lineno} {ast.unparse(function)}: {error}"


def named_functions(tree: ast.Module, path: Path) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """The modules of a file by their names there, and what it takes from modules or defines, as (module, name)."""
    own = {node.name: (path.stem, node.name) for node in tree.body if isinstance(node, ast.FunctionDef)}
    modules, names = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = node.module, alias.name
    # A name that means something else somewhere in the file is not checked.
    for node in ast.walk(tree):
        inner = isinstance(node, ast.FunctionDef) and node not in tree.body
        name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
        name = node.arg if isinstance(node, ast.arg) else node.name if inner else name
        modules.pop(name, None), names.pop(name, None), own.pop(name, None)
    twice = own.keys() & names.keys()
    return modules, {name: value for name, value in (own | names).items() if name not in twice}


@functools.cache
def signature_of(module: str, name: str, folder: Path) -> inspect.Signature | None:
    """The signature of a function of ours, or of a script; None for anything else."""
    if is_ours(module):
        with contextlib.suppress(ImportError, AttributeError, TypeError, ValueError):
            return inspect.signature(getattr(importlib.import_module(module), name))
        return None
    for script in scripts_named(module, folder):
        for node in ast.parse(script.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                plain = ast.parse(f"lambda {ast.unparse(_without_types(node.args))}: None", mode="eval")
                return inspect.signature(eval(compile(plain, str(script), "eval"), {}))
    return None


def _without_types(arguments: ast.arguments) -> ast.arguments:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in filter(None, every):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    return arguments


def sources(*folders: str) -> list[Path]:
    """Every Python file of these folders of the checkout, or of all that the checks read."""
    return [path for folder in folders or (*PACKAGES, *SCRIPTS) for path in sorted((ROOT / folder).rglob("*.py"))]
