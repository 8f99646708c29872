"""Several objects through the command: the oracle draws every kind, and each kind is measured separately."""

import json

import pytest

from bridges.miniature.scenes import KINDS
from grpo_jax import train

pytest.importorskip("open_clip")
pytest.importorskip("diffusers")


@pytest.mark.wide  # a dozen seconds; tests/bridges/test_scenes.py draws and measures each kind
def test_each_kind_is_measured_and_its_oracle_is_right(tmp_path):
    arguments = ["--training.max_steps=1", "--evaluation.prompts=48", "--evaluation.validation_prompts=1"]
    small = ["--training.prompts_per_batch=4", "--sampling.group_size=2", "--training.inner_epochs=1"]
    small += ["--evaluation.samples=0", "--evaluation.every=0"]
    run_dir = tmp_path / "run"
    assert train.main(["--config=prompt_enhancement_scenes", *arguments, *small, f"--run_dir={run_dir}"]) == 0
    evaluation = json.loads((run_dir / "summary.json").read_text())["evaluation"]
    pixels = evaluation["pixel_accuracy"]
    assert pixels["oracle"] >= 0.95 and pixels["before"] <= 0.4 and pixels["unchanged"] <= 0.4
    kinds = [evaluation[f"pixel_accuracy/{kind}"] for kind in KINDS]
    assert [kind["oracle"] >= 0.85 for kind in kinds] == [True] * 6
    for when in ("before", "after", "oracle"):  # 8 prompts of each of the 6 kinds
        assert sum(kind[when] for kind in kinds) / 6 == pytest.approx(pixels[when])
