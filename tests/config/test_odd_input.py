"""Unusual input: broken run directories, numbers out of all bounds, impossible file names."""

import json
import os
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from grpo_jax import evaluate, export, predict
from grpo_jax.config.command_line import load_config, parse
from grpo_jax.config.fields import identity, to_yaml
from grpo_jax.config.files import read_yaml
from grpo_jax.config.named import load_object
from grpo_jax.config.run import make_config
from grpo_jax.config.sections import SamplingSection
from grpo_jax.errors import UserError, read_options, run_cli, run_parser
from grpo_jax.predict import load_rewriter
from grpo_jax.rollout.prompts import load_prompts
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.runs.loading import options_without_effect, training_warnings
from grpo_jax.runs.policy import run_config
from grpo_jax.train import main

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def line_of(capsys, command, *arguments):
    assert command([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err.strip()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "config.yaml: expected sections and fields, got nothing: the file is empty"),
        (b"text", "config.yaml: expected sections and fields, got 'text'"),
        (b"task: text\ntrainin: {}\n", "trainin: no such field; did you mean training?"),
        (b"task: \xff\n", "config.yaml: not UTF-8 text; save it as UTF-8"),
        (b"seed: 1\n", "task: expected a kind"),
        (b"run_dir: !!python/object/apply:os.system ['touch trace']\n", "not valid YAML"),
        (b"task: text\ntask: environment\n", "config.yaml: not valid YAML: line 2: 'task' occurs twice in one section"),
        (BOMB.encode(), "stands for more than 100,000 entries"),
        (b"task: &a [*a]\n", "nested deeper than 32 levels"),
        (b"task: text\nwatch: " + b"[" * 100 + b"]" * 100, "nested deeper than 32 levels"),
        (b"task: text\nseed: " + b"9" * 5000, "not valid YAML"),
        (b'task: text\nrun_dir: "a\\0b"\n', "holds a NUL character"),
        (b'task: text\nrun_dir: "\\ud800"\n', "half a character"),
    ],
)
def test_run_directories_with_a_broken_config(tmp_path, capsys, content, message):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_bytes(content)
    assert message in line_of(capsys, evaluate.main, "--run", run)
    assert message in line_of(capsys, export.main, "--run", run, "--out", tmp_path / "out")
    assert message in line_of(capsys, main, "--resume", "--run_dir", run)
    with pytest.raises(UserError) as error:
        load_rewriter(run)
    assert message in str(error.value) and len(str(error.value)) < 300


def every_float(values, path=()):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from every_float(value, (*path, key))
        elif isinstance(value, float):
            yield ".".join((*path, key))


@pytest.mark.parametrize("task", ["text", "prompt_enhancement", "recommendation"])
def test_no_float_takes_nan_or_infinity(task):
    names = list(every_float(parse(["--task", task]).model_dump()))
    assert len(names) > 10
    for value in ("nan", "inf", "-inf", "1e999"):
        with pytest.raises(UserError) as error:
            parse(["--task", task, *(f"--{name}={value}" for name in names)])
        refused = {line.partition(": expected a finite number")[0] for line in error.value.args}
        assert refused == {*names}


@pytest.mark.parametrize("path", ["a\0b", "y" * 5000, "~no_such_user/x"])
def test_names_that_no_file_has(place, tmp_path, capsys, path):
    values = yaml.safe_load(place.config.read_text())
    for section, field in (("data", "prompts"), ("policy", "path")):
        config = tmp_path / "config.yaml"
        changed = {**values, section: {**values[section], field: path}}
        config.write_text(yaml.safe_dump(changed))
        line = line_of(capsys, main, "--config", config, "--run_dir", tmp_path / "run")
        assert len(line) < 300 + len(str(tmp_path)) and not (tmp_path / "run").exists()


def test_whole_numbers_are_floats_where_a_field_is_one():
    assert identity(SamplingSection(temperature=1)) == identity(SamplingSection(temperature=1.0))
    assert json.dumps(identity(SamplingSection(temperature=1))) == json.dumps(identity(SamplingSection()))


def test_errors_stay_on_one_line(capsys):
    def fails(_):
        raise UserError("what a file\nput in\r\nthe message")

    assert run_cli(fails, ()) == 2
    assert capsys.readouterr().err == "error: what a file put in the message\n"


def test_a_config_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xef\xbb\xbftask: text\nseed: 5\n")
    assert load_config(path).seed == 5
    assert read_yaml("a: &x {b: 1}\nc: {<<: *x, d: 2}\n")["c"] == {"b": 1, "d": 2}


def test_exponents_without_a_point_are_numbers_and_stay_texts_in_quotes():
    text = "task: text\nrewards: [{name: 'a:b', options: {rate: 1e-5, code: '1e-5', list: [-2E+3, 0x1e5]}}]\n"
    config = make_config(read_yaml(text))
    assert config.rewards[0].options == {"rate": 1e-5, "code": "1e-5", "list": [-2000.0, 0x1E5]}
    assert make_config(read_yaml(to_yaml(config))) == config
    (given,) = parse(["--task=text", "--rewards", '[{"name": "a:b", "options": {"rate": 1e-5}}]']).rewards
    assert given.options == {"rate": 1e-5}


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"a", frozenset("a"), np.int64(3), np.float64(3), [np.str_("a")], np.arange(2), Path("a"), len, 2**70],
)
def test_options_from_python_are_data_that_the_runs_config_keeps(value):
    """Else a run trained with them, and nothing could read its config.yaml again."""
    named = {"name": "own.py:f", "options": {"plain": (1, None, {"a": 2.5}), "k": value}}
    with pytest.raises(UserError, match=r"^rewards\[0\]\.options\.k: .*(is a |beyond 64 bits)"):
        make_config(task="text", rewards=[named])


def test_a_field_of_a_judge_is_data_that_the_runs_config_keeps(tmp_path):
    code = "from pathlib import Path\nfrom grpo_jax import Judge\nclass Mine(Judge):\n    folder: Path = Path('x')\n"
    (tmp_path / "mine.py").write_text(code)
    expected = r"^judges\.mine: PosixPath\('x'\) is a PosixPath: write a number or a list, or a text"
    with pytest.raises(UserError, match=expected):
        make_config(task="text", judges={"mine": f"{tmp_path}/mine.py:Mine"})


def test_nested_options_are_plain_data():
    where = "--data.chat_template_options.deep"
    config = parse(["--task=text", f"{where}.number=1", f"{where}.inner.text=low"])
    assert config.data.chat_template_options == {"deep": {"number": 1, "inner": {"text": "low"}}}
    assert make_config(read_yaml(to_yaml(config))) == config
    options = {"deep": OrderedDict(a=(1, OrderedDict(b=2)))}
    config = make_config(task="text", rewards=[{"name": "own.py:f", "options": options}])
    assert config.rewards[0].options == {"deep": {"a": [1, {"b": 2}]}}
    assert make_config(read_yaml(to_yaml(config))) == config


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    (home / "run").mkdir(parents=True), here.mkdir()
    monkeypatch.setenv("HOME", str(home)), monkeypatch.chdir(here)
    (home / "run" / "config.yaml").write_text("task: text\nseed: 7\n")
    (home / "prompts.txt").write_text("a\n")
    (home / "own.py").write_text("def brief(completions): return [0.0]\n")
    assert parse(["--resume", "--run_dir=~/run"]).seed == parse(["--config=~/run/config.yaml"]).seed == 7
    assert run_config("~/run").seed == 7
    assert load_prompts("~/prompts.txt", held_out=0).train[0].prompt == "a"
    assert load_object("~/own.py:brief", "reward")([""]) == [0.0]
    RunDirectory.open("~/new").close()
    assert (home / "new").is_dir()
    assert read_options(run_parser("export", ""), ["--run=~/run"]).run == str(home / "run")
    assert not any(here.iterdir())


def test_memory_that_runs_out_is_one_line_that_says_whose_it_was(capsys):
    """With JAX's own error; torch's has a name of its own."""

    class OutOfMemoryError(RuntimeError):
        pass

    def judge(_):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nand more")

    for fails, whose in ((lambda _: jnp.zeros(2**50).block_until_ready(), "the policy"), (judge, "a judge in PyTorch")):
        assert run_cli(fails, ()) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"error: {whose} ran out of its device's memory (") and line.count("\n") == 1
        with pytest.raises(RuntimeError):
            run_cli(fails, ["--debug"])


@pytest.mark.parametrize("name", ["/dev/zero", "large.yaml"])
def test_a_config_without_an_end(tmp_path, capsys, name):
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(2**40)  # a line of a terabyte, of which the disk holds nothing
    assert main(["--config", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.endswith(f"{name}: cannot be read (it holds more than 1,048,576 bytes)\n")


def test_a_config_from_a_pipe():
    read, write = os.pipe()  # as <(command) gives it

    def tell():
        with open(write, "w") as file:
            file.write("task: text\nseed: ")
            file.flush()
            file.write("5\n")

    threading.Thread(target=tell).start()
    assert parse(["--config", f"/dev/fd/{read}"]).seed == 5
    os.close(read)


def test_options_that_the_run_does_not_read_are_named(tmp_path):
    options = ["--training.num_epochs=3", "--ppo.kl_coef=0.1", "--policy.lora.alpha=8", "--optimizer.warmup_steps=101"]
    lines = [*options_without_effect(parse(["--task=text", *options]))]
    assert lines[0] == "training.num_epochs has no effect with training.max_steps 100 (0 counts epochs)"
    assert [line.partition(" ")[0] for line in lines[1:]] == [
        "ppo.kl_coef",
        "policy.lora.alpha",
        "optimizer.warmup_steps",
    ]
    of_algorithm = {"best_of": 2, "importance_mode": "sequence_mask", "overlong_weight": 3}
    given = [f"--algorithm.{name}={value}" for name, value in of_algorithm.items()]
    named = [line.partition(" ")[0] for line in options_without_effect(parse(["--task=text", *given]))]
    assert named == [f"algorithm.{name}" for name in of_algorithm]
    given += ["--algorithm.advantage=max_at_k", "--algorithm.overlong_buffer=4"]
    assert not [*options_without_effect(parse(["--task=text", *given, "--training.async_level=1"]))]  # its cap is 2
    (line,) = options_without_effect(parse(["--task=text", "--policy.frozen_dtype=bfloat16"]))
    assert line.endswith("with policy.lora.rank 0: all weights train, but those of a frozen vision tower")
    read = ["--training.max_steps=0", "--algorithm.advantage=gae", "--policy.lora.rank=4"]
    assert not [*options_without_effect(parse(["--task=text", *options, *read]))]
    assert not [*options_without_effect(parse(["--task=text"]))]


def test_a_line_break_that_a_shell_left_as_letters_is_named():
    rewards = SimpleNamespace(weights={"one": 1.0})
    assert parse(["--task=text", "--sampling.stop", "\n"]).sampling.stop == ["\n"]
    (line,) = training_warnings(parse(["--task=text", "--sampling.stop=\\n", "--data.instruction={prompt}\n"]), rewards)
    assert line == "sampling.stop holds a backslash and an n: a line break is $'\\n' in a shell and \"\\n\" in YAML"
    (line,) = training_warnings(parse(["--task=text", "--data.instruction={prompt}\\nBriefly."]), rewards)
    assert line.startswith("data.instruction holds")


def test_predict_takes_lines_and_no_records(tmp_path, capsys):
    for name in ("a.jsonl", "a.parquet"):
        (tmp_path / name).write_text('{"prompt": "a"}\n')
        assert predict.main(["--run", str(tmp_path), "--file", str(tmp_path / name)]) == 2
        assert "--file: expected a text with a prompt on each line, got the records of" in capsys.readouterr().err


def test_predict_draws_into_a_folder(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(to_yaml(parse([])))
    (tmp_path / "one.png").write_bytes(b"a")
    options = ["--run", tmp_path, "--prompt", "a", "--pictures", tmp_path / "one.png"]
    assert "--pictures: expected a folder, got " in line_of(capsys, predict.main, *options)
