"""The configs of SDXL-turbo and FLUX.1-schnell with tiny pipelines of their kinds."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from support import tiny_pipelines  # noqa: E402

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
