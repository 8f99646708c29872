"""Configurations: files, command line and dataclasses say the same thing."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from support.text_task import ROOT

from grpo_jax.config import Config, LoraSection, PolicySection, RewardSection, from_dict, to_dict, to_yaml
from grpo_jax.config.command_line import arguments_with_defaults, find_config, parse
from grpo_jax.errors import UserError
from grpo_jax.evaluate import main as evaluate
from grpo_jax.export import main as export
from grpo_jax.train import main

SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith("cartpole"))
SECTIONS = [member.name for member in dataclasses.fields(Config)]


def other_values(config=None):
    """A config in which every kind of field differs from its default."""
    return dataclasses.replace(
        config or Config(),
        task="text",
        seed=2**40,
        run_dir="somewhere",
        deterministic=True,
        report_to=[],
        judge_timeout=2.5,
        policy=PolicySection(path="x", lora=LoraSection(rank=3, targets=["q_proj"])),
        rewards=[
            RewardSection("alignment"),
            RewardSection("m.py:f", -0.5, condition_on="alignment", threshold=0.2, options={"a": 1.5}),
        ],
        watch=["pixel_accuracy"],
    )


@pytest.mark.parametrize("config", [Config(), other_values()], ids=["defaults", "others"])
def test_yaml_round_trip(config, tmp_path):
    assert from_dict(yaml.safe_load(to_yaml(config))) == config
    assert from_dict(to_dict(config)) == config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert parse([f"--config={tmp_path / 'config.yaml'}"]) == config


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parse(["--config", name])
    assert name.startswith(config.task) and from_dict(to_dict(config)) == config
    assert find_config(f"{name}.yaml") == find_config(name) == find_config(f"configs/{name}.yaml")
    header = find_config(name).read_text().splitlines()[:12]
    assert any("python -m grpo_jax.train" in line for line in header)
    assert any("Hardware" in line for line in header)

    with pytest.raises(SystemExit) as ended:
        main(["--config", name, "--seed", "7", "--print_config"])
    printed = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert from_dict({k: v for k, v in yaml.safe_load(printed).items() if k != "config"}) == dataclasses.replace(
        config, seed=7
    )


def test_a_file_comes_before_a_shipped_config_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(SHIPPED[0]).parent != tmp_path
    Path(f"{SHIPPED[0]}.yaml").write_text("seed: 5\n")
    assert parse(["--config", f"{SHIPPED[0]}.yaml"]).seed == 5
    for wrong in ("nowhere/" + SHIPPED[0], "no_such_config", "."):
        with pytest.raises(UserError, match="no such file; configs that ship with grpo_jax: .*" + SHIPPED[0]):
            find_config(wrong)


def test_the_command_line_overrides_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("seed: 1\ntask: text\ntraining: {max_steps: 9, save_every: 4}\n")
    flags = ["--resume", "--debug", "false", "--policy.lora.rank=2", "--renderer.use_t5", "false", "--report_to", "[]"]
    rewards = ["--rewards", '[{"name": "m:f", "weight": 2}]']
    config = parse(["--config", str(path), "--training.max_steps", "7", *flags, *rewards])
    assert (config.seed, config.task, config.training.max_steps, config.training.save_every) == (1, "text", 7, 4)
    assert config.resume and not config.debug and not config.renderer.use_t5 and config.report_to == []
    assert config.policy.lora.rank == 2 and config.rewards == [RewardSection("m:f", 2.0)]
    assert parse(["--config", str(path), "--seed", "2"]).seed == 2


def test_without_a_config_it_is_the_miniature_or_the_run_that_is_resumed(tmp_path):
    assert arguments_with_defaults(["--seed", "1"]) == ["--config=prompt_enhancement_miniature", "--seed", "1"]
    assert parse(arguments_with_defaults([])) == parse(["--config", "prompt_enhancement_miniature"])
    (tmp_path / "config.yaml").write_text("seed: 11\n")
    for form in (["--run_dir", str(tmp_path)], [f"--run_dir={tmp_path}"]):
        config = parse(arguments_with_defaults(["--resume", *form]))
        assert config.seed == 11 and config.resume and config.run_dir == str(tmp_path)
    assert arguments_with_defaults(["--config", "x", "--resume"]) == ["--config", "x", "--resume"]


def test_help_names_every_field(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in SECTIONS:
        assert f"--{name}" in text, name
    for phrase in ("Completions per prompt (G).", "Prompts of one iteration (P).", "Rank of the adapters"):
        assert phrase in text
    for command, options in ((evaluate, ("--run", "--checkpoint", "--json")), (export, ("--out", "--dtype"))):
        with pytest.raises(SystemExit):
            command(["--help"])
        text = capsys.readouterr().out
        assert all(option in text for option in options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sampling": {"top_p": 0.0}}, r"sampling.top_p: expected a number in \(0, 1\], got 0.0"),
        ({"sampling": {"groups": 3}}, "sampling.groups: expected one of"),
        ({"optimiser": {}}, "optimiser: expected one of"),
        ({"policy": {"lora": {"rank": -1}}}, "policy.lora.rank: expected a number >= 0, got -1"),
        ({"policy": {"lora": {"ranks": 1}}}, "policy.lora.ranks: expected one of"),
        ({"rewards": [{"name": ""}]}, "rewards.name: expected a name"),
        ({"rewards": [{"name": "a"}, {"name": "a"}]}, "rewards: expected each reward once"),
        ({"rewards": [{"name": "a", "condition_on": "b"}]}, "rewards.a.condition_on: expected one of"),
        ({"training": {"minibatches": 5}}, "training.prompts_per_batch: expected a multiple of .* = 5, got 12"),
        ({"training": {"chunk_prompts": 5}}, "training.chunk_prompts: expected a divisor of prompts_per_batch = 12"),
        ({"optimizer": {"beta2": 1.0}}, "optimizer.beta2"),
        ({"data": {"held_out": 0.7}}, "data.held_out"),
        ({"seed": -1}, "seed: expected a number in"),
    ],
)
def test_values_that_cannot_be(values, message):
    with pytest.raises(UserError, match=message):
        from_dict(values)
