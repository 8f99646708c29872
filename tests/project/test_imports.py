"""Imports go one way: what the design says about who may know whom, read from the syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# The pure core, lowest first; a module may import those of lower rank.
CORE = {
    "grpo_jax.core.masking": 0,
    "grpo_jax.core.logprobs": 1,
    "grpo_jax.core.advantages": 1,
    "grpo_jax.core.aggregation": 1,
    "grpo_jax.core.surrogates": 1,
    "grpo_jax.core.returns": 1,
    "grpo_jax.core.kl": 1,
    "grpo_jax.core.shaping": 2,
    "grpo_jax.core.selection": 2,
    "grpo_jax.core.losses": 2,
    "grpo_jax.core.ppo": 3,
}
TORCH = {"torch", "torchvision", "diffusers", "open_clip", "accelerate"}
# Where everything meets: the commands, and the parts they are put together from.
COMMANDS = {
    f"grpo_jax.{name}"
    for name in (
        *("train", "evaluate", "export", "predict", "parts", "judges", "experiment", "loop", "drawing"),
        *("recommendation_parts", "recommendation_report", "warm_start", "results", "memory_budget", "adapters"),
        *("plan", "plan_advice", "plan_command", "plan_judges"),
    )
}
# Functions of a policy that they are handed, and of nothing concrete.
GENERIC = {
    f"grpo_jax.{name}"
    for name in (
        "sampling",
        "token_choice",
        "packing",
        "trainer",
        "ppo_trainer",
        "objectives",
        "estimators",
        "value_head",
        "pipeline",
        "rollout",
    )
}
# Scripts that train the miniature's parts, and the command that serves a catalogue: they count as commands.
BUILDERS = {"bridges.miniature.build", "bridges.retrieval.__main__"}


class Import(NamedTuple):
    module: str
    lazy: bool  # inside a function
    line: int


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def literal_module(node) -> str | None:
    """The argument of import_module("…") or __import__("…"), as far as it is written out."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in ("import_module", "__import__"):
        return None
    argument = node.args[0]
    if isinstance(argument, ast.JoinedStr) and argument.values:
        argument = argument.values[0]
    return argument.value.strip(".") if isinstance(getattr(argument, "value", None), str) else None


def for_types_alone(node) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def read_imports(source: str, module: str, package: bool = False) -> list[Import]:
    found = []

    def visit(node, lazy):
        if for_types_alone(node):
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, lazy, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) - node.level + package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found.append(Import(origin, lazy, node.lineno))
            found.extend(Import(f"{origin}.{alias.name}", lazy, node.lineno) for alias in node.names)
        elif (name := literal_module(node)) is not None:
            found.append(Import(name, lazy, node.lineno))
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def read_file(path: Path) -> list[Import]:
    return read_imports(path.read_text(encoding="utf-8"), dotted(path), package=path.name == "__init__.py")


FILES = {dotted(path): path for folder in ("grpo_jax", "bridges") for path in sorted((ROOT / folder).rglob("*.py"))}
OURS = {name: path for name, path in FILES.items() if name.startswith("grpo_jax")}
BRIDGES = {name: path for name, path in FILES.items() if name.startswith("bridges")}


def is_builder(name: str) -> bool:
    return name in BUILDERS or name.startswith("bridges.miniature.train_")


def within(module: str, packages) -> bool:
    """Whether `module` is one of the packages or inside one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def refuse(name: str, path: Path, wrong) -> None:
    offending = [f"{path}:{found.line} imports {found.module}" for found in read_file(path) if wrong(found)]
    assert not offending, f"{name} may not: " + "; ".join(offending)


@pytest.mark.parametrize("name", CORE)
def test_the_core_uses_jax_alone(name):
    def wrong(found):
        if within(found.module, ["grpo_jax"]):
            lower = [module for module, rank in CORE.items() if rank < CORE[name]]
            return found.module != "grpo_jax" and not within(found.module, lower)
        top = found.module.partition(".")[0]
        return top not in {"jax", "numpy"} and top not in sys.stdlib_module_names

    refuse(name, FILES[name], wrong)


@pytest.mark.parametrize("name", [name for name in OURS if not within(name, ["grpo_jax.models"])])
def test_only_models_know_flax(name):
    refuse(name, OURS[name], lambda found: within(found.module, ["flax"]))


@pytest.mark.parametrize("name", OURS)
def test_torch_and_bridges_are_for_the_commands_and_lazy(name):
    heavy = TORCH | {"bridges"}
    refuse(name, OURS[name], lambda found: within(found.module, heavy) and not (found.lazy and name in COMMANDS))


@pytest.mark.parametrize("name", OURS)
def test_transformers_is_lazy(name):
    refuse(name, OURS[name], lambda found: within(found.module, ["transformers"]) and not found.lazy)


@pytest.mark.parametrize("name", sorted(GENERIC & OURS.keys()))
def test_sampling_and_training_know_no_model_and_no_task(name):
    refuse(name, OURS[name], lambda found: within(found.module, ["grpo_jax.models", "grpo_jax.tasks"]))


@pytest.mark.parametrize("name", [name for name in OURS if within(name, ["grpo_jax.models", "grpo_jax.tasks"])])
def test_models_and_tasks_do_not_know_who_uses_them(name):
    users = COMMANDS | GENERIC
    other = "grpo_jax.tasks" if within(name, ["grpo_jax.models"]) else "grpo_jax.models"
    refuse(name, OURS[name], lambda found: within(found.module, users | {other}))


@pytest.mark.parametrize("name", [name for name in BRIDGES if not is_builder(name)])
def test_bridges_know_only_types(name):
    refuse(
        name,
        BRIDGES[name],
        lambda found: within(found.module, ["grpo_jax"]) and not within(found.module, ["grpo_jax.errors"]),
    )


def test_the_ground_truth_is_numpy_alone():
    """No network may be part of the checker that says whether a picture is right."""

    def wrong(found):
        top = found.module.partition(".")[0]
        return top != "numpy" and top not in sys.stdlib_module_names

    refuse("bridges.miniature.world", BRIDGES["bridges.miniature.world"], wrong)


def test_the_reader_sees_every_kind_of_import():
    source = """
import torch.nn as nn
from . import masking
from ..bridges import clip
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import diffusers
def later():
    import open_clip
    import_module("transformers")
    importlib.import_module(f"bridges.{name}")
"""
    found = {(item.module, item.lazy) for item in read_imports(source, "grpo_jax.core.losses")}
    assert ("torch.nn", False) in found
    assert ("grpo_jax.core.masking", False) in found
    assert ("bridges.clip", False) in found
    assert {("open_clip", True), ("transformers", True), ("bridges", True)} <= found
    assert not any(module == "diffusers" for module, _ in found)
    assert ("grpo_jax.models.cache", False) in {
        item[:2] for item in read_imports("from . import cache", "grpo_jax.models", package=True)
    }


def test_importing_the_package_is_light():
    """Neither torch nor a Hugging Face library, and no backend started: that would take the user's cards."""
    code = (
        "import sys, grpo_jax, grpo_jax.core.losses, grpo_jax.core.advantages, grpo_jax.core.logprobs, "
        "grpo_jax.training.trainer, "
        "grpo_jax.sampling.sampler, grpo_jax.train\n"
        "heavy = {'torch', 'transformers', 'diffusers', 'open_clip', 'bridges'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'importing started a backend'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
