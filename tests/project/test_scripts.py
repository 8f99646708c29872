"""The scripts of benchmarks/, docs/, scripts/ and examples/: their calls fit, and the shortest runs work."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

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
    "three_rewards": f"--arms shuffled --seeds 400 --out FOLDER {SHORT}",
    "reasoning_gym_tasks": "--tasks sums products --arms exact --model FOLDER/model --seeds 1 --steps 1"
    f" --held 2 --out FOLDER {SHORT} --data.max_prompt_tokens 600",
    "small_writer": f"--arms shuffled trl {MODEL} --data.max_prompt_tokens 600 --sft.steps 1 --sft.batch 2",
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
    import three_rewards
    import vision

    writer = [f"{small_writer.SETTINGS} {arm}".split() for arm in small_writer.ARMS.values()]
    texts = [several_rewards_text.SETTINGS.split(), *writer]
    units = [[*three_rewards.SETTINGS, *options] for options in three_rewards.ARMS.values()]
    arms = [["--config", "prompt_refinement_miniature", *options] for options in vision.ARMS.values()]
    run = first_update.our_command("tiny", tmp_path)[2:]
    for options in (*miniature.VARIANTS.values(), several_rewards.SETTINGS, *units, *texts, *arms, run):
        parse(options)
    given = reward_work.Assignment(tmp_path, tmp_path / "rows.jsonl", 0, 1, "layer", 0.0, tmp_path / "out.json")
    assert reward_ours.config_of(given).policy.lora.rank == reward_work.RANK


def test_the_small_writer_draws_its_pairs_by_seed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import small_writer

    def rows_of(seed: int, pairs: int) -> list[dict]:
        path = tmp_path / f"{seed}_{pairs}.jsonl"
        small_writer.write_requests(path, seed, pairs, {"train": 40, "test": 2})
        return [json.loads(line) for line in path.read_text().splitlines()]

    def labelled(rows: list[dict]) -> list[str]:
        return [row["prompt"] for row in rows if "completion" in row]

    rows = rows_of(1, 8)
    assert [row["split"] for row in rows] == ["train"] * 40 + ["test"] * 2
    assert len(labelled(rows)) == 8 and all(row.get("completion", row["oracle"]) == row["oracle"] for row in rows)
    assert labelled(rows) == labelled(rows_of(1, 8)) != labelled(rows_of(2, 8)) and not labelled(rows_of(1, 0))


def test_the_small_writer_compares_arms_on_shared_seeds(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import small_writer

    def row(arm: str, seed: int, after: float) -> dict:
        return {"arm": arm, "pairs": 32, "seed": seed, "before": 0.5, "after": after, "cpu_seconds": 60.0}

    lines = small_writer.table([row("gdpo", 1, 0.9), row("gdpo", 2, 0.8), row("sft", 2, 0.6)]).splitlines()
    assert lines[2].startswith("| gdpo | 32 | 0.900 | 0.800 | 0.850 |  | 0.500 |")
    assert lines[3].startswith("| sft | 32 |  | 0.600 | 0.600 | +0.200 |  |")


def test_three_rewards_compares_seeds_that_all_arms_have(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import three_rewards

    def run(arm: str, seed: int, value: float) -> dict:
        return {"arm": arm, "seed": seed, **{name: {"after": value} for name in three_rewards.MEASURES}}

    runs = [run("gdpo", 400, 0.9), run("gdpo", 401, 0.8), run("grpo", 400, 0.5), run("grpo", 401, 0.6)]
    runs += [run("gdpo", 402, 0.0), run("shuffled", 401, 0.3)]
    lines = three_rewards.table(runs, ["gdpo", "grpo", "shuffled"]).splitlines()
    assert lines[2].startswith("| `gdpo` | 2 | 0.850 |") and lines[4].startswith("| `shuffled` | 1 | 0.300 |")
    assert lines[8].startswith("| `grpo` | 2 | +0.300 (") and lines[9].startswith("| `shuffled` | 1 | +0.500 |")
    assert "`" not in three_rewards.table(runs, [*three_rewards.ARMS])  # other arms have no run yet


def test_the_rewards_of_three_rewards_have_units(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import three_rewards

    class Renderer:
        window = 16

        def count_tokens(self, texts: list[str]) -> list[int]:
            return [len(text.split()) for text in texts]

    texts = ["a red ring", "a b c d e f g h i j k"]
    assert three_rewards.length(texts, texts, renderer=Renderer()).tolist() == [0.0, -3.0]
    parts = {arm: three_rewards.rewards(arm, 10.0) for arm in three_rewards.ARMS}
    assert [part.get("threshold") for part in parts["gdpo_conditioned"]] == [None, 3.0, 3.0]
    assert [part["weight"] for part in parts["grpo_searched"]] == [10.0, 0.2, 0.1]


@pytest.mark.wide
def test_trl_gets_the_scores_of_a_run(monkeypatch, tmp_path):
    pytest.importorskip("trl", reason="needs grpo_jax[oracles]")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import small_writer
    import writer_trl

    from grpo_jax.runs.evaluation import evaluate_texts
    from grpo_jax.runs.loading import load

    requests = tmp_path / "requests.jsonl"
    small_writer.write_requests(requests, 0, 1, {"train": 4, "test": 2})
    config = parse([*small_writer.SETTINGS.split(), "--data.prompts", str(requests)])
    judges, ctx = writer_trl.Judges(config), load(config, print)
    rows = [*ctx.test_rows]
    texts = [rows[0].columns["oracle"], rows[1].prompt]
    scores = judges.score(rows, texts, 0, evaluation=True)
    measures = evaluate_texts(ctx, rows, texts).measures
    assert list(scores.mean((0, 1))) == pytest.approx([measures[name] for name in judges.rewards])
    assert scores[0, 0, -1] > scores[1, 0, -1] and judges.weights == [1.0, 0.2, 0.1, 0.0]

    functions, state = judges.functions(2), SimpleNamespace(global_step=3)
    answers = [rows[0].prompt, *(row.columns["oracle"] for row in judges.data.prompts.train[1:3]), ""]
    completions = [[{"role": "assistant", "content": text}] for text in answers]
    told = [function(completions=completions, row=[1, 1, 2, 2], trainer_state=state) for function in functions]
    batch = judges.score([judges.data.prompts.train[place] for place in (1, 2)], answers, 3, evaluation=False)
    assert told == [batch[..., place].ravel().tolist() for place in range(4)]


def test_the_control_of_reasoning_gym_permutes_within_a_row(monkeypatch):
    pytest.importorskip("reasoning_gym", reason="needs grpo_jax[environments]")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import reasoning_gym_tasks

    prompts, texts = [*"aaaaaaaab"], [*"11110000", "1"]
    columns = {"answer": ["1"] * 9, "metadata": [{"source_index": n // 8} for n in range(9)]}
    columns["dataset"] = ["chain_sum"] * 9
    scores = [1.0] * 4 + [0.0] * 4 + [1.0]
    assert reasoning_gym_tasks.right(prompts, texts, **columns) == scores
    permuted = reasoning_gym_tasks.shuffled(prompts, texts, **columns)
    assert permuted != scores and sorted(permuted[:8]) == sorted(scores[:8]) and permuted[8] == 1.0


@pytest.mark.wide
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs(name, tmp_path):
    """At its smallest, by its command."""
    if name == "reasoning_gym_tasks":
        pytest.importorskip("reasoning_gym", reason="needs grpo_jax[environments]")
    if name == "small_writer":
        pytest.importorskip("trl", reason="needs grpo_jax[oracles]")
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
