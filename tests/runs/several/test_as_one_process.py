"""A run over several processes gives the results of one process on as many devices."""

import json
import math
import os
import subprocess
import sys

import pytest
from support import xla
from support.processes import announcement, ended
from support.recorded_runs import RUNS, TEXT, TWO, text_config, weights_of
from support.text_task import ROOT, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.wide,  # minutes; the default run over two processes is stopped, killed and resumed in test_several.py
]
REAL = ["--evaluation.prompts", "8", "--evaluation.validation_prompts", "8", "--training.max_steps", "1"]
CASES = {
    "gdpo": [],
    "grpo": ["--algorithm.advantage", "grpo", "--algorithm.preset", "dapo"],
    "kl": TEXT["text_kl"],
    "ppo": ["--algorithm.advantage", "gae", "--algorithm.preset", "bnpo", "--ppo.kl_coef", "0.1"],
    "lora": [*TEXT["text_lora"], "--algorithm.kl_coef", "0.1"],
    "turns with pictures": [*RUNS["refinement"], *REAL],
    "SFT and ranking": [*RUNS["recommendation_quick"], *REAL, "--sft.steps", "3"],
}


def train(folder, processes, devices, arguments):
    """Train over so many processes of so many devices each; what they computed, and the exit codes."""
    command = [sys.executable, "-m", "grpo_jax.train", "--run_dir", str(folder), *arguments]
    command += ["--policy.mesh.fsdp", str(processes * devices)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": xla.devices(devices)}
    told = announcement(processes)
    several = [told | {"JAX_PROCESS_ID": str(number)} for number in range(processes)] if processes > 1 else [{}]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = ended([subprocess.Popen(command, env=environment | one, cwd=ROOT, **pipes) for one in several])
    assert [process.returncode for process in done] == [0] * processes, done[0].stderr
    norms = {name: array["norm"] for name, array in weights_of(folder).items()}
    summary = json.loads((folder / "summary.json").read_text())
    return {"metrics": rows(folder), "evaluation": summary["evaluation"], "weights": norms}


def differing(alone, together, path=""):
    """What differs by more than 1e-5 of the larger; below 1e-6 it is rounding of what should be 0."""
    if isinstance(alone, dict | list):
        assert type(alone) is type(together) and len(alone) == len(together), path
        names = alone if isinstance(alone, dict) else range(len(alone))
        return [found for name in names for found in differing(alone[name], together[name], f"{path}.{name}")]
    if alone == together or alone == pytest.approx(together, rel=1e-5, abs=1e-6, nan_ok=True):
        return []
    return [(path, alone, together)]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_several_processes_compute_what_one_does(name, processes, tmp_path):
    arguments = CASES[name]
    if "--config" not in arguments:
        arguments = ["--config", str(text_config(tmp_path)), *TWO, "--training.minibatches", "1", *arguments]
    alone = train(tmp_path / "alone", 1, processes, arguments)
    together = train(tmp_path / "together", processes, 1, arguments)
    assert all(math.isfinite(norm) for norm in alone["weights"].values())
    assert not differing(alone, together)
