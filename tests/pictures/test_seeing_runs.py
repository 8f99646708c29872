"""Runs of a policy that sees: its tower frozen, with adapters, trained; what is written, and what a resume restores."""

import json

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from support.vision.folders import picture, seeing_folder, write_rows  # noqa: E402

from grpo_jax.config.command_line import parse  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.runs.policy import load_run_policy  # noqa: E402
from grpo_jax.train import run  # noqa: E402

FROZEN = ("--policy.frozen_dtype=bfloat16",)
TRAINED = ("--policy.vision=train",)
ADAPTED = ("--policy.lora.rank=2", "--policy.lora.targets=[q_proj]", "--policy.lora.vision=true")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    seeing_folder(folder / "policy")
    write_rows(folder / "data", [{"prompt": f"say {i}", "image": picture(i)} for i in range(12)])
    return folder


def configured(place, run_dir, *arguments):
    return parse(
        [
            "--task=text",
            f"--policy.path={place / 'policy'}",
            f"--data.prompts={place / 'data' / 'rows.jsonl'}",
            f"--run_dir={run_dir}",
            *("--data.max_prompt_tokens=96", "--sampling.max_new_tokens=6", "--sampling.group_size=4"),
            *("--training.prompts_per_batch=4", "--training.max_steps=2", "--optimizer.learning_rate=0.01"),
            *("--evaluation.every=0", "--data.held_out=0", "--training.save_every=1"),
            *arguments,
        ]
    )


class Letters:
    """Rewards that differ within a group; one call may fail."""

    def __init__(self, fails_at: int = 0):
        self.calls, self.fails_at = 0, fails_at

    def __call__(self, completions, **columns):
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("the reward is away")
        return [float(sum(map(ord, text)) % 17) for text in completions]


def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def trained(place):
    run(configured(place, place / "trained", *TRAINED), rewards=[Letters()])
    return place / "trained"


def moved(place, run_dir):
    """Names of the tower's tensors that training changed, and of those that it left."""
    before, after = tensors(place / "policy"), tensors(run_dir / "policy")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before if "q_proj" in name)
    names = {name for name in before if name.startswith("visual.")}
    changed = {name for name in names if not torch.equal(before[name], after[name])}
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all(np.isfinite(json.loads(line)["loss"]) for line in lines)
    transformers.AutoModelForImageTextToText.from_pretrained(run_dir / "policy")
    return changed, names - changed


@pytest.mark.wide
def test_adapters_on_a_tower_are_trained(place, tmp_path):
    run(configured(place, tmp_path / "run", *ADAPTED), rewards=[Letters()])
    changed, left = moved(place, tmp_path / "run")
    assert changed == {f"visual.blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert left


@pytest.mark.wide
def test_a_resumed_run_goes_on_with_its_tower(place, trained, tmp_path):
    parts = configured(place, tmp_path / "parts", *TRAINED)
    with pytest.raises(UserError, match="the reward is away"):
        run(parts, rewards=[Letters(fails_at=2)])
    run(parts.replace(resume=True), rewards=[Letters()])
    one, other = (tensors(folder / "policy") for folder in (trained, tmp_path / "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_tower_is_loaded_where_it_is_needed(place, tmp_path):
    said = []

    def loaded(*arguments, **options):
        config = configured(place, tmp_path / "run", *arguments)
        return load_run_policy(config, jax.devices()[:1], lambda *line: said.append(line), **options).variables

    assert loaded().keys() == {"params"}
    frozen = loaded(*FROZEN, pictures=True)
    assert frozen.keys() == {"params", "visual"} and "frozen vision tower of" in said[-1][1]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen["visual"])} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen["params"])} == {"float32"}
    trained = loaded(*TRAINED, *FROZEN)
    assert trained.keys() == {"params"} and "in its vision tower" in said[-1][1]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(trained["params"]["visual"])} == {"float32"}
    adapted = loaded(*ADAPTED)
    assert adapted["lora"].keys() == {"layers", "visual"} and "with adapters" in said[-1][1]
    narrow = loaded(*ADAPTED, "--policy.quantised=int8")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow["visual"])} == {"float32"}


def test_what_cannot_be_is_refused(place, tmp_path):
    for arguments, message in (
        ((*ADAPTED, "--policy.vision=train"), "policy.vision: expected frozen beside policy.lora"),
        (("--policy.lora.vision=true",), "policy.lora.vision: expected false without adapters"),
        (("--policy.lora.path=a", "--policy.lora.vision=true"), "policy.lora.path: expected no rank"),
    ):
        with pytest.raises(UserError, match=message):
            configured(place, tmp_path / "run", *arguments)
    text = json.loads((place / "policy" / "config.json").read_text())
    text.pop("vision_config")
    (tmp_path / "text").mkdir()
    for path in (place / "policy").iterdir():
        (tmp_path / "text" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "text" / "config.json").write_text(json.dumps(text))
    for arguments, message in (
        (TRAINED, "policy.vision: .* has no vision tower"),
        (ADAPTED, "policy.lora.vision: expected false: this qwen2_vl has no vision tower"),
        ((), "policy.path: .* has no vision tower, and pictures need one"),
    ):
        config = configured(place, tmp_path / "run", *arguments, f"--policy.path={tmp_path / 'text'}")
        with pytest.raises(UserError, match=message):
            load_run_policy(config, jax.devices()[:1], lambda *_: None, pictures=True)


def test_a_folder_without_rows_and_columns_among_its_positions_is_refused(place, tmp_path):
    (tmp_path / "flat").mkdir()
    for path in (place / "policy").iterdir():
        (tmp_path / "flat" / path.name).write_bytes(path.read_bytes())
    fields = json.loads((place / "policy" / "config.json").read_text())
    fields["text_config"]["rope_parameters"].pop("mrope_section")
    (tmp_path / "flat" / "config.json").write_text(json.dumps(fields))
    config = configured(place, tmp_path / "run", f"--policy.path={tmp_path / 'flat'}")
    with pytest.raises(UserError, match=r"has no mrope_section in its config\.json"):
        load_run_policy(config, jax.devices()[:1], lambda *_: None, pictures=True)
