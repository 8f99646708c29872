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

HLO = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[4,8]{1,0})->f32[4,2]{1,0}}

%fused_computation (param_0: f32[4,8], param_1: f32[8,2]) -> f32[4,2] {
  %param_0 = f32[4,8]{1,0} parameter(0)
  %exp.1 = f32[4,8]{1,0} exponential(%param_0)
  %param_1 = f32[8,2]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,2]{1,0} dot(%exp.1, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/layers/o_proj/dot_general"}
}

%moved (param_2: f32[6,4], param_3: s32[]) -> f32[1,4] {
  %param_2 = f32[6,4]{1,0} parameter(0)
  %param_3 = s32[] parameter(1)
  %one = s32[] constant(1)
  %next = s32[] add(%param_3, %one)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,4]{1,0} dynamic-slice(%param_2, %next, %zero), dynamic_slice_sizes={1,4}
}

ENTRY %main (x: f32[4,8], w: f32[8,2]) -> f32[4,2] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = f32[8,2]{1,0} parameter(1)
  %both = (s32[], /*index=1*/f32[4,2]{1,0}) while(%x), condition=%c, body=%b
  %filled = f32[4,8]{1,0} broadcast(%one), dimensions={}
  %fused = f32[4,2]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_computation
  %gradient = f32[8,2]{1,0} dot(%x, %fused), lhs_contracting_dims={0}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/transpose(jvp())/layers/o_proj/transpose"}
  ROOT %moving = f32[1,4]{1,0} fusion(%x, %one), kind=kLoop, calls=%moved
}
"""


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


def test_instructions_their_products_and_their_kinds(scripts):
    module = scripts.hlo.read(HLO)
    assert module.instructions["both"].opcode == "while" and module.instructions["both"].shape.startswith("(s32[]")
    assert module.computations["moved"][-1] == "slice" and module.computations["main"][0] == "x"
    assert module.flops("fused") == 2 * 4 * 2 * 8 and module.flops("gradient") == 2 * 8 * 2 * 4
    assert module.flops("filled") == 0
    kinds = {name: module.kind(name, 99) for name in ("fused", "gradient", "moving", "filled", "exp.1")}
    assert kinds == {
        "fused": "products: layers, forward",
        "gradient": "products: layers, gradients of weights",
        "moving": scripts.hlo.COPIES,  # the sum is of the slice's index
        "filled": scripts.hlo.BROADCASTS,
        "exp.1": scripts.hlo.ELEMENTWISE,
    }
    assert module.kind("fused", 8) == "products: head, forward"


def test_what_a_loop_runs_is_counted_once(scripts):
    module = scripts.hlo.read(HLO)
    events = {(7, "both"): (1, 5.0), (7, "fused"): (3, 2.0), (7, "moving"): (3, 3.0)}
    found = scripts.operators.join(events, {7: module}, 99)
    assert [(one.name, one.calls, one.seconds, one.flops) for one in found] == [
        ("moving", 3, 3.0, 0),
        ("fused", 3, 2.0, 3 * 128),
    ]
    assert found[1].place == "jit(f)/layers/o_proj/dot_general"
    lines = scripts.operators.kinds_table(found).splitlines()
    assert lines[2] == "| copies, transposes, slices | 3 | 60.0% |  |  |"
    assert lines[-1].startswith("| all | 5 | 100.0% | 3.84e-07 |")
    assert len(scripts.operators.top_table(found, 1).splitlines()) == 3


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
@pytest.mark.parametrize(
    "phase", ["logprobs", *(pytest.param(name, marks=pytest.mark.wide) for name in ("sampling", "update"))]
)
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


def test_exponents_are_those_of_powers(scripts):
    growth = scripts.growth
    rows = [
        {
            "curve": "T",
            "size": size,
            "ours": dict.fromkeys(growth.PARTS, 3 * size**1.5),
            "trl": {"error": "exit status -9: killed\nmore"} if size == 4 else dict.fromkeys(growth.PARTS, 2.0 * size),
            "arithmetic": dict.fromkeys(growth.PARTS, 2e9 * size**2),
        }
        for size in (1, 2, 4)
    ]
    assert growth.exponents(rows, "T", "ours")["total"] == {"last": pytest.approx(1.5), "all": pytest.approx(1.5)}
    assert growth.exponents(rows, "T", "trl")["update"]["all"] == pytest.approx(1)
    assert growth.exponents(rows[:1], "T", "ours") == {}
    lines = growth.exponents_table(rows, ["T"], ["ours", "trl"]).splitlines()
    assert lines[-1] == "| T | iteration | 1.50 (1.50) | 1.00 (1.00) | 2.00 (2.00) |"
    lines = growth.curve_table(rows, "T", ["ours", "trl"]).splitlines()
    units = 8  # completions
    assert lines[2] == f"| 1 | 3 | 2 | 1.5 | {3e6 / units:.0f} | {2e6 / units:.0f} | 2 |"
    assert lines[4] == f"| 4 | 24 | – | – | {24e6 / units / 4:.0f} | – | 32 |"
    assert lines[-1] == "TRL failed at T = 4: exit status -9: killed"


def test_a_curve_grows_one_size_and_its_work_with_it(scripts):
    growth, work = scripts.growth, scripts.work
    for curve in growth.CURVES.values():
        cases = [curve.case(size) for size in curve.sizes]
        assert all(getattr(case, curve.field) == size for case, size in zip(cases, curve.sizes, strict=True))
        flops = [growth.arithmetic(case)["total"] for case in cases]
        assert flops == sorted(flops) and all(case.positions >= case.prompt_tokens + case.new_tokens for case in cases)
    # Only what needs more positions has a model folder of its own.
    long = growth.CURVES["L"].case(4096)
    assert long.shape == f"{growth.BASE.shape}-4160" and long.positions == 4160
    assert all(case.positions == 1024 and "1024" not in case.shape for case in work.CASES.values())
    with pytest.raises(SystemExit):
        growth.options(["--sizes", "2", "4"])
    assert growth.options(["--libraries", "trl", "ours"]).libraries == ["ours", "trl"]


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
