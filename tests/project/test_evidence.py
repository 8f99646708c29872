"""The scripts that measure and draw what looking is worth: their figures, from runs that are there."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread, imsave

ROOT = Path(__file__).parents[2]


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


vision = load("benchmarks/evidence/vision.py")


def finished(folder, name, values):
    (folder / name).mkdir(parents=True)
    values = {"turn_1": [0.0] * len(values), "end": values}
    summary = {
        "evaluation": {
            "pixel_accuracy": {"before": 0.2, "after": 0.8, "oracle": 1.0},
            "pixel_accuracy_blind": {"before": 0.2, "after": 0.3},
        },
        **{"seconds": {"total": 60.0}, "prompts": 128, "iterations": 80, "versions": {}},
    }
    (folder / name / "summary.json").write_text(json.dumps(summary))
    (folder / name / "by_prompt.json").write_text(json.dumps(values))


def test_runs_that_are_there_are_not_run_again(tmp_path, monkeypatch, capsys):
    for seed in (0, 1):
        finished(tmp_path, f"refinement_seeing_{seed}", [1.0, 0.5])
        finished(tmp_path, f"refinement_blind_{seed}", [0.5, 0.5])
    monkeypatch.setattr(
        sys, "argv", ["vision.py", "--tasks", "refinement", "--seeds", "0", "1", "--out", str(tmp_path)]
    )
    vision.main()
    printed = capsys.readouterr().out
    found = json.loads(printed[: printed.rindex("}\n\n") + 1])
    assert found["intervals"]["seeing less blind"] == [0.25, 0.0, 0.5]
    assert found["intervals"]["refinement blind end"] == [0.5, 0.5, 0.5]
    assert [row["gap_closed"] for row in found["runs"]] == [pytest.approx(0.75)] * 4
    assert "| refinement | seeing | 1 | 0.200 | 0.800 | 1.000 | 0.750 | 60 |" in printed


def test_pictures_of_episodes(tmp_path):
    figures = load("docs/make_figures.py")
    (tmp_path / "images").mkdir()
    turn = {"text": "a red ring", "scores": {}, "answer": None}
    entries = [{"prompt": "a crimson donut", "turns": [turn, turn]}]
    (tmp_path / "images" / "episodes.json").write_text(json.dumps(entries))
    for number, colour in ((1, (1.0, 0.0, 0.0)), (2, (0.0, 1.0, 0.0))):
        imsave(tmp_path / "images" / f"000_turn_{number}.png", np.broadcast_to(colour, (32, 32, 3)).copy())
    figures.episodes(tmp_path, tmp_path / "episodes.png", 8)
    colours = imread(tmp_path / "episodes.png")[..., :3].reshape(-1, 3)
    for colour in ((1, 0, 0), (0, 1, 0)):
        assert np.isclose(colours, colour, atol=0.02).all(1).any()
