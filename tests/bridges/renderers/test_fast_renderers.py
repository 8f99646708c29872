"""The configs of SDXL-turbo and FLUX.1-schnell with tiny pipelines of their kinds, and what their models weigh."""

import json
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from support import tiny_pipelines  # noqa: E402

from bridges import loading  # noqa: E402
from grpo_jax import train  # noqa: E402
from grpo_jax.config.command_line import parse  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402

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


def clip(width, layers):
    return {"vocab_size": 49408, "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers} | {
        "num_attention_heads": width // 64,
        "projection_dim": width,
    }


VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
COMPONENTS = {
    "stabilityai/sdxl-turbo": {
        "unet": (
            ("diffusers", "UNet2DConditionModel"),
            {
                "sample_size": 64,
                "block_out_channels": [320, 640, 1280],
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                "transformer_layers_per_block": [1, 2, 10],
                "attention_head_dim": [5, 10, 20],
                "cross_attention_dim": 2048,
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
            },
        ),
        "vae": (("diffusers", "AutoencoderKL"), VAE | {"latent_channels": 4}),
        "text_encoder": (("transformers", "CLIPTextModel"), clip(768, 12)),
        "text_encoder_2": (("transformers", "CLIPTextModelWithProjection"), clip(1280, 32)),
    },
    "black-forest-labs/FLUX.1-schnell": {
        "transformer": (
            ("diffusers", "FluxTransformer2DModel"),
            {
                "in_channels": 64,
                "num_layers": 19,
                "num_single_layers": 38,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 768,
                "guidance_embeds": False,
            },
        ),
        "vae": (
            ("diffusers", "AutoencoderKL"),
            VAE | {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False},
        ),
        "text_encoder": (("transformers", "CLIPTextModel"), clip(768, 12)),
        "text_encoder_2": (
            ("transformers", "T5EncoderModel"),
            {"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
            | {"feed_forward_proj": "gated-gelu"},
        ),
    },
}


@pytest.mark.parametrize("path", COMPONENTS)
def test_the_table_of_published_pipelines_is_what_their_libraries_build(path, tmp_path):
    for name, (_, config) in COMPONENTS[path].items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "model_index.json").write_text(json.dumps({name: kind for name, (kind, _) in COMPONENTS[path].items()}))
    assert loading.pipeline_sizes(str(tmp_path)) == loading.PUBLISHED_PIPELINES[path]
    (tmp_path / "vae" / "config.json").unlink()
    with pytest.raises(UserError, match=r"vae/config\.json"):
        loading.pipeline_sizes(str(tmp_path))
