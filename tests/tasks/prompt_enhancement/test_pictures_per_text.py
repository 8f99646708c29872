"""task.pictures_per_text: several noises for each text, and what a reward makes of their pictures."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
from support.text_task import assert_same_run

from grpo_jax.config import make_config
from grpo_jax.rollout.data import Row, noise_seed
from grpo_jax.rollout.environment import make_score
from grpo_jax.tasks.pictures import make_render

ROWS = [Row(3, "a red dog"), Row(8, "a blue cat")]
TEXTS = [["dog", "red dog", "dog"], ["cat", "blue cat", "a cat"]]


class Renderer:
    """Draws a picture of one pixel that holds its seed."""

    device = "cpu"

    def draw(self, texts, seeds, *, evaluation):
        torch = pytest.importorskip("torch")
        assert len(texts) == len(seeds)
        return torch.tensor([seed % 1000 for seed in seeds], dtype=torch.float64).reshape(-1, 1, 1, 1)


def rendered(count, *, evaluation=False):
    config = make_config(task={"kind": "prompt_enhancement", "pictures_per_text": count}, seed=7)
    return make_render({"renderer": Renderer()}, config, baselines=True)(ROWS, TEXTS, 5, evaluation)


def test_a_group_shares_its_noises_and_the_first_is_that_of_one_picture():
    one = rendered(1)
    three = rendered(3)
    assert three.seeds == [noise_seed(7, 5, row.id, n) for n in range(3) for row in ROWS] and len({*three.seeds}) == 6
    assert three.seeds[:2] == one.seeds
    assert three.images.shape[0] == three.baseline_images.shape[0] == 18
    assert (three.images[:6] == one.images).all() and (three.baseline_images == three.images).all()
    np.testing.assert_array_equal(three.images.flatten(), np.repeat([seed % 1000 for seed in three.seeds], 3))
    held_out = rendered(3, evaluation=True)
    assert held_out.seeds == rendered(1, evaluation=True).seeds and len(held_out.images) == 6


def judged(pictures, *, missing=False, **rewards):
    return make_score(rewards, {"watched": next(iter(rewards.values()))}, missing=missing)(ROWS, TEXTS, pictures)


def test_a_reward_that_looks_is_the_mean_of_its_pictures_and_one_that_reads_is_asked_once():
    calls = []
    values = np.arange(18.0).reshape(3, 6)
    pictures = SimpleNamespace(images=values.reshape(18, 1), baseline_images=values.reshape(18, 1) / 2)

    def look(prompts, completions, images, baseline_images, place_in_group, **columns):
        assert place_in_group == [0, 1, 2] * 2 and completions == [*TEXTS[0], *TEXTS[1]]
        return images[:, 0] + baseline_images[:, 0]

    def read(prompts, completions, **columns):
        calls.append(len(columns["images"]))
        return [float(len(text)) for text in completions]

    async def later(images, **columns):
        return images[:, 0]

    rewards, watched = judged(pictures, look=look, read=read, later=later)
    np.testing.assert_allclose(rewards[..., 0], 1.5 * values.mean(0).reshape(2, 3))
    np.testing.assert_array_equal(rewards[..., 1], [[len(text) for text in group] for group in TEXTS])
    np.testing.assert_allclose(rewards[..., 2], values.mean(0).reshape(2, 3))
    np.testing.assert_array_equal(watched, rewards[..., :1])
    assert calls == [6]


def test_of_missing_values_the_others_are_the_mean():
    values = np.array([[1, np.nan, 3, 4, np.nan, 6], [3, 5, np.nan, 2, np.nan, 8]], np.float32)
    pictures = SimpleNamespace(images=values.reshape(12, 1), baseline_images=None)

    def look(images, **columns):
        return [None if np.isnan(value) else float(value) for value in images[:, 0]]

    asked = []

    def fail(images, **columns):
        asked.append(len(images))
        if len(asked) % 2:  # of the first picture
            raise OSError("gone")
        return images[:, 0] * 0 + 2

    expected = np.array([[2, 5, 3], [3, np.nan, 7]], np.float32)
    np.testing.assert_array_equal(judged(pictures, look=look)[0][..., 0], expected)
    here = SimpleNamespace(images=np.ones((12, 1)), baseline_images=None)
    np.testing.assert_array_equal(judged(here, missing=True, fail=fail)[0], 2)
    gone = SimpleNamespace(images=None, baseline_images=None)
    assert np.isnan(judged(gone, missing=True, look=look)[0]).all()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--task.pictures_per_text", "0"], "task.pictures_per_text: expected a number >= 1, got '0'"),
        (["--task.pictures_per_text", "-2"], "task.pictures_per_text: expected a number >= 1, got '-2'"),
        (["--task.pictures_per_text", "1.5"], "task.pictures_per_text: expected a whole number, got '1.5'"),
        (["--task", "text", "--task.pictures_per_text", "2"], "task.pictures_per_text: "),
        (
            ["--config", "prompt_refinement_miniature", "--task.pictures_per_text", "2"],
            "task.pictures_per_text: expected 1 with a renderer that draws the same words differently from each noise",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments, line, capsys, tmp_path):
    from grpo_jax.train import main

    assert main([*arguments, "--run_dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}") and error.count("\n") == 1


JUDGE = """
def brightness(prompts, completions, images, log_metric, **columns):
    log_metric("pictures", len(images))
    return images.mean((1, 2, 3))
"""


def test_the_command_draws_them_and_goes_on_exactly(tmp_path):
    pytest.importorskip("diffusers")
    pytest.importorskip("open_clip")
    from grpo_jax.train import main

    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    small = {
        "sampling.group_size": 4, "training.prompts_per_batch": 2, "training.save_every": 1, "evaluation.prompts": 4,
        "evaluation.validation_prompts": 2, "evaluation.every": 1,
        "evaluation.samples": 0, "report_to": "[]",
        "rewards": f'["{judge}:brightness", "length"]', "optimizer.schedule": "constant",
    }  # fmt: skip

    def run(name, *arguments):
        folder = tmp_path / name
        assert main([*(f"--{key}={value}" for key, value in small.items()), f"--run_dir={folder}", *arguments]) == 0
        table = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return table, pyarrow.parquet.read_table(folder / "completions" / "step_000001.parquet").to_pydict()

    several = "--task.pictures_per_text=3"
    whole, drawn = run("whole", several, "--training.max_steps=2")
    run("parts", several, "--training.max_steps=1")
    run("parts", several, "--training.max_steps=2", "--resume")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    _, one = run("alone", "--training.max_steps=1")
    assert drawn["text"] == one["text"] and drawn["reward/length"] == one["reward/length"]
    assert drawn["reward/brightness"] != one["reward/brightness"]
    # before is measured by one picture, whatever training takes
    before = [json.loads((tmp_path / name / "summary.json").read_text())["evaluation"] for name in ("whole", "alone")]
    assert before[0]["brightness"]["before"] == before[1]["brightness"]["before"]
    assert {row["log/pictures"] for row in whole} == {8} and (tmp_path / "whole" / "report.html").exists()
