"""Policies with a vision tower: its loaded parts, their types, and refused settings."""

import json
import shutil

import jax
import pytest

torch = pytest.importorskip("torch")
from support.vision.folders import picture, seeing_folder, write_rows  # noqa: E402

from grpo_jax.config.command_line import parse  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.runs.policy import load_run_policy  # noqa: E402

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
    text = json.loads((place / "policy" / "config.json").read_text())
    text.pop("vision_config")
    shutil.copytree(place / "policy", tmp_path / "text")
    (tmp_path / "text" / "config.json").write_text(json.dumps(text))
    for arguments, message in (
        (TRAINED, "policy.vision: .* has no vision tower"),
        (ADAPTED, "policy.lora.vision: expected false: this qwen2_vl has no vision tower"),
        ((), "policy.path: .* has no vision tower .*, and pictures need one"),
    ):
        config = configured(place, tmp_path / "run", *arguments, f"--policy.path={tmp_path / 'text'}")
        with pytest.raises(UserError, match=message):
            load_run_policy(config, jax.devices()[:1], lambda *_: None, pictures=True)


def test_a_folder_without_rows_and_columns_among_its_positions_is_refused(place, tmp_path):
    shutil.copytree(place / "policy", tmp_path / "flat")
    fields = json.loads((place / "policy" / "config.json").read_text())
    fields["text_config"]["rope_parameters"].pop("mrope_section")
    (tmp_path / "flat" / "config.json").write_text(json.dumps(fields))
    config = configured(place, tmp_path / "run", f"--policy.path={tmp_path / 'flat'}")
    with pytest.raises(UserError, match=r"an mrope_section in its config\.json"):
        load_run_policy(config, jax.devices()[:1], lambda *_: None, pictures=True)
