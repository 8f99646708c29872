"""The command line: it overrides files, knows the fields of task and judges in use, and prints what is in force."""

from pathlib import Path

import pytest
from support.text_task import ROOT

from grpo_jax.config.command_line import find_config, load_config, parse
from grpo_jax.config.run import make_config
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.tasks.text_task import Text
from grpo_jax.train import main

SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


def stopped(capsys, *arguments):
    """What a command prints that ends by itself."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


# where values come from


def test_arguments_override_files_which_override_defaults(tmp_path):
    path, other = tmp_path / "c.yaml", tmp_path / "d.yaml"
    path.write_text("seed: 1\ntask: text\ntraining: {max_steps: 9, save_every: 4}\n")
    other.write_text("training: {save_every: 5, keep_checkpoints: 3}\n")
    flags = ["--resume", "--debug", "--policy.lora.rank=2", "--report_to", "[]"]
    rewards = ["--rewards", '[{"name": "m:f", "weight": 2}]']
    config = parse(["--config", str(path), "--training.max_steps", "7", *flags, *rewards, "--config", str(other)])
    assert config.training == config.training.replace(max_steps=7, save_every=5, keep_checkpoints=3)
    assert (config.seed, config.task) == (1, Text()) and config.resume and config.report_to == []
    assert config.policy.lora.rank == 2 and config.rewards == [RewardSection(name="m:f", weight=2.0)]
    assert parse(["--config", str(path), "--seed", "2"]).seed == 2


def test_values_are_read_as_their_fields_say():
    words = {
        "run_dir": "2024", "policy.path": "a{odd}", "algorithm.clip_low": "null", "policy.lora.targets": "[q_proj, o]",
        "optimizer.learning_rate": "1e-5", "sampling": '{"group_size": 4, "top_k": 2}', "rewards": '[{"name": "m:f"}]',
        "judges.a": "vqa", "judges.a.path": "[x]", "judges.a.question": "{prompt}: {odd}",
        "eval_rewards": '["m:a", "m:b"]', "devices.policy": "gpu:0,gpu:1", "deterministic": "no",
    }  # fmt: skip
    options = [f"--{name}={text}" for name, text in words.items()]
    config = parse(["--task=text", "--sampling.max_new_tokens=7", *options])
    assert (config.run_dir, config.policy.path, config.algorithm.clip_low) == ("2024", "a{odd}", None)
    assert (config.judges["a"].path, config.judges["a"].question) == ("[x]", "{prompt}: {odd}")
    assert config.policy.lora.targets == ["q_proj", "o"] and config.optimizer.learning_rate == 1e-5
    sampling = config.sampling
    assert (sampling.group_size, sampling.top_k, sampling.max_new_tokens) == (4, 2, 7)  # of a section what it names
    assert config.rewards == [RewardSection(name="m:f")] and config.eval_rewards == ["m:a", "m:b"]
    assert config.devices == {"policy": "gpu:0,gpu:1"} and config.deterministic is False


def test_another_class_takes_the_fields_of_the_old_one_with_it():
    second = ["--judges.second", "examples/own_judge/brightness.py:Brightness", "--judges.second.red=0.5"]
    config = parse(["--judges.renderer.steps=3", "--judges.renderer=stable_diffusion_3", *second])
    renderer = config.judges["renderer"]
    assert (renderer.steps, renderer.batch_size) == (3, 16)  # 16 of the miniature's file
    assert config.judges["second"].red == 0.5 and set(config.judges) == {"renderer", "scorer", "second"}
    other = parse(["--judges.renderer", "examples/own_judge/brightness.py:Brightness"])
    assert type(other.judges["renderer"]).__name__ == "Brightness"


def test_without_a_config_it_is_the_tasks_default_or_the_run_that_is_resumed(tmp_path):
    assert parse([]) == parse(["--task", "prompt_enhancement"]) == parse(["--config", "prompt_enhancement_miniature"])
    assert parse(["--task", "cartpole"]) == parse(["--config", "cartpole_grpo"])
    assert parse(["--task=recommendation", "--seed=1"]) == parse(["--config=recommendation_dummy", "--seed=1"])
    assert parse(["--task", "text"]) == make_config(task="text")
    (tmp_path / "config.yaml").write_text("seed: 11\ntask: text\n")
    for form in (["--run_dir", str(tmp_path)], [f"--run_dir={tmp_path}"]):
        config = parse(["--resume", *form])
        assert config.seed == 11 and config.resume and config.run_dir == str(tmp_path)
    with pytest.raises(UserError, match="--resume: say which run with --run_dir DIR"):
        parse(["--resume"])


def test_a_file_comes_before_a_shipped_config_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = SHIPPED[0]
    assert find_config(f"{name}.yaml") == find_config(name) == find_config(f"configs/{name}.yaml")
    assert find_config(name).parent != tmp_path
    Path(f"{name}.yaml").write_text("task: text\nseed: 5\n")
    assert parse(["--config", f"{name}.yaml"]).seed == 5
    for wrong in ("nowhere/" + name, "no_such_config", "."):
        with pytest.raises(UserError, match="no such file; configs that ship with grpo_jax: .*" + name):
            find_config(wrong)


# what it prints


def test_the_printed_config_is_a_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = "prompt_enhancement_sd3"
    Path("printed.yaml").write_text(stopped(capsys, "--config", name, "--seed", "7", "--print_config"))
    expected = load_config(find_config(name)).replace(seed=7)
    assert load_config(Path("printed.yaml")) == parse(["--config=printed.yaml"]) == expected


# forms of values


def test_a_list_is_given_without_brackets():
    assert parse(["--task=text", "--report_to", "wandb"]).report_to == ["wandb"]
    assert parse(["--task=text", "--report_to=wandb, tensorboard"]).report_to == ["wandb", "tensorboard"]
    assert parse(["--task=text", "--sampling.stop", "5"]).sampling.stop == ["5"]
    assert parse(["--task=text", "--sampling.stop", "a,b"]).sampling.stop == ["a,b"]
    assert make_config(task="text", report_to="wandb").report_to == ["wandb"]


def test_a_lora_config_of_peft_is_a_section():
    peft = pytest.importorskip("peft")
    lora = make_config(task="text", policy={"lora": peft.LoraConfig(r=4, target_modules=["q_proj"])}).policy.lora
    assert (lora.rank, lora.alpha, lora.targets) == (4, 8.0, ["q_proj"])
    with pytest.raises(UserError, match=r"policy.lora.lora_dropout: expected none in a LoraConfig"):
        make_config(task="text", policy={"lora": peft.LoraConfig(lora_dropout=0.1)})


@pytest.mark.parametrize(
    ("lora", "given", "expected"),
    [({}, None, 1e-6), ({"rank": 2}, None, 1e-4), ({"path": "a"}, None, 1e-4), ({}, 0.5, 0.5)],
)
def test_the_learning_rate_is_safe_for_what_is_trained_unless_it_is_given(lora, given, expected):
    assert make_config(task="text", policy={"lora": lora}, optimizer={"learning_rate": given}).learning_rate == expected
