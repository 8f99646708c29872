"""A user's task in one file: its fields, judge, measures and table, through the command."""

import json

import pytest
from support.imports import ROOT
from support.text_task import SMALL_EXAMPLE, completions, rows

from grpo_jax.train import main

FILE = ROOT / "examples" / "own_task" / "task.py"
TASK = ["--task", f"{FILE}:Countdown"]
SMALL = {**SMALL_EXAMPLE, "task.puzzles": 32, "sft.steps": 150, "training.max_steps": 3, "evaluation.every": 0}


def command(run, **changes):
    return [*TASK, *(f"--{name}={value}" for name, value in {**SMALL, "run_dir": run, **changes}.items())]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("own_task") / "run"
    assert main(command(run)) == 0
    return run


def test_its_rewards_are_what_the_answers_are_worth(finished):
    """Recomputed from the completions by Python's own arithmetic."""
    assert [row["step"] for row in rows(finished)] == [1, 2, 3]
    readable = 0
    for step in (1, 2, 3):
        table = completions(finished, step)
        for prompt, text, *judged in zip(
            table["prompt"], table["completion"], table["reward/right"], table["reward/readable"],
            table["eval_rewards/distance"],
            strict=True,
        ):  # fmt: skip
            goal, numbers = prompt.split(" from ")
            words = text.split()
            form = all(word.isdigit() if place % 2 == 0 else word in ("plus", "minus") for place, word in
                       enumerate(words)) and len(words) in (3, 5)  # fmt: skip
            own = [word for word in words if word.isdigit()]
            fair = form and all(own.count(word) <= numbers.split().count(word) for word in own)
            value = eval(text.replace("plus", "+").replace("minus", "-")) if fair else None
            assert judged[:2] == [float(value == int(goal)), float(fair)]
            assert judged[2] == abs(value - int(goal)) if fair else judged[2] != judged[2]
            readable += fair
    assert 0 < readable < 48  # SFT has taught the form to some


def test_its_table_and_measures_are_reported(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert {"right", "readable", "distance"} <= summary["evaluation"].keys()
    assert summary["evaluation"]["right"]["oracle"] == 1.0
    page = (finished / "report.html").read_text()
    assert "Right answers by length" in page and "2 numbers" in page and "3 numbers" in page
    assert "40 puzzles of numbers up to 9" in (finished / "train.log").read_text()
