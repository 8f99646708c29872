"""The source archive and its wheel hold all that a user needs, and run outside the checkout."""

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import pytest
from support.text_task import ROOT

from grpo_jax.errors import EXTRAS

UNAVAILABLE = ("Could not find a version that satisfies", "NewConnectionError", "No module named build")


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The folder of both, by the command of docs/releasing.md."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    told = built.stdout + built.stderr
    if built.returncode and any(reason in told for reason in UNAVAILABLE):
        pytest.skip(f"the build backend cannot be installed here: {told.strip().splitlines()[-1]}")
    assert built.returncode == 0, told
    return folder


@pytest.fixture(scope="module")
def wheel(archives):
    (path,) = archives.glob("grpo_jax-*.whl")
    return path


@pytest.mark.wide  # before a release (docs/releasing.md)
def test_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = [path for package in ("grpo_jax", "bridges") for path in (ROOT / package).rglob("*") if path.is_file()]
    ours = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert ours <= set(names), f"ignored by git, perhaps: {sorted(ours - set(names))}"
    for config in (ROOT / "configs").glob("*.yaml"):
        assert f"grpo_jax/configs/{config.name}" in names
    assert any(name.endswith("entry_points.txt") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"grpo_jax", "bridges"}


@pytest.mark.wide  # before a release (docs/releasing.md)
def test_the_source_archive_has_what_git_has(archives):
    """But for what is of the repository alone."""
    (path,) = archives.glob("grpo_jax-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    missing = {name for name in files - names if not name.startswith((".ci/", ".github/", ".pre-commit"))}
    assert len(files) > 500 and not missing


def test_every_extra_of_users_is_tried_by_itself():
    """`make test-install` knows what each is for; the others are for who works on the project."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    tried = runpy.run_path(str(ROOT / "scripts" / "test_install.py"))
    own = {"test", "oracles", "lint", "docs", "figures"}
    assert tried["CHECKS"].keys() == {tried["ALONE"], tried["SOURCE"], *extras} - own


def test_extras_bring_what_they_are_named_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {
        extra: {"".join(c if c.isalnum() else "-" for c in line.partition(">")[0]).lower() for line in lines}
        for extra, lines in extras.items()
    }
    installed = packages_distributions()
    for module, extra in EXTRAS.items():
        if module in installed:
            assert {name.lower().replace("_", "-") for name in installed[module]} & brought[extra], module


@pytest.mark.parametrize(("goal", "extras"), [("train", 1), ("test", 2)])
def test_make_installs_what_its_goal_needs(goal, extras, tmp_path):
    """First the packages of a run alone; the tests' only for the tests. By uv, else pip; by pip from a named index."""
    command = ["make", "-n", goal, f"VENV={tmp_path / 'absent'}"]
    own = {name: value for name, value in os.environ.items() if name not in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")}
    for index in ({}, {"PIP_EXTRA_INDEX_URL": "https://example.org"}):
        done = subprocess.run(command, cwd=ROOT, env=own | index, capture_output=True, text=True, check=True)
        installed = re.findall(r'(.*) -c .* -e "\.\[(.*)\]" \|\| (.*) -c .* -e "\.\[(.*)\]"', done.stdout)
        assert len(installed) == extras and installed[0][1] == "diffusion"
        assert ("test" in installed[-1][1]) == (goal == "test")
        for first, wanted, then, same in installed:
            assert wanted == same and " -m pip install " in then
            assert first == "false" if index else " -m uv pip install " in first


OUTSIDE = """
import bridges, grpo_jax.__main__
from bridges import bundled
from grpo_jax.config.command_line import parse
grpo_jax.__main__.main(["--version"])
print(grpo_jax.__file__)
print(bridges.__file__)
print(parse(["--config", "prompt_enhancement_miniature"]).policy.path)
there = bundled("miniature", "policy")  # as it is where the weights were fetched
print((there / "model.safetensors").stat().st_size if there else 1)
"""


@pytest.mark.wide  # before a release (docs/releasing.md)
def test_version_configs_and_miniature_are_there_outside_the_checkout(wheel, tmp_path):
    """The version is that of the wheel's name, of pyproject.toml, CITATION.cff and the changelog's first heading."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", OUTSIDE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    version, *files, policy, weights = done.stdout.splitlines()
    citation, changes = ((ROOT / name).read_text() for name in ("CITATION.cff", "CHANGELOG.md"))
    (cited,) = re.findall(r"^version: (.*)\ndate-released: ", citation, re.MULTILINE)
    headings = re.findall(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", changes, re.MULTILINE)
    assert version == wheel.name.split("-")[1] == cited == headings[0]
    assert len(files) == 2 and all(path.startswith(str(tmp_path / "site")) for path in files)
    assert policy == "miniature" and int(weights) > 0
