"""Without an extra: what needs it says so in one line, what does not goes on."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from support.missing_packages import ROOT, without

from grpo_jax import load_rewriter
from grpo_jax.errors import EXTRAS
from grpo_jax.models.hf import load_folder
from grpo_jax.runs.checkpoint import Checkpoints

DIFFUSION = ("torch", "torchvision", "diffusers", "open_clip", "accelerate")


def python(folder, packages, *arguments):
    """Runs Python where packages are missing."""
    environment = without(folder / "hidden", *packages)
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory):
    """A run of the miniature, as far as evaluating and exporting need one."""
    from bridges import miniature
    from grpo_jax.config import to_yaml
    from grpo_jax.config.command_line import parse

    folder = tmp_path_factory.mktemp("rewriter")
    (folder / "config.yaml").write_text(to_yaml(parse(["--config", "prompt_enhancement_miniature"])))
    params = load_folder(miniature.path("policy")).params
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save_final(1, {"variables": {"params": params}}, {"progress": {}})
    return folder


COMMANDS = """
import contextlib, importlib, io, json, sys
for module, *arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = importlib.import_module(module).main(arguments)
    print(json.dumps([code, said.getvalue().splitlines()[-1]]))
"""
PYTHON = """
from grpo_jax import UserError, load_rewriter, make_config, run
from grpo_jax import export
try:
    run(make_config(task="prompt_enhancement", policy={"path": "miniature"}, data={"prompts": "miniature"},
                    run_dir="run"))
except UserError as error:
    print(error)
assert export.main(["--run", sys.argv[2], "--out", "out"]) == 0
print(load_rewriter(sys.argv[2])("a huge crimson disc"))
"""
TEXT = ["--task=text", "--policy.path=miniature", "--data.prompts=prompts.jsonl", "--rewards=[{name: judge.py:brief}]"]
SHORT = "--sampling.max_new_tokens=8"  # the policy of this test has 128 positions


def refused_for(module, extra):
    """What COMMANDS prints of a command that a package is missing for."""
    return [2, f'error: {module} is not installed; run pip install "grpo_jax[{extra}]"']


def test_without_torch_commands_and_python_name_the_extra_and_what_needs_none_goes_on(rewriter, tmp_path):
    """Exporting and rewriting, as with torch."""
    commands = [["grpo_jax.train"], ["grpo_jax.train", "--plan"], ["grpo_jax.evaluate", "--run", str(rewriter)]]
    done = python(tmp_path, DIFFUSION, "-c", COMMANDS + PYTHON, json.dumps(commands), rewriter)
    assert done.returncode == 0, done.stderr
    *refused, refusal, exported, text = done.stdout.splitlines()
    assert [json.loads(line) for line in refused] == [refused_for("torch", "diffusion")] * 3
    assert refusal == 'torch is not installed; run pip install "grpo_jax[diffusion]"'
    assert exported.startswith("out: the policy of") and (tmp_path / "out" / "model.safetensors").is_file()
    assert text == load_rewriter(rewriter)("a huge crimson disc") != ""


def test_without_sklearn_and_qwix_commands_name_their_extras(text_files):
    commands = [
        ["grpo_jax.train", "--config", "recommendation_quick"],
        ["grpo_jax.train", *TEXT, SHORT, "--policy.lora.rank=2", "--policy.quantised=int8"],
    ]
    done = python(text_files, ["sklearn", "qwix"], "-c", COMMANDS, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    expected = [refused_for("sklearn", "recommendation"), refused_for("qwix", "quantised")]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


@pytest.fixture
def text_files(tmp_path):
    """A folder with prompts and a reward."""
    (tmp_path / "judge.py").write_text("def brief(completions):\n    return [-len(text) for text in completions]\n")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"a {c}"}) + "\n" for c in "abcdefghijklmnopqrstuvwxyz")
    )
    return tmp_path


@pytest.mark.slow
def test_a_text_task_runs_without_any_extra(text_files):
    small = ["--training.prompts_per_batch=4", "--training.max_steps=1", "--sampling.group_size=2",
             "--sampling.max_new_tokens=4", "--evaluation.every=0", "--evaluation.sampled=false"]  # fmt: skip
    done = python(text_files, EXTRAS, "-m", "grpo_jax.train", *TEXT, *small, "--run_dir=run")
    assert done.returncode == 0, done.stderr
    assert json.loads((text_files / "run" / "summary.json").read_text())["iterations"] == 1
    assert "no TensorBoard events" in done.stdout


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
