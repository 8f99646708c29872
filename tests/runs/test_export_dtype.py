"""Training results survive the export: a bfloat16 folder, tiny updates, and the written folder."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.folders import load_folder
from support.text_task import SHORT, final_state, train_here
from transformers import AutoModelForCausalLM

from grpo_jax import export

MODULES = {"q_proj": "self_attn", "down_proj": "mlp"}


@pytest.fixture(scope="module")
def base(place, tmp_path_factory):
    """The tiny policy in bfloat16."""
    folder = tmp_path_factory.mktemp("half") / "policy"
    shutil.copytree(place.policy, folder)
    AutoModelForCausalLM.from_pretrained(place.policy, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(place, base, tmp_path_factory):
    """Runs one step: the run directory."""

    def run(*options):
        folder = tmp_path_factory.mktemp("run") / "run"
        quick = ["--training.max_steps=1", "--evaluation.every=0", "--data.held_out=0", *SHORT]
        assert train_here(place.config, folder, f"--policy.path={base}", *quick, *options) == 0
        return folder

    return run


@pytest.fixture(scope="module")
def adapted(trained):
    """At a learning rate that bfloat16 cannot see."""
    tiny = ["--optimizer.learning_rate=1e-5", "--optimizer.warmup_steps=0"]
    targets = ['--policy.lora.targets=["q_proj","down_proj"]', "--policy.frozen_dtype=bfloat16"]
    return trained("--policy.lora.rank=2", *targets, *tiny)


def lost(folder, base, adapters) -> float:
    """The largest |what the folder adds to the base - what the adapters add| / |what they add|, over all kernels."""
    ours, before = (load_file(path / "model.safetensors") for path in (folder, base))
    shares = []
    for name, part in MODULES.items():
        for layer in range(len(adapters[name]["a"])):
            tensor = f"model.layers.{layer}.{part}.{name}.weight"
            a, b = (np.asarray(adapters[name][factor][layer], np.float64) for factor in "ab")
            delta = torch.from_numpy((a @ b).T * (32.0 / 2))
            assert delta.norm() > 0
            error = ours[tensor].double() - before[tensor].double() - delta
            shares.append(float(error.norm() / delta.norm()))
    return max(shares)


@pytest.mark.wide
def test_small_adapters_are_merged_in_float32(adapted, base, tmp_path):
    adapters = final_state(adapted)[0]["variables"]["lora"]["layers"]
    assert lost(adapted / "policy", base, adapters) < 0.01
    assert json.loads((adapted / "policy" / "config.json").read_text())["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(adapted / "policy", dtype="auto")
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}

    command = ["--run", str(adapted), "--out"]
    assert export.main([*command, str(tmp_path / "out")]) == 0
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert written == (adapted / "policy" / "model.safetensors").read_bytes()
    assert export.main([*command, str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert lost(tmp_path / "half", base, adapters) > 0.1
    assert load_folder(tmp_path / "half", param_dtype=None, tokenizer=False).params["norm"]["scale"].dtype == "bfloat16"


def test_trained_weights_are_exported_unrounded(trained, base):
    run = trained()
    final = final_state(run)[0]["variables"]["params"]
    written = load_folder(run / "policy", param_dtype=None, tokenizer=False).params
    start = load_folder(base, tokenizer=False).params
    for name in ("embed_tokens", "lm_head"):
        np.testing.assert_array_equal(np.asarray(written[name]), np.asarray(final[name]))
    kernels = [np.asarray(tree["layers"]["q_proj"]["kernel"]) for tree in (written, final, start)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert kernels[0].dtype == np.float32 and (kernels[0] != kernels[2]).any()
    assert (kernels[0] != torch.tensor(kernels[0]).bfloat16().float().numpy()).any()
