"""The layout of the packages: allowed imports, and lazy loading."""

import graphlib
import re
import subprocess
import sys

import pytest
from support import import_checks
from support.imports import FILES, ROOT, imports_of, target, within

import grpo_jax
from grpo_jax.config.judge import Judge
from grpo_jax.tasks.task import Task

ROOMS = (
    *("errors", "core", "config", "models", "sampling", "rollout", "rewards", "training", "tasks", "runs", "reports"),
    *("planning", "cartpole", "commands"),
)
"""From the ground up: each imports only from those before it."""
COMMANDS = ("train", "evaluate", "export", "predict", "recommend", "demo", "__main__")
HEAVY = ("torch", "torchvision", "transformers", "diffusers", "open_clip", "accelerate")
KNOWN_BY_BRIDGES = (
    "grpo_jax.core.flow",
    "grpo_jax.errors",
    *(f"grpo_jax.config.{name}" for name in ("fields", "files", "judge", "named", "sections")),
)
TASKS = re.compile(r"(?<!\w)(prompt_enhancement|recommendation|miniature|ndcg|pixel_accuracy)(?!\w)")

OURS = [name for name in FILES if within(name, ["grpo_jax"])]
BRIDGES = [name for name in FILES if within(name, ["bridges"])]


def room_of(module: str) -> str:
    """The room that a module of grpo_jax stands in; "" for the package itself, whose names are for users."""
    room = module.removeprefix("grpo_jax").removeprefix(".").partition(".")[0]
    return "commands" if room in COMMANDS else room


def refuse(names, wrong, *, types: bool = False) -> None:
    """Fails with every import, file and line, that `wrong(name, found)` says may not be."""
    offending = [
        f"{FILES[name].relative_to(ROOT)}:{found.line} imports {found.module}"
        for name in names
        for found in imports_of(name, types)
        if wrong(name, found)
    ]
    assert not offending, "\n" + "\n".join(offending)


def is_foreign(module: str, *packages: str) -> bool:
    """Whether a module is neither Python's own nor of the packages."""
    top = module.partition(".")[0]
    return top not in packages and top not in sys.stdlib_module_names


def test_every_module_stands_in_a_room():
    assert {room_of(name) for name in OURS if name != "grpo_jax"} == set(ROOMS)


def test_a_room_imports_only_from_the_rooms_before_it():
    """Also inside functions, and for types."""

    def wrong(name, found):
        if not within(found.module, ["grpo_jax"]) or name == "grpo_jax":
            return False
        other = room_of(target(found.module))
        return other == "" or ROOMS.index(other) > ROOMS.index(room_of(name))

    refuse(OURS, wrong, types=True)


def test_the_page_has_the_rooms_in_this_order():
    page = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    (listing,) = re.findall(r"^grpo_jax/\n((?:  .*\n)+)", page, re.MULTILINE)
    assert [room_of(f"grpo_jax.{name}") for name in re.findall(r"^  (\w+)", listing, re.MULTILINE)] == list(ROOMS)
    assert all((ROOT / "grpo_jax" / name).is_file() for name in re.findall(r"\w+\.py", listing.replace("task.py", "")))


def test_no_circle_of_modules():
    """Imports inside functions and for types count."""
    graph = {name: {target(found.module) for found in imports_of(name, True)} & FILES.keys() - {name} for name in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules


def test_the_picture_of_the_rooms_is_that_of_the_imports(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import make_architecture

    assert make_architecture.render() == make_architecture.TARGET.read_text(encoding="utf-8")
    assert make_architecture.room_graph().keys() - {"bridges"} == set(ROOMS) - {"errors", "rewards"}


def test_the_core_is_jax_alone():
    core = [name for name in OURS if room_of(name) == "core"]
    refuse(core, lambda _, found: is_foreign(found.module, "jax", "numpy", "grpo_jax"))


def test_only_models_know_flax():
    refuse([name for name in OURS if room_of(name) != "models"], lambda _, found: within(found.module, ["flax"]))


def test_torch_and_the_libraries_of_models_are_imported_where_they_are_used():
    refuse(OURS, lambda _, found: within(found.module, [*HEAVY, "bridges"]) and not found.lazy)


def test_who_asks_the_bridges():
    """The rooms that put a run together or plan one, and tasks that need what ships there."""
    rooms = ("tasks", "runs", "planning")
    refuse(OURS, lambda name, found: within(found.module, ["bridges"]) and room_of(name) not in rooms)


def test_bridges_know_errors_the_config_and_the_losses_of_velocities():
    def wrong(name, found):
        return within(found.module, ["grpo_jax"]) and not within(target(found.module), KNOWN_BY_BRIDGES)

    refuse(BRIDGES, wrong, types=True)


def test_judges_import_nothing_heavy_before_they_load():
    judges = [name for name in BRIDGES if within(name, ["bridges.judges"])]
    assert len(judges) >= 4
    refuse(judges, lambda _, found: not found.lazy and is_foreign(found.module, "grpo_jax", "bridges"))


def test_the_ground_truth_is_numpy_alone():
    """No network may be part of the checker that says whether a picture is right."""
    refuse(["bridges.miniature.world"], lambda _, found: is_foreign(found.module, "numpy"))


def home_of(module: str, packages) -> str:
    """The task's folder or file, or the judge's file, that a module is or lies in; "" for others."""
    for package in packages:
        rest = module.removeprefix(f"{package}.")
        inner = f"{package}.{rest.partition('.')[0]}"
        if rest == module:
            continue
        if package != "grpo_jax.tasks" or FILES[inner].name == "__init__.py" or inner.endswith("_task"):
            return inner
    return ""


def test_nothing_imports_a_task_or_a_judge_but_itself():
    """They are found by the name that a config says: no list of them, and none is in another's way."""
    packages = ("grpo_jax.tasks", "bridges.judges")
    homes = {home_of(name, packages) for name in FILES} - {""}
    assert len([home for home in homes if within(home, ["grpo_jax.tasks"])]) >= 4 and len(homes) >= 6

    def wrong(name, found):
        home = home_of(target(found.module), packages)
        return home not in ("", home_of(name, packages))

    refuse(FILES, wrong)


def test_no_task_is_known_by_name():
    """But for what --help says is trained by default, and the extras, which are called like tasks."""
    found = {
        (str(path.relative_to(ROOT / "grpo_jax")), word)
        for path in (ROOT / "grpo_jax").rglob("*")
        if path.suffix in (".py", ".txt") and "tasks" not in path.relative_to(ROOT).parts
        for word in TASKS.findall(path.read_text(encoding="utf-8"))
    }
    extras = {("errors.py", "recommendation")}
    assert found == {("config/command_line.py", "miniature")} | extras


def test_the_protocols_of_tasks_and_judges_stay_small():
    for protocol, most in ((Task, 8), (Judge, 3)):  # a judge's fourth is the call of what it loads
        members = [name for name in vars(protocol) if not name.startswith(("_", "model_"))]
        assert len(members) <= most, members


def test_importing_is_light():
    """Neither JAX nor a model; the judges' files load no library; and no backend starts, which would take cards."""
    judges = [name for name in BRIDGES if within(name, ["bridges.judges"])]
    code = f"""
import sys, importlib, grpo_jax
assert not {{"jax", "flax", *{HEAVY}}} & set(sys.modules), "import grpo_jax"
for name in {judges}:
    importlib.import_module(name)
assert not {{"jax", "flax", *{HEAVY}}} & set(sys.modules), "judges"
import grpo_jax.training.update, grpo_jax.sampling.sampler, grpo_jax.train, grpo_jax.runs.trainer
assert not {{*{HEAVY}, "bridges.placement"}} & set(sys.modules), "commands"
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend"
from grpo_jax.models.hf import folder as hf
hf.load_tokenizer("bridges/miniature/weights/policy")
assert "torch" not in sys.modules, "a tokenizer"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore")  # of other people's packages, when they are imported
def test_every_import_leads_somewhere():
    """Of modules that no other test loads, inside functions, and of scripts."""
    dangling = [line for path in import_checks.sources() for line in import_checks.dangling(path)]
    assert not [*import_checks.import_failures(), *dangling]


def test_public_names_are_there():
    for name in grpo_jax.__all__:
        found = getattr(grpo_jax, name)
        assert getattr(found, "__name__", name) == name and name in dir(grpo_jax)
    with pytest.raises(AttributeError, match="has no attribute 'registry'"):
        grpo_jax.__getattr__("registry")
