"""The command line: overrides of files, fields of the task and judges in use, and one name for all commands."""

import contextlib
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from support.text_task import ROOT

from grpo_jax import __main__, evaluate, train
from grpo_jax.config.command_line import find_config, load_config, parse
from grpo_jax.config.fields import to_yaml
from grpo_jax.config.run import make_config
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.tasks.text_task import Text

SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


def stopped(capsys, *arguments):
    """Return the output of a command that ends by itself."""
    with pytest.raises(SystemExit) as ended:
        __main__.main(list(arguments))
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


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
        "judges.b": "function", "judges.b.name": "m:f",
        "judges.b.options.size": "3", "judges.b.options.text": "a: b: c",
        "data.chat_template_options.today": "2026-11-02", "data.chat_template_options.enable_thinking": "true",
        "eval_rewards": '["m:a", "m:b"]', "devices.policy": "gpu:0,gpu:1", "deterministic": "no",
    }  # fmt: skip
    options = [f"--{name}={text}" for name, text in words.items()]
    config = parse(["--task=text", "--sampling.max_new_tokens=7", *options])
    assert (config.run_dir, config.policy.path, config.algorithm.clip_low) == ("2024", "a{odd}", None)
    assert (config.judges["a"].path, config.judges["a"].question) == ("[x]", "{prompt}: {odd}")
    assert config.policy.lora.targets == ["q_proj", "o"] and config.optimizer.learning_rate == 1e-5
    assert config.judges["b"].options == {"size": 3, "text": "a: b: c"}
    assert config.data.chat_template_options == {"today": "2026-11-02", "enable_thinking": True}
    assert make_config(yaml.safe_load(to_yaml(config))) == config
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
    assert parse(["--task=recommendation", "--seed=1"]) == parse(["--config=recommendation_dummy", "--seed=1"])
    assert parse(["--task", "text"]) == make_config(task="text")
    (tmp_path / "config.yaml").write_text("seed: 11\ntask: text\n")
    for form in (["--run_dir", str(tmp_path)], [f"--run_dir={tmp_path}"]):
        for resume in ("--resume", "--resume=True", "--resume=yes"):
            config = parse([resume, *form])
            assert config.seed == 11 and config.resume and config.run_dir == str(tmp_path)
    with pytest.raises(UserError, match="--resume: give the run's folder by --run_dir DIR"):
        parse(["--resume"])


def test_a_file_comes_before_a_shipped_config_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = SHIPPED[0]
    assert find_config(f"{name}.yaml") == find_config(name) == find_config(f"configs/{name}.yaml")
    assert find_config(name).parent != tmp_path
    Path(f"{name}.yaml").write_text("task: text\nseed: 5\n")
    assert parse(["--config", f"{name}.yaml"]).seed == 5
    with pytest.raises(UserError, match=f"no such file; did you mean {name}"):
        find_config("nowhere/" + name)
    for wrong in ("no_such_config", "."):
        with pytest.raises(UserError, match="no such file; configs that ship with grpo_jax: .*" + name):
            find_config(wrong)


def test_the_printed_config_is_a_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = "prompt_enhancement_sd3"
    Path("printed.yaml").write_text(stopped(capsys, "train", "--config", name, "--seed", "7", "--print_config"))
    expected = load_config(find_config(name)).replace(seed=7)
    assert load_config(Path("printed.yaml")) == parse(["--config=printed.yaml"]) == expected


def test_a_list_is_given_without_brackets():
    assert parse(["--task=text", "--report_to", "wandb"]).report_to == ["wandb"]
    assert parse(["--task=text", "--report_to=wandb, tensorboard"]).report_to == ["wandb", "tensorboard"]
    assert parse(["--task=text", "--sampling.stop", "5"]).sampling.stop == ["5"]
    assert parse(["--task=text", "--sampling.stop", "a,b"]).sampling.stop == ["a,b"]
    assert make_config(task="text", report_to="wandb").report_to == ["wandb"]
    assert parse(["--task=text", "--seed=1", "--seed=2"]).seed == 2
    with pytest.raises(UserError, match=r"--rewards: given 2 times, .* the last alone: list all entries after one"):
        parse(["--task=text", "--rewards", "a.py:f", "--rewards", "b.py:g"])
    assert len(parse(["--task=text", "--rewards", "[a.py:f, b.py:g]", "--rewards", "b.py:g"]).rewards) == 1


def test_an_empty_mapping_replaces_that_of_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text("task: text\ndata: {columns: {prompt: question}, held_out: 0.1}\n")
    config = [f"--config={tmp_path / 'c.yaml'}"]
    assert parse(config).data.columns == {"prompt": "question"}
    data = parse([*config, "--data.columns", "{}"]).data
    assert data.columns == {} and data.held_out == 0.1
    assert parse([*config, "--data.columns", "{}", "--data.columns.answer=final"]).data.columns == {"answer": "final"}


def test_a_lora_config_of_peft_is_a_section():
    peft = pytest.importorskip("peft")
    lora = make_config(task="text", policy={"lora": peft.LoraConfig(r=4, target_modules=["q_proj"])}).policy.lora
    assert (lora.rank, lora.alpha, lora.targets) == (4, 8.0, ["q_proj"])
    plain = {"r": 4, "target_modules": ["q_proj"]}
    saved = peft.LoraConfig(**plain, base_model_name_or_path="base", inference_mode=True, modules_to_save=[])
    assert make_config(task="text", policy={"lora": saved}).policy.lora.rank == 4
    others = {"lora_dropout": 0.1, "bias": "all", "rank_pattern": {"q_proj": 8}, "layers_to_transform": [0]}
    others |= {"target_modules": None}  # PEFT takes its own projections, as q_proj and v_proj of Qwen2
    for name, value in others.items():
        with pytest.raises(UserError, match=rf"policy.lora.{name}: expected .* in a LoraConfig"):
            make_config(task="text", policy={"lora": peft.LoraConfig(**plain | {name: value})})


@pytest.mark.parametrize(
    ("lora", "given", "expected"),
    [({}, None, 1e-6), ({"rank": 2}, None, 1e-4), ({"path": "a"}, None, 1e-4), ({}, 0.5, 0.5)],
)
def test_the_learning_rate_is_safe_for_what_is_trained_unless_it_is_given(lora, given, expected):
    assert make_config(task="text", policy={"lora": lora}, optimizer={"learning_rate": given}).learning_rate == expected


def test_the_package_is_a_command():
    done = subprocess.run([sys.executable, "-m", "grpo_jax", "trian"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: trian: no such command; did you mean train?\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["grpo"] == "grpo_jax.__main__:command"


def test_the_console_script_imports_from_the_current_folder(tmp_path, monkeypatch):
    left = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/somewhere/bin", *sys.path[1:]])
    monkeypatch.setattr(sys, "argv", ["grpo", "--version"])
    monkeypatch.setattr(__main__, "exit_process", left.append)
    __main__.command()
    assert sys.path[0] == str(tmp_path) and left == [0]


def test_train_and_resume_take_the_options_of_the_training_command(tmp_path, capsys):
    assert yaml.safe_load(stopped(capsys, "train", "--task=text", "--seed", "3", "--print_config"))["seed"] == 3
    (tmp_path / "config.yaml").write_text("task: text\nseed: 5\n")
    values = yaml.safe_load(stopped(capsys, "resume", str(tmp_path), "--training.max_steps=9", "--print_config"))
    assert (values["seed"], values["resume"], values["run_dir"]) == (5, True, str(tmp_path))
    assert values["training"]["max_steps"] == 9


def test_commands_reach_their_runs(tmp_path, capsys):
    gone = str(tmp_path / "gone")
    for words in (["resume", gone], ["evaluate", "--run", gone], ["export", "--run", gone, "--out", gone]):
        assert __main__.main(words) == 2
        line = capsys.readouterr().err
        assert gone in line and "no config.yaml" in line and not (tmp_path / "gone").exists()
    assert __main__.main(["resume"]) == 2
    assert "resume: give the run's folder, as in resume runs/my_run" in capsys.readouterr().err
    for words in ([], ["--help"]):
        assert __main__.main(words) == 0
        shown = capsys.readouterr().out
        assert all(f"\n  {name} " in shown for name in ("train", "resume", "plan", "evaluate", "export"))
    assert __main__.main(["train", "--task=recommendation", "--plan"]) == 2
    assert "there is nothing to plan" in capsys.readouterr().err


def test_every_command_says_its_version(capsys):
    for command in (__main__.main, train.main, evaluate.main):
        with contextlib.suppress(SystemExit):
            assert command(["--version"]) == 0
        assert capsys.readouterr().out.strip() == metadata.version("grpo_jax")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "--run=x", "--chekpoint=best"], "error: --chekpoint: no such option; did you mean --checkpoint?"),
        (["export", "--wholly_other"], "error: --wholly_other: no such option; there are: --help, --run, "),
        (["evaluate"], "error: the following arguments are required: --run; grpo evaluate --help lists the options\n"),
        (["evaluate", "--run=x", "--samples=a"], "error: --samples: invalid int value: 'a'; grpo evaluate --help "),
    ],
)
def test_what_a_command_has_not_is_told_what_was_meant(words, message, capsys):
    assert __main__.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(message) and said.count("\n") == 1


def test_all_linear_layers_are_those_of_an_empty_list():
    assert parse(["--task=text", "--policy.lora.rank=2", "--policy.lora.targets=all-linear"]).policy.lora.targets == []


def test_a_table_takes_any_name():
    config = parse(["--task=text", "--data.columns.model=a", "--data.columns.seed", "b", "--data.columns={prompt: c}"])
    assert config.data.columns == {"model": "a", "seed": "b", "prompt": "c"}


def test_an_adapter_on_the_command_line_takes_the_place_of_a_rank_in_the_file(tmp_path):
    lora = {"rank": 8, "alpha": 16.0, "targets": ["q_proj"]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"task": "text", "policy": {"lora": lora}}))
    config = [f"--config={tmp_path / 'c.yaml'}"]
    assert parse([*config, "--policy.lora.path=adapter"]).policy.lora == make_config(
        task="text", policy={"lora": {"path": "adapter"}}
    ).policy.lora  # fmt: skip
    assert parse([*config, "--policy.lora.alpha=8"]).policy.lora.rank == 8
    with pytest.raises(UserError, match=r"policy\.lora\.path: expected no rank"):
        parse([*config, "--policy.lora.path=adapter", "--policy.lora.rank=4"])  # who says both means one of them


def test_no_command_warns_of_a_torch_that_it_does_not_need():
    code = "import sys; sys.modules['torch'] = None; from grpo_jax.errors import run_cli; run_cli({}, ())"
    code = code.format("lambda _: print(__import__('transformers').utils.is_torch_available())")
    bare = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    done = subprocess.run([sys.executable, "-c", code], env=bare, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
