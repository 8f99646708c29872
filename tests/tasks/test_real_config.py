"""The configs for real models, with tiny random folders for their three paths."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support import tiny_models

from grpo_jax import train
from grpo_jax.runs.directory import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.wide]

REWARDS = ("alignment", "faithfulness", "length")
STAGES = ("sample", "render", "score", "update", "total")
LOGGED = ("loss", "grad_norm", "words", "growth", "duplicates", "unchanged", "invalid", "tokens_per_second")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of the kinds that the config names: Qwen2-VL in bfloat16, SD3 with three encoders, open_clip."""
    folder = tmp_path_factory.mktemp("models")
    policy = tiny_models.qwen_vl(folder / "policy")
    _to_bfloat16(policy)
    return {
        "policy": policy,
        "renderer": tiny_models.stable_diffusion_3(folder / "renderer"),
        "scorer": tiny_models.clip(folder / "scorer"),
    }


def _to_bfloat16(folder: Path) -> None:
    """The type that the real weights are published in."""
    weights = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))


def arguments(models, run_dir, *more) -> list[str]:
    """The shipped config with its three paths replaced, and what a test on a CPU needs beside."""
    return [
        "--config=prompt_enhancement_sd3",
        f"--policy.path={models['policy']}",
        f"--judges.renderer.path={models['renderer']}",
        f"--judges.scorer.model={models['scorer']}",
        f"--run_dir={run_dir}",
        "--data.prompts=builtin:plain",  # of like length: another one would compile another update
        "--data.max_prompt_tokens=512",  # a token per byte here
        "--judges.renderer.size=16",  # all that the tiny transformer can place
        "--judges.renderer.steps=2",
        "--judges.renderer.eval_steps=2",
        "--training.save_every=1",
        "--optimizer.learning_rate=0.01",  # two updates of 1e-6 would vanish in the export's bfloat16
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
    assert resolved["policy"]["lora"]["rank"] == 16 and resolved["sampling"]["top_k"] == 100
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
        assert row["entropy"] > 1  # random weights at temperature 1.2: nearly uniform over 272 tokens
        # One update per batch: the old log-probabilities are the new ones.
        assert row["mean_ratio"] == pytest.approx(1, abs=1e-6) and row["clip_low"] == row["clip_high"] == 0
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] > 0  # fresh adapters are the reference itself
    assert rows[0]["learning_rate"] == pytest.approx(0.01 / 10)  # the first of ten updates of warm-up
    assert "validation/score" in rows[-1]


def test_exported_policy_is_qwen2_vl_with_its_vision_and_the_adapters_merged(run, models):
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    source, ours = (load_file(folder / "model.safetensors") for folder in (models["policy"], run / "policy"))
    assert source.keys() == ours.keys() and any("visual" in name for name in source)
    for name, before in source.items():
        adapted = name.split(".")[-2] in TARGETS and name.endswith("weight") and "visual" not in name
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
