"""One name for all commands, and what is said of options that are called otherwise."""

import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
import yaml
from support.text_task import ROOT

from grpo_jax import __main__, evaluate, export, train
from grpo_jax.config.command_line import parse
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError


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


def printed(capsys, *words):
    """The config that a command would run with."""
    with pytest.raises(SystemExit):
        __main__.main([*words, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_train_and_resume_take_the_options_of_the_training_command(tmp_path, capsys):
    assert printed(capsys, "train", "--task=text", "--seed", "3")["seed"] == 3
    (tmp_path / "config.yaml").write_text("task: text\nseed: 5\n")
    values = printed(capsys, "resume", str(tmp_path), "--training.max_steps=9")
    assert (values["seed"], values["resume"], values["run_dir"]) == (5, True, str(tmp_path))
    assert values["training"]["max_steps"] == 9


def test_commands_reach_their_runs(tmp_path, capsys):
    gone = str(tmp_path / "gone")
    for words in (["resume", gone], ["evaluate", "--run", gone], ["export", "--run", gone, "--out", gone]):
        assert __main__.main(words) == 2
        line = capsys.readouterr().err
        assert gone in line and "no config.yaml" in line and not (tmp_path / "gone").exists()
    assert __main__.main(["resume"]) == 2
    assert "resume: say which run, as in resume runs/my_run" in capsys.readouterr().err
    for words in ([], ["--help"]):
        assert __main__.main(words) == 0
        shown = capsys.readouterr().out
        assert all(f"\n  {name} " in shown for name in ("train", "resume", "plan", "evaluate", "export", "report"))
    assert __main__.main(["train", "--task=cartpole", "--plan"]) == 2
    assert "there is nothing to plan" in capsys.readouterr().err


def test_every_command_says_its_version(capsys):
    for command in (__main__.main, train.main):
        assert command(["--version"]) == 0
        assert capsys.readouterr().out.strip() == metadata.version("grpo_jax")
    for command in (evaluate.main, export.main):
        with pytest.raises(SystemExit):
            command(["--version"])
        assert capsys.readouterr().out.strip() == metadata.version("grpo_jax")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "--rum", "x", "--out", "y"], "error: --rum: no such option; did you mean --run?"),
        (["evaluate", "--run=x", "--chekpoint=best"], "error: --chekpoint: no such option; did you mean --checkpoint?"),
        (["export", "--wholly_other"], "error: --wholly_other: no such option; there are: --help, --run, "),
        (["exprot"], "error: exprot: no such command; did you mean export?"),
    ],
)
def test_what_a_command_has_not_is_told_what_was_meant(words, message, capsys):
    assert __main__.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(message) and said.count("\n") == 1


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
