"""Drawing a picture again: what the policy sees of a row, what is judged, and both configs as they are shipped."""

import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("open_clip")
pytest.importorskip("diffusers")

from PIL import Image  # noqa: E402
from support import tiny_models  # noqa: E402
from support.vision import folders  # noqa: E402

from grpo_jax import train  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.rollout.data import Row  # noqa: E402
from grpo_jax.tasks.prompt_recreation_task import seen, similarity, tensors_of  # noqa: E402


def rows(count=3):
    return [Row(i, "draw this", {"requested": {}}, (np.full((4 + i, 6, 3), 40 * i, np.uint8),)) for i in range(count)]


def test_what_is_judged_stays_the_rows_own_picture_whatever_the_policy_sees():
    given = rows()
    for pictures in ("shown", "hidden", "shuffled"):
        found = seen(given, pictures)
        assert [row.columns["target"] is one.pictures[0] for row, one in zip(found, given, strict=True)] == [True] * 3
    assert [row.pictures for row in seen(given, "shown")] == [row.pictures for row in given]
    hidden = [row.pictures[0] for row in seen(given, "hidden")]
    assert [picture.shape for picture in hidden] == [(4, 6, 3), (5, 6, 3), (6, 6, 3)]
    assert {int(value) for picture in hidden for value in np.unique(picture)} == {128}
    others = [row.pictures[0] for row in seen(given, "shuffled")]
    assert all(other is given[(i + 1) % 3].pictures[0] for i, other in enumerate(others))


@pytest.mark.parametrize("count", [0, 2])
def test_a_row_has_one_picture(count):
    row = Row(7, "draw this", {}, tuple(np.zeros((4, 4, 3), np.uint8) for _ in range(count)))
    with pytest.raises(UserError, match=f"row 7: expected one picture, .* got {count}"):
        seen([row], "shown")


class Judge:
    """Compares mean colours; remembers what it was given."""

    def image_image(self, a, b):
        self.others = b
        means = [torch.stack([picture.mean((1, 2)) for picture in some]) for some in (a, b)]
        return -(means[0] - means[1]).abs().sum(1)


def test_similarity_is_between_what_was_drawn_and_the_rows_own_picture():
    targets = [Image.new("RGB", (6, 4), (255, 0, 0)), np.full((3, 3, 3), 51, np.uint8)]
    drawn = torch.zeros((4, 3, 2, 2))
    drawn[0, 0] = 1
    judge, target = Judge(), [targets[0], targets[0], targets[1], targets[1]]
    found = similarity(["p"] * 4, ["c"] * 4, images=drawn, target=target, scorer=judge)
    assert found == pytest.approx([0, -1, -0.6, -0.6])
    assert judge.others[0] is judge.others[1] and judge.others[0].shape == (3, 4, 6)  # opened once


def test_pictures_of_rows_become_tensors_between_0_and_1():
    array = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    (found,) = tensors_of([array])
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy() * 255, array.transpose(2, 0, 1), atol=1e-4)


# ------------------------------------------------------------------------------------------------------- the configs


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.slow
def test_the_real_models_config_runs_with_tiny_ones(tmp_path):
    """Pictures of two sizes, two judges of one reward, adapters beside a frozen tower."""
    data = [
        {"prompt": f"draw {number}", "image": folders.picture(number, 20 + 4 * (number % 2))} for number in range(10)
    ]
    run_dir = tmp_path / "run"
    arguments = [
        "--config=prompt_recreation_sd3",
        f"--policy.path={folders.seeing_folder(tmp_path / 'policy')}",
        "--policy.compute_dtype=float32",
        f"--judges.renderer.path={tiny_models.stable_diffusion_3(tmp_path / 'renderer')}",
        f"--judges.scorer.model={tiny_models.clip(tmp_path / 'scorer')}",
        "--judges.scorer.pretrained=null",
        f"--judges.dino.model={tiny_models.dinov2(tmp_path / 'dino')}",
        f"--data.prompts={folders.write_rows(tmp_path / 'data', data)}",
        "--judges.renderer.size=16",
        "--judges.renderer.steps=1",
        "--judges.renderer.eval_steps=1",
        "--sampling.max_new_tokens=6",
        "--sampling.group_size=2",
        "--training.max_steps=1",
        "--training.prompts_per_batch=2",
        "--evaluation.prompts=2",
        "--evaluation.every=0",
        "--evaluation.sampled=false",
        f"--run_dir={run_dir}",
    ]
    assert train.main(arguments) == 0
    evaluation = summary_of(run_dir)["evaluation"]
    for name in ("similarity", "similarity@dino", "length"):
        assert math.isfinite(evaluation[name]["before"]) and math.isfinite(evaluation[name]["after"])
    assert evaluation["similarity"]["after"] != evaluation["similarity@dino"]["after"]
    assert "Right: what was drawn." in (run_dir / "report.html").read_text()


@pytest.mark.wide
def test_the_miniature_starts_as_a_weak_captioner_and_its_oracle_is_right(tmp_path):
    run_dir = tmp_path / "run"
    arguments = ["--training.max_steps=1", "--evaluation.prompts=32", "--evaluation.validation_prompts=1"]
    assert train.main(["--config=prompt_recreation_miniature", *arguments, f"--run_dir={run_dir}"]) == 0
    pixels = summary_of(run_dir)["evaluation"]["pixel_accuracy"]
    assert 0.25 < pixels["before"] < 0.6 and pixels["oracle"] >= 0.95
