"""What measures a card runs on the CPU at tiny sizes, all of it; and what it says of what it cannot do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One run without a card: what it printed, and its JSON."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--out", str(out)]
    done = subprocess.run(command, env=environment, cwd=out.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(out.read_text())


@pytest.mark.wide
@pytest.mark.slow
def test_without_a_card_all_parts_run_at_tiny_sizes(ran):
    printed, report = ran
    assert printed.startswith("JAX sees no GPU: tiny sizes on the CPU")
    assert report["tiny"] and report["backend"] == "cpu" and report["versions"]["jax"] and report["date"]
    parts = {name: part["measurements"] for name, part in report["parts"].items()}
    assert list(parts) == ["correctness", "handover", "iteration", "decode-0.5B", "update", "resuming"]
    left_out = {name for rows in parts.values() for name, row in rows.items() if "skipped" in row}
    assert left_out - {"0.5B, vLLM"} == {
        "torch to JAX, in flight on a stream of its own",
        "memory shared without preallocation",
        "miniature, resumed",
    }
    for name, rows in parts.items():
        for measurement in rows:
            assert f"| {name} | {measurement} |" in printed


@pytest.mark.wide
@pytest.mark.slow
def test_what_is_compared_agrees_and_what_is_timed_has_figures(ran):
    parts = {name: part["measurements"] for name, part in ran[1]["parts"].items()}
    assert all(row["agrees"] for row in parts["correctness"].values())
    (against_torch,) = (row for name, row in parts["correctness"].items() if name.startswith("qwen2, logits"))
    assert 0 < against_torch["difference"] < against_torch["allowed"]
    assert parts["resuming"]["text, resumed"]["moved"] and parts["resuming"]["text, resumed"]["same_weights"]
    for library in ("grpo_jax", "transformers"):
        assert 0 < parts["decode-0.5B"][f"0.5B, 8 completions, {library}"]["of_the_floor"] < 1
    for library in ("grpo_jax", "PyTorch"):
        assert 0 < parts["update"][f"0.5B, update, {library}"]["mfu"] < 1
    values = [row["value"] for name, row in parts["update"].items() if name.startswith("log-probabilities")]
    assert len(values) == 3 and max(values) - min(values) < 0.01
    iteration = parts["iteration"]["7 B with LoRA, an iteration"]
    assert iteration["draw_seconds"] > 0 and "drawn_by" not in iteration
    assert parts["iteration"]["its peak memory beside --plan's"]["predicted_gib"] > 0
