"""The benchmarks of cost: operators joined with their HLO count every product once, and growth has its exponents."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
BESIDE = ("floor", "grpo_iteration", "growth", "hlo", "iteration_work", "operators")


@pytest.fixture
def scripts(monkeypatch):
    """The modules, as the commands import them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "cost"))
    before = {name: sys.modules.pop(name) for name in BESIDE if name in sys.modules}
    path = list(sys.path)
    import floor
    import growth
    import hlo
    import iteration_work
    import operators

    yield SimpleNamespace(floor=floor, growth=growth, hlo=hlo, work=iteration_work, operators=operators)
    sys.path[:] = path
    for name in BESIDE:
        del sys.modules[name]
    sys.modules.update(before)


def run(script: str, out: str, *arguments: str, folder: Path) -> tuple[str, dict]:
    """A command's output, and the JSON that it wrote."""
    path = folder / "out.json"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, str(BENCHMARKS / "cost" / script), *arguments, out, str(path)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(path.read_text())


# ------------------------------------------------------------------------------------------------------- operators


def expected(scripts, phase: str) -> dict[str, float]:
    """FLOPs of the products of `tiny` by kind: attention whole, and what the update computes again."""
    case = scripts.work.CASES["tiny"]
    rows, new = case.prompts * case.group, case.new_tokens - 1  # the last token is no input
    tokens = case.prompts * case.prompt_tokens + rows * new
    layers = 2 * case.layers * scripts.floor.layer_weights(case) * tokens
    head = 2 * case.vocabulary * case.hidden  # of one row
    # While sampling, each token looks at the whole cache, filled or not.
    width = case.prompt_tokens + (case.new_tokens if phase == "sampling" else new)
    attention = scripts.floor.attention_flops(case, case.prompts * case.prompt_tokens**2 + rows * new * width)
    # The sampler's first tokens share their prompt's logits; log-probabilities take every token's own.
    head *= case.prompts + rows * new if phase == "sampling" else rows * case.new_tokens
    forward = {"layers, forward": layers, "head, forward": head, "attention, forward": attention}
    if phase != "update":
        return forward
    return {
        **forward,
        "layers, gradients of inputs": layers,
        "layers, gradients of weights": layers,
        "attention, computed again": attention,
        "attention, gradients of inputs": 2 * attention,
        "head, computed again": head,
        "head, gradients of inputs": head,
        "head, gradients of weights": head,
    }


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("phase", ["logprobs", "sampling", "update"])
def test_a_phases_products_are_those_of_its_arithmetic(scripts, phase, tmp_path):
    """Each product once and none missing; and their sum is near what the floor asks for."""
    printed, told = run("operators.py", "--json", "--case", "tiny", "--phase", phase, "--top", "5", folder=tmp_path)
    counted = {}
    for one in told["operators"]:
        assert one["calls"] > 0 and one["seconds"] >= 0
        if one["flops"]:
            kind = one["kind"].removeprefix("products: ")
            counted[kind] = counted.get(kind, 0) + one["flops"]
    assert counted == expected(scripts, phase)
    assert told["floor_flops"] < sum(counted.values()) < 1.2 * told["floor_flops"]
    assert "| products: layers, forward | " in printed and "| place |" in printed
    assert not {one["name"].split(".")[0] for one in told["operators"]} & {"while", "call", "conditional"}


# ---------------------------------------------------------------------------------------------------------- growth


@pytest.mark.slow
@pytest.mark.wide
def test_growth_measures_and_tells(tmp_path):
    options = ["--curves", "G", "--sizes", "4", "2", "--libraries", "ours", "--iterations", "1"]
    printed, told = run("growth.py", "--out", *options, folder=tmp_path)
    assert [row["size"] for row in told["results"]] == [2, 4]
    for row in told["results"]:
        assert row["ours"]["total"] > 0 and row["ours"]["peak_mib"] > 10 and row["arithmetic"]["total"] > 0
    assert set(told["exponents"]["G"]) == {"ours", "arithmetic"}
    assert 0 < told["exponents"]["G"]["arithmetic"]["total"]["all"] < 1  # the prompts' part does not grow
    assert "| G | ours s | ours µs per completion | GFLOP |" in printed
    assert "| curve | phase | ours | arithmetic |" in printed
