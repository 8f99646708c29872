"""The scripts of benchmarks/, docs/, scripts/ and examples/: their calls fit, and the shortest runs work."""

import json
import os
import subprocess
import sys

import pytest
from support import import_checks
from support.imports import ROOT

from grpo_jax.config.command_line import parse

BENCHMARKS = ROOT / "benchmarks"
SHORT = """--training.max_steps 1 --training.save_every 0 --training.prompts_per_batch 2 --sampling.group_size 2
--evaluation.every 0 --evaluation.prompts 2 --evaluation.validation_prompts 0"""
MODEL = f"--model FOLDER/model --seeds 1 --out FOLDER --policy.lora.rank 2 {SHORT}"
RUNS = {
    "miniature": f"--seeds 0 --variants shuffled --out FOLDER {SHORT}",
    "joint": f"--arms shuffled canonical --seeds 1 --out FOLDER {SHORT}",
    "several_rewards": f"--arms shuffled --scales 1 --seeds 1 --out FOLDER {SHORT}",
    "several_rewards_text": f"--arms grpo_conditioned {MODEL}",
    "small_writer": f"--arms shuffled {MODEL} --data.max_prompt_tokens 600",
    "grpo_iteration": "--cases tiny --threads 1 --rounds 1 --iterations 1 --out FOLDER/out.json",
    "evidence/vision": f"--arms seeing --seeds 0 --out FOLDER {SHORT}",
    "recommendation/sasrec": "--config recommendation_quick --epochs 1 --limit 50",
    "scaling/farm": "--replicas 1 --seconds 0.01 --batches 1 --sizes 8 --pictures 4 --repeats 1 --no_miniature",
}
"""The other benchmarks take real weights, hours, or another test's time (faults, CartPole, absent GPUs)."""


def test_calls_fit_the_functions():
    """Of the scripts that no test runs, too."""
    paths = import_checks.sources("benchmarks", "docs", "examples", "scripts")
    assert not [line for path in paths for line in import_checks.unfit_calls(path)]


def test_settings_are_fields(monkeypatch, tmp_path):
    """Those of runs that take too long, or real weights."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "evidence"))
    import first_update
    import miniature
    import reward_ours
    import reward_work
    import several_rewards
    import several_rewards_text
    import small_writer
    import vision

    texts = [several_rewards_text.SETTINGS.split(), small_writer.SETTINGS.split()]
    arms = [["--config", "prompt_refinement_miniature", *options] for options in vision.ARMS.values()]
    run = first_update.our_command("tiny", tmp_path)[2:]
    for options in (*miniature.VARIANTS.values(), several_rewards.SETTINGS, *texts, *arms, run):
        parse(options)
    given = reward_work.Assignment(tmp_path, tmp_path / "rows.jsonl", 0, 1, "layer", 0.0, tmp_path / "out.json")
    assert reward_ours.config_of(given).policy.lora.rank == reward_work.RANK


def test_the_requests_of_the_small_writer_are_chats(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import small_writer

    small_writer.write_requests(tmp_path / "requests.jsonl", {"train": 40, "test": 2})
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [message["role"] for message in rows[-1]["prompt"]] == ["user", "assistant"] * 3 + ["user"]
    assert [row["split"] for row in rows].count("test") == 2 and len(rows) == 39


@pytest.mark.wide
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs(name, tmp_path):
    """At its smallest, by its command."""
    if "--model" in RUNS[name]:
        from support.tiny_models import causal_lm

        causal_lm(tmp_path / "model")
    words = RUNS[name].replace("FOLDER", str(tmp_path)).split()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *words], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "|" in done.stdout or json.loads(done.stdout), done.stdout
