"""The configs for real models, with tiny random folders for their paths."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support import tiny_models, tiny_pipelines

from grpo_jax import train
from grpo_jax.config.command_line import parse
from grpo_jax.runs.directory import read_metrics
from scripts.compositional import OBJECTS

pytestmark = [pytest.mark.slow, pytest.mark.wide]

REWARDS = ("alignment_gain", "faithfulness", "length")
STAGES = ("sample", "render", "score", "update", "total")
LOGGED = ("loss", "grad_norm", "words", "growth", "duplicates", "unchanged", "invalid", "tokens_per_second")
RENDERERS = {
    "prompt_enhancement_sd3": (tiny_models.stable_diffusion_3, 16),
    "prompt_enhancement_sdxl_turbo": (tiny_pipelines.stable_diffusion_xl, 32),
    "prompt_enhancement_flux_schnell": (tiny_pipelines.flux, 32),
    "prompt_enhancement_one_gpu": (tiny_pipelines.stable_diffusion_xl, 32),
    "prompt_enhancement_one_gpu_16gb": (tiny_pipelines.stable_diffusion_xl, 32),
}
"""Renderers by config, and the sizes of their pictures."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of the kinds that the config names; but the policy is a Qwen2-VL, which prompts of text may train too."""
    folder = tmp_path_factory.mktemp("models")
    policy = tiny_models.qwen_vl(folder / "policy")
    _to_bfloat16(policy)
    return {
        "policy": policy,
        "renderer": tiny_models.stable_diffusion_3(folder / "renderer"),
        "scorer": tiny_models.clip_model(folder / "scorer"),
        "detector": tiny_models.detector(folder / "detector", tuple(OBJECTS)),
    }


def _to_bfloat16(folder: Path) -> None:
    """The type that the real weights are published in."""
    weights = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))


def arguments(models, run_dir, *more) -> list[str]:
    """The shipped config with its paths replaced, and what a test on a CPU needs beside."""
    return [
        "--config=prompt_enhancement_sd3",
        f"--policy.path={models['policy']}",
        *(f"--judges.{name}.path={models[name]}" for name in ("renderer", "scorer", "detector")),
        f"--run_dir={run_dir}",
        "--eval_rewards=[]",  # these prompts have no metadata
        "--training.prompts_per_batch=4",
        "--training.chunk_prompts=2",
        "--data.prompts=builtin:plain",  # of like length: another one would compile another update
        "--data.max_prompt_tokens=512",  # a token per byte here
        "--judges.renderer.size=16",  # all that the tiny transformer can place
        "--judges.renderer.steps=2",
        "--judges.renderer.eval_steps=2",
        "--training.save_every=1",
        "--optimizer.learning_rate=0.01",  # two updates of 5e-5 would vanish in the export's bfloat16
        "--evaluation.prompts=2",
        "--evaluation.validation_prompts=2",  # as many: another number would compile another sampler
        "--evaluation.samples=0",
        *more,
    ]


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A finished run of two iterations."""
    run_dir = tmp_path_factory.mktemp("runs") / "sd3"
    assert train.main(arguments(models, run_dir, "--training.max_steps=2")) == 0
    return run_dir


def test_run_directory_is_complete(run):
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["policy"]["lora"]["rank"] == 16 and resolved["algorithm"]["preset"] == "dr_grpo"
    for name in ("train.log", "report.html", "policy/config.json", "checkpoints/best", "checkpoints/final"):
        assert (run / name).exists(), name
    pictures = sorted(path.name for path in (run / "images").glob("*.png"))
    assert pictures == ["000_after.png", "000_before.png", "001_after.png", "001_before.png"]
    assert any((run / "tensorboard").iterdir())
    page = (run / "report.html").read_text()
    assert "alignment" in page and "data:image/png;base64," in page
    log = (run / "train.log").read_text()
    assert "LoRA rank 16" in log and "improvement" in log
    summary = json.loads((run / "summary.json").read_text())
    assert set(REWARDS) <= set(summary["evaluation"]) and {*STAGES, "evaluate"} <= set(summary["seconds"])
    assert {"jax", "flax", "torch", "diffusers", "open_clip_torch"} <= set(summary["versions"])
    assert {"policy", "renderer", "scorer"} <= set(summary["devices"])
    total = summary["evaluation"]["total"]  # which is what is maximised: a condition of rewards has a part in it
    assert summary["reward"] == total["after"] and summary["baseline_reward"] == total["before"]


def test_every_iteration_logs_what_is_promised(run):
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    names = [*LOGGED, *(f"seconds/{stage}" for stage in STAGES), *(f"reward/{reward}/std" for reward in REWARDS)]
    for row in rows:
        assert not [name for name in names if not math.isfinite(row.get(name, math.nan))]
        assert all(row[f"missing/{reward}"] == 0 for reward in REWARDS)
        assert row["entropy"] > 1  # random weights: nearly uniform over 272 tokens
        # One update per batch: the old log-probabilities are the new ones.
        assert row["mean_ratio"] == pytest.approx(1, abs=1e-6) and row["clip_low"] == row["clip_high"] == 0
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] > 0  # fresh adapters are the reference itself
    assert rows[0]["learning_rate"] == pytest.approx(0.01 / 20)  # the first of twenty updates of warm-up
    assert "validation/score" in rows[-1]


def test_exported_policy_is_qwen2_vl_with_its_vision_and_the_adapters_merged(run, models):
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    source, ours = (load_file(folder / "model.safetensors") for folder in (models["policy"], run / "policy"))
    assert source.keys() == ours.keys() and any("visual" in name for name in source)
    for name, before in source.items():
        adapted = name.endswith("proj.weight") and "visual" not in name
        assert before.dtype == torch.bfloat16
        assert torch.equal(ours[name], before if "visual" in name else before.float()) != adapted, name
        assert ours[name].dtype == (torch.bfloat16 if "visual" in name else torch.float32)
    model = AutoModelForImageTextToText.from_pretrained(run / "policy", dtype="auto")
    assert type(model).__name__ == "Qwen2VLForConditionalGeneration"
    tokens = AutoTokenizer.from_pretrained(run / "policy")("a red dog", return_tensors="pt").input_ids
    assert torch.isfinite(model(input_ids=tokens).logits).all()


def test_rewriter_and_renderer_learn_with_the_config_for_one_card(tmp_path):
    paths = {
        "policy.path": tiny_models.causal_lm(tmp_path / "policy", "qwen3", max_position_embeddings=1024),
        "judges.renderer.path": tiny_models.stable_diffusion_3(
            tmp_path / "renderer", dual_attention_layers=(0,), qk_norm="rms_norm"
        ),
        **{f"judges.{name}.path": tiny_models.clip_model(tmp_path / name) for name in ("scorer", "pick", "held_out")},
    }
    small = {
        **{"data.max_prompt_tokens": 512, "judges.renderer.size": 16, "sampling.max_new_tokens": 4},
        **{"training.prompts_per_batch": 2, "sampling.group_size": 2, "training.chunk_prompts": 0},
        **{
            "training.max_steps": 2,
            "evaluation.prompts": 2,
            "evaluation.validation_prompts": 2,
            "evaluation.samples": 0,
        },
        **{"judges.renderer.steps": 3, "judges.renderer.eval_steps": 2, "judges.renderer.train.lora.rank": 2},
    }
    run_dir = tmp_path / "run"
    fields = [f"--{name}={value}" for name, value in {**paths, **small, "run_dir": run_dir}.items()]
    assert train.main(["--config=prompt_joint_sd35", *fields]) == 0
    for row in read_metrics(run_dir / "metrics.jsonl"):
        assert row["renderer/grad_norm"] > 0
        assert all(row[f"missing/{name}"] == 0 for name in ("alignment", "alignment@pick", "faithfulness"))
    assert math.isfinite(row["validation/alignment@held_out_of_captions"])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers'
@pytest.mark.parametrize("name", RENDERERS)
def test_a_config_runs_with_models_of_its_kinds(name, tmp_path):
    make_renderer, size = RENDERERS[name]
    makers = {
        "clip_model": (tiny_models.clip_model, "path"),
        "open_clip": (tiny_models.clip, "model"),
        "object_detection": (lambda folder: tiny_models.detector(folder, tuple(OBJECTS)), "path"),
    }
    paths = {"policy.path": tiny_models.causal_lm(tmp_path / "policy", max_position_embeddings=1024)}
    paths["judges.renderer.path"] = make_renderer(tmp_path / "renderer")
    for judge, section in parse([f"--config={name}"]).model_dump()["judges"].items():
        if judge != "renderer":
            make, field = makers[section["kind"]]
            paths[f"judges.{judge}.{field}"] = make(tmp_path / judge)
    small = {
        **{"data.max_prompt_tokens": 512, "judges.renderer.size": size, "judges.renderer.eval_steps": 1},
        **{"judges.renderer.steps": 1, "judges.renderer.batch_size": 4, "sampling.group_size": 2},
        **{"training.prompts_per_batch": 4, "training.chunk_prompts": 2, "training.max_steps": 1},
        **{"evaluation.prompts": 4, "evaluation.validation_prompts": 2, "evaluation.samples": 0},
    }
    run_dir = tmp_path / "run"
    fields = [f"--{name}={value}" for name, value in {**paths, **small, "run_dir": run_dir}.items()]
    assert train.main([f"--config={name}", *fields]) == 0
    (row,) = read_metrics(run_dir / "metrics.jsonl")
    assert math.isfinite(row["loss"]) and all(row[f"missing/{reward}"] == 0 for reward in REWARDS)
    evaluation = json.loads((run_dir / "summary.json").read_text())["evaluation"]
    assert 0 <= evaluation["geneval"]["after"] <= 1  # the prompts have GenEval's metadata


def test_a_text_policy_runs_with_rows_like_those_of_the_hub(tmp_path):
    rows = [{"question": f"{a} and 3?", "answer": f"{a} + 3 = {a + 3}\n#### {a + 3}"} for a in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {
        "policy.path": tiny_models.causal_lm(tmp_path / "policy", max_position_embeddings=1024),
        "data.prompts": tmp_path / "rows.jsonl",
        **{"sampling.max_new_tokens": 8, "training.max_steps": 1, "training.prompts_per_batch": 8},
        **{"evaluation.prompts": 2, "evaluation.validation_prompts": 2, "evaluation.samples": 0},
        "run_dir": tmp_path / "run",
    }
    assert train.main(["--config=text_one_gpu", *(f"--{name}={value}" for name, value in small.items())]) == 0
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["missing/numeric_answer"] == 0
