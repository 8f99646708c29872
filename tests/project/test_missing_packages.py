"""Without an extra: what needs it says so in one line, what does not goes on."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from support.missing_packages import ROOT, without

from grpo_jax.errors import EXTRAS
from grpo_jax.models.hf import load_folder
from grpo_jax.runs.checkpoint import Checkpoints

DIFFUSION = ("torch", "torchvision", "diffusers", "open_clip", "accelerate")


def python(folder, packages, *arguments):
    """Runs Python where packages are missing."""
    environment = without(folder / "hidden", *packages)
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
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


@pytest.mark.parametrize(
    ("packages", "command", "missing", "extra"),
    [
        (DIFFUSION, ["grpo_jax.train"], "torch", "diffusion"),
        (DIFFUSION, ["grpo_jax.train", "--plan"], "torch", "diffusion"),
        (DIFFUSION[1:], ["grpo_jax.train"], "diffusers", "diffusion"),
        (DIFFUSION, ["grpo_jax.evaluate", "--run", "REWRITER"], "torch", "diffusion"),
        (DIFFUSION, ["bridges.miniature.build", "check"], "torch", "diffusion"),
        (["sklearn"], ["grpo_jax.train", "--config", "recommendation_quick"], "sklearn", "recommendation"),
        (
            ["qwix"],
            ["grpo_jax.train", "--task=text", "--rewards=[{name: a.py:f}]", "--policy.lora.rank=2",
             "--policy.quantised=int8"],
            "qwix",
            "quantised",
        ),
    ],
)  # fmt: skip
def test_commands_name_the_extra(packages, command, missing, extra, rewriter, tmp_path):
    done = python(tmp_path, packages, "-m", *(str(rewriter) if word == "REWRITER" else word for word in command))
    errors = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert errors[-1] == f'error: {missing} is not installed; run pip install "grpo_jax[{extra}]"'
    assert not [line for line in errors[:-1] if not line.startswith("[transformers] PyTorch was not found")]


def test_a_run_from_python_names_the_extra(tmp_path):
    code = """
from grpo_jax.config import Config
from grpo_jax.errors import UserError
from grpo_jax.train import run
try:
    run(Config(run_dir="run"))
except UserError as error:
    print(error)
"""
    done = python(tmp_path, DIFFUSION, "-c", code)
    assert 'torch is not installed; run pip install "grpo_jax[diffusion]"' in done.stdout, done.stderr


def test_what_needs_no_torch_runs_without(rewriter, tmp_path):
    """Exporting and rewriting, as with torch."""
    done = python(tmp_path, DIFFUSION, "-m", "grpo_jax.export", "--run", rewriter, "--out", "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
    code = f"from grpo_jax.predict import load_rewriter; print(load_rewriter({str(rewriter)!r})('a huge crimson disc'))"
    texts = [python(tmp_path, packages, "-c", code).stdout for packages in (DIFFUSION, [])]
    assert texts[0] == texts[1] and texts[0].strip()


@pytest.mark.slow
def test_a_text_task_runs_without_any_extra(tmp_path):
    (tmp_path / "judge.py").write_text("def brief(completions):\n    return [-len(text) for text in completions]\n")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"a {c}"}) + "\n" for c in "abcdefghijkl"))
    small = ["--training.prompts_per_batch=4", "--training.max_steps=1", "--training.inner_epochs=1",
             "--sampling.group_size=2", "--sampling.max_new_tokens=4", "--algorithm.kl_coef=0",
             "--evaluation.every=0", "--evaluation.sampled=false"]  # fmt: skip
    task = ["--task=text", "--data.prompts=prompts.jsonl", "--rewards=[{name: judge.py:brief}]", "--watch=[]"]
    done = python(tmp_path, EXTRAS, "-m", "grpo_jax.train", *task, *small, "--run_dir=run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["iterations"] == 1
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
