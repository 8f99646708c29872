"""Without any extra: what needs one says so in one line, what does not goes on."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from support.imports import ROOT

from grpo_jax.errors import EXTRAS

HIDE = """
from importlib.machinery import PathFinder

hidden, find = {hidden!r}, PathFinder.find_spec


@classmethod
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find(name, path, target)


PathFinder.find_spec = find_spec
"""
SCRIPT = """
import contextlib, importlib, io, json, sys
refused, trained = json.loads(sys.argv[1])
results = []
for module, *arguments in [*refused, trained]:
    errors, output = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        code = importlib.import_module(module).main(arguments)
    results.append([code, (errors.getvalue() or output.getvalue()).splitlines()])
from grpo_jax import UserError, make_config, run
try:
    run(make_config(task="prompt_enhancement", policy={"path": "miniature"}, data={"prompts": "miniature"},
                    run_dir="run"))
except UserError as error:
    results.append(str(error))
print(json.dumps(results))
"""
TEXT = ["--task=text", "--data.prompts=prompts.jsonl", "--rewards=[{name: judge.py:brief}]"]
SMALL = ["--training.prompts_per_batch=4", "--training.max_steps=1", "--sampling.group_size=2", "--data.held_out=0"]
SMALL += ["--data.max_prompt_tokens=64", "--sampling.max_new_tokens=4", "--policy.remat=none", "--evaluation.samples=0"]


@pytest.mark.wide  # `make test-install` does the same; tests/project/test_house.py has what importing may load
def test_commands_and_python_name_the_extra_and_a_text_run_needs_none(place, tmp_path):
    (tmp_path / "judge.py").write_text("def brief(completions):\n    return [-len(text) for text in completions]\n")
    rows = [json.dumps({"prompt": f"a {letter}"}) for letter in "abcdefghijklmnopqrstuvwxyz"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDE.format(hidden=set(EXTRAS)))
    text = [*TEXT, *SMALL, f"--policy.path={place.policy}"]
    refused = {
        ("grpo_jax.train",): ("torch", "diffusion"),
        ("grpo_jax.train", "--plan"): ("torch", "diffusion"),
        ("grpo_jax.train", "--config", "recommendation_quick"): ("sklearn", "recommendation"),
        ("grpo_jax.train", *text, "--policy.lora.rank=2", "--policy.quantised=int8"): ("qwix", "quantised"),
    }
    trained = ["grpo_jax.train", *text, "--run_dir=text_run"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "hidden"), str(ROOT)])}
    arguments = [sys.executable, "-c", SCRIPT, json.dumps([[*refused], trained])]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *results, training, refusal = json.loads(done.stdout)
    assert [(code, lines[-1]) for code, lines in results] == [
        (2, f'error: {module} is not installed; run pip install "grpo_jax[{extra}]"')
        for module, extra in refused.values()
    ]
    assert training[0] == 0 and any("no TensorBoard events" in line for line in training[1])
    assert json.loads((tmp_path / "text_run" / "summary.json").read_text())["iterations"] == 1
    assert refusal == 'torch is not installed; run pip install "grpo_jax[diffusion]"'


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
