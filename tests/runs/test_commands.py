"""Commands on a finished run: evaluate, export and predict; and the README's own task."""

import json
import os
import re
import shutil

import pytest
import yaml
from support.folders import load_folder
from support.text_task import SHORT, final_state, finished_run, rows, train_here
from support.tiny_models import causal_lm

from bridges import placement
from grpo_jax import evaluate, export
from grpo_jax.errors import UserError
from grpo_jax.predict import load_rewriter
from grpo_jax.runs.checkpoint import Checkpoints

PROMPTS = ["a tree", "q", "Seven ducks on a pond!"]


@pytest.fixture
def finished(place, monkeypatch):
    folder = finished_run(place)
    monkeypatch.setenv("JUDGE_RUN", str(folder))
    return folder


def measured(capsys, folder, *arguments):
    assert evaluate.main(["--run", str(folder), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)  # JSON and nothing else


def test_a_run_directory_has_all_documented_files(finished):
    there = {path.name for path in finished.iterdir()}
    assert {"config.yaml", "train.log", "metrics.jsonl", "completions", "report.html"} <= there
    assert {"checkpoints", "policy", "summary.json"} <= there
    summary = json.loads((finished / "summary.json").read_text())
    letters = summary["evaluation"]["letters"]
    assert letters["oracle"] is None and {"before", "after"} <= letters.keys()
    brief = summary["evaluation"]["brief"]
    before, after = (letters[kind] + 0.5 * brief[kind] for kind in ("before", "after"))
    assert summary["baseline_reward"] == pytest.approx(before) and summary["reward"] == pytest.approx(after)
    assert summary["improvement"] == pytest.approx(after - before)
    assert summary["seed"] == 3 and {"jax", "python"} <= summary["versions"].keys()
    assert {"sample", "score", "update", "total"} <= summary["seconds"].keys()
    logged = rows(finished)[0]
    for name in ("loss", "policy_loss", "kl", "entropy", "mean_advantage", "learning_rate", "grad_norm", "clip_low"):
        assert name in logged
    page = (finished / "report.html").read_text()
    assert "KL to the reference" in page and "Clipped tokens" in page
    assert "The first of 5 of 6 iterations" in page
    titles = [re.findall(r"<th\b[^>]*>(.*?)</th>", table) for table in re.findall(r"<thead>.*?</thead>", page)]
    numbers = ["step", "reward\N{NO-BREAK SPACE}· letters", "reward\N{NO-BREAK SPACE}· brief", "advantage", "length"]
    assert titles == [
        ["prompt", "completion", *numbers, "truncated", "valid"],
        ["prompt", "completion", "letters", "brief"],
    ]
    assert "rewrite</" not in page and "added words" not in page and "unchanged prompts" not in page
    for name in ("mean_ratio", "reward/letters/mean", "reward/letters/std", "zero_variance_groups/brief", "truncated"):
        assert name in logged


def test_the_shared_run_trains_in_each_of_six_iterations(finished):
    """Tests of resuming would pass on a run in which nothing happens."""
    table = rows(finished)
    assert [row["step"] for row in table] == [1, 2, 3, 4, 5, 6]
    assert len({row["learning_rate"] for row in table}) == 6
    assert all(row["grad_norm"] > 0 and row["kl"] != 0 for row in table)
    assert [("validation/score" in row) for row in table] == [False, True] * 3
    assert table[0]["reward/letters/mean"] != table[5]["reward/letters/mean"]
    best = os.readlink(finished / "checkpoints" / "best")
    assert {path.name for path in finished.glob("checkpoints/step_*")} == {"step_3", "step_6", best}
    state, progress = final_state(finished)
    assert state["reference"] is not None and progress["iteration"] == 6 and progress["best_score"] is not None


@pytest.mark.parametrize(("cards", "shown"), [(2, "gpu:1"), (0, "cpu")])
def test_commands_show_jax_the_card_of_the_policy_alone(cards, shown, finished, tmp_path, monkeypatch, capsys):
    """As devices.policy says; a machine without that card asks the policy where it can."""
    run, seen = shutil.copytree(finished, tmp_path / "run"), []
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"devices": {"policy": "gpu:1"}}))
    monkeypatch.setattr(placement, "_count_cards", lambda: cards)
    monkeypatch.setattr(placement, "_jax_has_gpus", lambda: True)
    monkeypatch.setattr(placement, "prepare_jax", lambda places: seen.append(places["policy"]) or [])
    assert export.main(["--run", str(run), "--out", str(tmp_path / "out")]) == 0
    assert load_rewriter(run)("q") is not None
    if cards:
        capsys.readouterr()
        measured(capsys, run)
    assert seen == [shown] * (3 if cards else 2)


def test_judges_round_products_as_the_policy_does(place, tmp_path, rounding):
    (tmp_path / "mine.py").write_text("def mine(prompts, completions, **columns):\n    return [1.0] * len(prompts)\n")
    small = ["--training.max_steps=1", "--evaluation.every=0", "--data.held_out=0"]
    judge = ["--judges.mine=function", f"--judges.mine.name={tmp_path / 'mine.py'}:mine"]
    options = [*small, *judge, "--policy.matmul_precision=highest"]
    assert train_here(place.config, tmp_path / "run", *options, *SHORT) == 0
    assert [part.allow_tf32 for part in rounding] == [False] * 2


def test_evaluate_repeats_what_the_run_measured(finished, capsys):
    summary = json.loads((finished / "summary.json").read_text())
    final = measured(capsys, finished)
    assert final["step"] == 6 and final["prompts"] == summary["prompts"] == 4
    assert final["greedy"] == {name: values["after"] for name, values in summary["evaluation"].items()}
    best = measured(capsys, finished, "--checkpoint", "best", "--prompts", "1")
    chosen = summary["best"]["iteration"]
    assert best["step"] == chosen and best["prompts"] == 1
    said = f"policy/ is the final checkpoint, which was measured; the best in validation, of iteration {chosen}, is"
    assert chosen != final["step"] and said in (finished / "train.log").read_text()

    assert evaluate.main(["--run", str(finished), "--checkpoint", "3"]) == 0
    table = capsys.readouterr().out
    assert "checkpoint 3 (step 3)" in table and "letters" in table

    assert evaluate.main(["--run", str(finished), "--checkpoint", "5"]) == 2
    assert "6, best, final" in capsys.readouterr().err


def test_exported_folders_write_what_the_run_writes(finished, tmp_path, capsys):
    from support.torch_reference import greedy_answers
    from transformers import AutoModelForCausalLM

    assert export.main(["--run", str(finished), "--out", str(tmp_path / "out"), "--checkpoint", "best"]) == 0
    assert "checkpoint best (step " in capsys.readouterr().out
    rewrite = load_rewriter(finished, checkpoint="best")
    expected = [rewrite(prompt) for prompt in PROMPTS]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert greedy_answers(exported, tmp_path / "out", PROMPTS, max_new_tokens=8) == expected
    assert any(expected)
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() != (finished / "policy" / weights).read_bytes()
    assert export.main(["--run", str(finished), "--out", str(tmp_path / "final")]) == 0
    assert (tmp_path / "final" / weights).read_bytes() == (finished / "policy" / weights).read_bytes()

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert export.main(["--run", str(finished), "--out", str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_an_invalid_answer_gives_the_prompt_back(place, tmp_path):
    """A policy that says nothing but "!": its last norm is 0, so every logit is, and token 0 is the likeliest."""
    import torch
    from safetensors.torch import load_file, save_file

    silent = causal_lm(tmp_path / "silent", num_hidden_layers=1)
    weights = load_file(silent / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros_like(weights["model.norm.weight"])
    save_file(weights, silent / "model.safetensors", metadata={"format": "pt"})
    folder = tmp_path / "run"
    folder.mkdir()
    config = yaml.safe_load(place.config.read_text()) | {"task": "prompt_enhancement", "rewards": []}
    config["policy"]["path"] = str(silent)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save_as("final", 1, {"variables": {"params": load_folder(silent).params}}, {})
    rewrite = load_rewriter(folder)
    assert [rewrite(prompt) for prompt in PROMPTS] == PROMPTS
    assert rewrite(f" {PROMPTS[0]}\n") == PROMPTS[0]  # as the rows of the data, without space around it
    config["task"] = "text"  # there every answer counts
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert load_rewriter(folder)("a tree") == "!" * 8
    with pytest.raises(UserError, match=r"takes .* tokens with its instruction"):
        rewrite("x" * 100)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--samples -1", "error: --samples: expected a number >= 0, got -1\n"),
        ("--temperature 0", "error: --temperature: expected a number > 0, got 0.0\n"),
        ("--mesh 0 1", "error: --mesh fsdp: expected a number >= 1, got 0\n"),
    ],
)
def test_a_bad_value_is_refused_with_its_option(words, message, place, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(place.config.read_text())
    assert evaluate.main(["--run", str(tmp_path), *words.split()]) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("out", ["", "nowhere/evaluation.json"])
def test_a_bad_path_for_results_is_refused_before_measuring(out, place, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(place.config.read_text())
    assert evaluate.main(["--run", str(tmp_path), "--out", str(tmp_path / out)]) == 2
    assert "--out: expected a file in a folder that is there" in capsys.readouterr().err
