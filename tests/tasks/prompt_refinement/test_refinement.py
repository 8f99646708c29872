"""Prompt refinement: the observation between two prompts, its controls, and both shipped configs."""

import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("open_clip")
pytest.importorskip("diffusers")

from support import tiny_models  # noqa: E402
from support.vision import folders  # noqa: E402

from grpo_jax import train  # noqa: E402
from grpo_jax.config.run import make_config  # noqa: E402
from grpo_jax.rollout.data import Row, noise_seed  # noqa: E402
from grpo_jax.rollout.env import Episode, Turn  # noqa: E402
from grpo_jax.tasks.prompt_refinement_task import INSTRUCTION, make_step, others  # noqa: E402
from grpo_jax.tasks.task import TaskSetup  # noqa: E402

IMAGES = [torch.full((3, 2, 2), float(i)) for i in range(4)]
ROWS = [Row(1, "a cat"), Row(1, "a cat"), Row(2, "a dog"), Row(3, "a cow")]
EPISODES = [Episode((Turn("first", image=torch.full((3, 2, 2), 9.0)), Turn(f"{i}", image=IMAGES[i]))) for i in range(4)]


def test_the_answer_is_the_picture_just_drawn_and_what_to_do():
    answers = make_step("mend: {prompt}", "drawn")(ROWS, EPISODES)
    assert [answer.text for answer in answers] == ["mend: a cat", "mend: a cat", "mend: a dog", "mend: a cow"]
    assert all(answer.pictures == (image,) and not answer.done for answer, image in zip(answers, IMAGES, strict=True))
    assert "{prompt}" in INSTRUCTION


def test_controls_show_nothing_or_another_users_picture():
    blind = make_step("mend", "none")(ROWS, EPISODES)
    assert [answer.pictures for answer in blind] == [()] * 4 and blind[0].text == "mend"
    wrong = make_step("mend", "other")(ROWS, EPISODES)
    assert [int(answer.pictures[0].max()) for answer in wrong] == [2, 2, 3, 0]  # never one of the same prompt
    assert others(ROWS[:2], "ab") == [None, None]
    assert others(ROWS, [None, None, "c", "d"]) == ["c", "c", "d", "c"]


def test_a_picture_that_could_not_be_drawn_is_not_shown():
    (answer,) = make_step("mend", "drawn")([ROWS[0]], [Episode((Turn("x"),))])
    assert answer.pictures == () and answer.text == "mend"


def config(**others):
    values = {"policy": {"path": "miniature_vl"}, "data": {"prompts": "miniature"}, "sampling": {"turns": 2}}
    return make_config({"task": "prompt_refinement", **values, **others})


def test_the_oracle_knows_the_lens_of_each_rows_evaluation():
    from bridges.miniature import world

    made = config(judges={"renderer": {"kind": "hidden_lens"}, "scorer": {"kind": "open_clip"}}, seed=5)
    data = made.task.load(TaskSetup(made, None, lambda *_: None))
    rows = data.prompts.test[:16]
    found = data.report.references(rows)
    assert found["unchanged"] == [row.prompt for row in rows]
    lenses = [world.lens_of(noise_seed(5, 0, row.id, evaluation=True)) for row in rows]
    expected = [world.undone(row.columns["oracle"], one) for row, one in zip(rows, lenses, strict=True)]
    assert found["oracle"] == expected != [row.columns["oracle"] for row in rows]
    assert set(data.environment.controls) == {"blind", "wrong"} and data.environment.shows_pictures
    plain = config()
    assert plain.task.load(TaskSetup(plain, None, lambda *_: None)).report.references(rows)["oracle"] == [
        row.columns["oracle"] for row in rows
    ]


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.wide
def test_the_real_models_config_runs_with_tiny_ones(tmp_path):
    run_dir = tmp_path / "run"
    arguments = [
        "--config=prompt_refinement_sd3",
        f"--policy.path={folders.seeing_folder(tmp_path / 'policy')}",
        "--policy.compute_dtype=float32",
        "--policy.remat=none",
        f"--judges.renderer.path={tiny_models.stable_diffusion_3(tmp_path / 'renderer')}",
        f"--judges.scorer.path={tiny_models.clip_model(tmp_path / 'scorer')}",
        "--data.prompts=builtin:plain",
        "--data.max_prompt_tokens=512",
        "--judges.renderer.size=16",
        "--judges.renderer.steps=1",
        "--judges.renderer.eval_steps=1",
        "--judges.renderer.batch_size=2",
        "--sampling.max_new_tokens=6",
        "--sampling.group_size=2",
        "--sampling.max_observation_tokens=256",
        "--training.max_steps=1",
        "--training.prompts_per_batch=2",
        "--training.chunk_prompts=1",
        "--training.grad_accumulation_steps=1",
        "--evaluation.prompts=2",
        "--evaluation.every=0",
        "--evaluation.samples=0",
        f"--run_dir={run_dir}",
    ]
    assert train.main(arguments) == 0
    evaluation = summary_of(run_dir)["evaluation"]
    for name in ("alignment", "alignment_turn_1", "alignment_blind", "alignment_wrong", "alignment_gain"):
        assert math.isfinite(evaluation[name]["before"]) and math.isfinite(evaluation[name]["after"]), name


@pytest.mark.wide
def test_the_miniature_cannot_guess_its_lenses_and_its_oracle_is_right(tmp_path):
    run_dir = tmp_path / "run"
    arguments = ["--training.max_steps=1", "--evaluation.prompts=32", "--evaluation.validation_prompts=1"]
    assert train.main(["--config=prompt_refinement_miniature", *arguments, f"--run_dir={run_dir}"]) == 0
    evaluation = summary_of(run_dir)["evaluation"]
    assert evaluation["pixel_accuracy"]["oracle"] >= 0.95
    assert 0.55 < evaluation["pixel_accuracy_turn_1"]["before"] < 0.85
    assert np.isfinite([evaluation[f"pixel_accuracy_{name}"]["after"] for name in ("blind", "wrong")]).all()
