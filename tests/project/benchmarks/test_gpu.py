"""What measures a card runs on the CPU at tiny sizes, all of it; and what it says of what it cannot do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu"
BESIDE = {"driver", "outcome"}


@pytest.fixture
def scripts(monkeypatch):
    """The driver and what becomes of measurements, as the script imports them."""
    monkeypatch.syspath_prepend(str(SCRIPT))
    import driver
    import outcome

    yield driver, outcome
    for name in BESIDE:
        del sys.modules[name]


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


def test_a_measurement_is_left_out_or_fails_alone(scripts):
    _, outcome = scripts
    kept = []

    def missing():
        outcome.needs("no_such_package")

    def broken():
        raise ValueError("first line\nsecond")

    measurements = {"one": missing, "two": broken, "three": lambda: outcome.compared(2.0, 1.0), "four": dict}
    outcome.work(measurements, 60, lambda rows: kept.append(dict(rows)))
    assert [len(rows) for rows in kept] == [1, 2, 3, 4]
    found = kept[-1]
    assert found["one"] == {"skipped": "the package no_such_package is not installed"}
    assert found["two"]["failed"] == "ValueError: first line"
    assert found["three"]["agrees"] is False and set(found["four"]) == {"took"}
    outcome.work({"late": broken}, 0, lambda rows: kept.append(rows))
    assert kept[-1] == {"late": {"skipped": "no time was left"}}


def test_what_failed_or_differs_stands_in_the_table_and_in_the_exit_code(scripts):
    driver, _ = scripts
    rows = {"a": {"difference": 2.0, "agrees": False, "took": 1.0}, "b": {"skipped": "no card"}}
    lines = driver.table({"part": {"measurements": rows, "failed": "ended with -9"}}).splitlines()
    assert lines[2:] == [
        "| part | a | **differs** | difference 2 |",
        "| part | b | skipped: no card |  |",
        "| part | | failed: ended with -9 | |",
    ]
    wells = [driver.is_well({"measurements": {name: rows[name]}}) for name in "ab"]
    assert wells == [False, True] and not driver.is_well({"measurements": {}, "failed": "ended with 1"})
    assert driver.run_parts(["update"], True, 1.0, Path("unused"))["update"]["skipped"] == "no time was left"


def test_a_part_that_takes_too_long_is_ended_and_the_others_are_not_lost(scripts, tmp_path):
    driver, _ = scripts
    told = driver.run_worker(["--worker", "resuming", "--tiny"], 0.2, tmp_path)
    assert told.found is None and told.ending == "ended after 0 s"
    assert driver.run_worker(["--worker", "no_such_part"], 60, tmp_path).ending == "ended with 2"
