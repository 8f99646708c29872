"""The command line: it overrides files, knows the fields of task and judges in use, and prints what is in force."""

import json
from pathlib import Path

import pytest
import yaml
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


# mistakes: a file, an argument and Python are told the same


def three_ways(dotted, value, task, tmp_path):
    """A value in a file, as an argument and in Python, each as something that makes a config."""
    nested = value
    for name in reversed(dotted.split(".")):
        nested = {name: nested}
    values = {"task": {"kind": task}} | {name: inner for name, inner in nested.items() if name != "task"}
    values["task"] |= nested.get("task", {})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    word = value if isinstance(value, str) else json.dumps(value)
    yield lambda: parse([f"--config={tmp_path / 'c.yaml'}"])
    yield lambda: parse([f"--task={task}", f"--{dotted}={word}"])
    yield lambda: make_config(values)


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        ("training.max_step", 3, "training.max_step: no such field; did you mean training.max_steps"),
        ("optimiser.beta1", 0.5, r"optimiser(.beta1)?: no such field; did you mean optimizer(.beta1)?\?"),
        ("sede", 3, "sede: no such field; did you mean seed?"),
        ("num_generations", 4, "num_generations: no such field; here it is sampling.group_size"),
        ("training.beta", 0.1, "training.beta: no such field; here it is algorithm.kl_coef; 0 too"),
        ("gradient_checkpointing", True, "gradient_checkpointing: no such field; here it is policy.remat: layer"),
        ("use_vllm", True, "use_vllm: no such field; TRL's is not here: the sampler is compiled with the policy"),
        ("generation_kwargs.seed", 3, "generation_kwargs: no such field; here it is sampling.stop"),
        ("lora.rank", 8, "lora: no such field; did you mean policy.lora?"),
        ("cartpole/num_generations", 4, "num_generations: no such field; did you mean "),
        ("policy.lora.rnk", 3, "policy.lora.rnk: no such field; did you mean policy.lora.rank?"),
        (
            "rewards",
            [{"name": "m:f", "wieght": 1}],
            r"rewards\[0\].wieght: .* did you mean rewards\[0\].weight",
        ),
        ("devices.polcy", "cpu", "devices.polcy: no such field; did you mean devices.policy?"),
        (
            "algorithm.advantage",
            "gdop",
            r"algorithm.advantage: expected 'gdpo', .* \(did you mean gdpo\?\), got 'gdop'",
        ),
        ("data.streaming", True, "data.streaming: no such field; it left: data files"),
        ("prompt_enhancement/judges.renderer.scheduler", "x", "judges.renderer.scheduler: no such field; it left"),
        ("training.max_steps", "many", "training.max_steps: expected a whole number, got 'many'"),
        ("training.max_steps", 2.5, "training.max_steps: expected a whole number, got '?2.5"),
        ("policy.lora.vision", 2, "policy.lora.vision: expected true or false, got '?2"),
        ("optimizer.learning_rate", "fast", "optimizer.learning_rate: expected a number, got 'fast'"),
        ("policy.lora", 3, "policy.lora: expected a mapping, got '?3"),
        ("recommendation/task.dummy_user", 3, "task.dummy_user: no such field; did you mean task.dummy_users"),
        ("recommendation/task.retrieval.bakend", 3, "task.retrieval.bakend: .* did you mean task.retrieval.backend"),
        ("prompt_enhancement/judges.scorer.modl", "x", "judges.scorer.modl: .* did you mean judges.scorer.model"),
        ("cartpole/algorithm.group_sise", 3, "algorithm.group_sise: no such field; did you mean algorithm.group_size"),
        ("cartpole/algorithm.weights", ["wide"], r"algorithm.weights\[0\]: expected a number, got 'wide'"),
    ],
)
def test_a_mistyped_field_or_value_is_named_with_the_nearest_valid_one(dotted, value, message, tmp_path):
    task, _, dotted = dotted.rpartition("/")
    for way in three_ways(dotted, value, task or "text", tmp_path):
        with pytest.raises(UserError, match=message) as raised:
            way()
        assert "\n" not in str(raised.value)


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


OLDER = {
    "num_sample_generations": "sampling.group_size", "num_rollouts": "sampling.group_size", "k": "eval_rewards",
    "reward_type": "rewards", "use_dummy": "task.source: dummy", "dummy_size": "task.dummy_users",
    "normalize_rewards": "algorithm.advantage", "fp16": "policy.compute_dtype: float16",
    "bf16": "policy.compute_dtype: bfloat16", "use_ref_model": "algorithm.kl_coef", "clip_ratio": "algorithm.clip_low",
    "gamma": "ppo.gamma", "grpo_epochs": "training.inner_epochs", "checkpoint_dir": "run_dir",
    "update_ref_model_freq": "algorithm.update_ref_every", "prompt_file": "data.prompts",
    "sequential_file": "task.source",
    "policy_model": "policy.path", "dataset_name": "data.prompts", "max_length": "sampling.max_new_tokens",
    "kl_coef": "algorithm.kl_coef",
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize("value", [[], ["3"]])
def test_an_older_scripts_option_is_told_its_field_with_and_without_a_value(name, value, capsys):
    assert main(["--task=recommendation", f"--{name}", *value]) == 2
    assert f"{name}: no such " in (told := capsys.readouterr().err) and f"; here it is {OLDER[name]}" in told


def test_arguments_without_an_option_or_a_value_are_refused():
    for arguments, message in (
        (["--seed"], "--seed: expected a value"),
        (["--seed", "--resume"], "--seed: expected a value"),
        (["train"], "train: expected an option, such as --config FILE"),
        (["--task=text", "--rewards", "[{"], "rewards: not valid YAML"),
        (["--max_steps", "3"], "max_steps: no such field; here it is training.max_steps; in batches sampled"),
        (["--sampling.learning_rate=1"], "sampling.learning_rate: no such field; here it is optimizer.learning_rate"),
        (["--lora_rank=3"], "lora_rank: no such field; did you mean policy.lora.rank?"),
        (["--resum"], "--resum: no such option; did you mean --resume?"),
        (["--plam", "--seed=1"], "--plam: no such option; did you mean --plan?"),
    ):
        with pytest.raises(UserError, match=message):
            parse(arguments)
