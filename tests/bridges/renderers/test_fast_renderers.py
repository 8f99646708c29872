"""The configs of SDXL-turbo and FLUX.1-schnell with tiny pipelines of their kinds, and what their models weigh."""

import json
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from support import tiny_pipelines  # noqa: E402

from grpo_jax import train  # noqa: E402
from grpo_jax.config.command_line import parse  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SHIPPED = {
    "prompt_enhancement_sdxl_turbo": (tiny_pipelines.stable_diffusion_xl, "StableDiffusionXLPipeline", 77),
    "prompt_enhancement_flux_schnell": (tiny_pipelines.flux, "FluxPipeline", 256),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_draws(name, tmp_path):
    make, kind, window = SHIPPED[name]
    small = [f"--judges.renderer.path={make(tmp_path)}", "--judges.renderer.size=32", "--judges.renderer.batch_size=2"]
    judge = parse([f"--config={name}", *small]).judges["renderer"]
    judge.check()
    renderer = judge.load("cpu")
    assert f": {kind}, 4 steps, window {window} tokens" in str(renderer)
    images = renderer.draw(["a red dog", "two cats"], [1, 1], evaluation=True)
    assert images.shape == (2, 3, 32, 32) and torch.isfinite(images).all()
    assert renderer.pipeline.vae.dtype == torch.bfloat16


@pytest.mark.wide
def test_a_run_with_another_pipeline(tmp_path):
    """The miniature's policy and scorer, and a pipeline that they do not know."""
    folder, run = tiny_pipelines.stable_diffusion_xl(tmp_path / "pipeline"), tmp_path / "run"
    small = {
        "judges.renderer.path": folder,
        "judges.renderer.size": 32,
        "judges.renderer.steps": 2,
        "judges.renderer.eval_steps": 3,
        "judges.renderer.batch_size": 8,
        "training.max_steps": 2,
        "training.prompts_per_batch": 2,
        "training.inner_epochs": 1,
        "sampling.group_size": 4,
        "sampling.max_new_tokens": 6,
        "evaluation.prompts": 2,
        "evaluation.validation_prompts": 2,
        "evaluation.samples": 0,
    }
    options = [f"--{name}={value}" for name, value in small.items()]
    assert train.main(["--judges.renderer=text_to_image", *options, f"--run_dir={run}"]) == 0
    log = (run / "train.log").read_text()
    assert f"{folder}: StableDiffusionXLPipeline, 2 steps, window 77" in log
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(math.isfinite(row["reward/alignment/mean"]) for row in rows)
    assert sorted(path.name for path in (run / "images").glob("*.png")) == ["000_after.png", "000_before.png"]
