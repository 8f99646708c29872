"""Input that is odder than a slip: broken run directories, numbers beyond all bounds, names that no file has."""

import json
import os
import shutil
import threading

import jax.numpy as jnp
import pytest
import yaml

from grpo_jax import evaluate, export
from grpo_jax.config.command_line import load_config, parse
from grpo_jax.config.fields import build, identity, to_dict
from grpo_jax.config.files import read_yaml
from grpo_jax.config.sections import SamplingSection
from grpo_jax.errors import UserError, run_cli, short_repr
from grpo_jax.predict import load_rewriter
from grpo_jax.rollout.reward_registry import judge_named
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
        (b"[1, 2]", "config.yaml: expected sections and fields, got [1, 2]"),
        (b"text", "config.yaml: expected sections and fields, got 'text'"),
        (b"task: text\ntrainin: {}\n", "trainin: no such field; did you mean training?"),
        (b"task: text\ntraining: {max_steps: many}\n", "training.max_steps: expected a whole number, got 'many'"),
        (b"task: \xff\n", "config.yaml: not UTF-8 text; save it as UTF-8"),
        (b"seed: 1\n", "task: expected a kind"),
        (b"task: text\ntask: cartpole\n", "config.yaml: not valid YAML: line 2: 'task' stands twice in one section"),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.max_steps", "9" * 5000], "training.max_steps: "),
        (["--sampling.group_size", str(10**12)], "sampling.group_size: expected a number <= 16777216"),
        (["--optimizer.learning_rate", "inf"], "optimizer.learning_rate: expected a finite number, got 'inf'"),
        (["--seed", str(2**63)], "seed: expected a number in [0, 2^63)"),
        (["--eval_rewards", "[" * 3000], "eval_rewards: nested deeper than 32 levels"),
        ([f"--{'a.' * 3000}b", "1"], "expected an option"),
        (["--data.prompts", "\udcff.txt"], "data.prompts: expected a string"),
        (["--rewards", "[3]"], "rewards[0]: expected a mapping, got 3"),
        (["--rewards.0.weight", "3"], "rewards: expected a list"),
        (["--config", "x" * 5000], "no such file; configs that ship with grpo_jax"),
    ],
)
def test_values_beyond_all_bounds(capsys, arguments, message):
    line = line_of(capsys, main, "--task", "text", *arguments)
    assert message in line and len(line) < 300


def every_float(values, path=()):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from every_float(value, (*path, key))
        elif isinstance(value, float):
            yield ".".join((*path, key))


@pytest.mark.parametrize("task", ["text", "prompt_enhancement", "recommendation"])
def test_no_float_takes_nan_or_infinity(task):
    names = list(every_float(to_dict(parse(["--task", task]))))
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


def test_more_of_the_vocabulary_than_there_is(place, tmp_path, capsys):
    words = ["--config", place.config, "--run_dir", tmp_path / "run"]
    assert "sampling.top_k: expected at most the policy's 272 tokens" in line_of(
        capsys, main, *words, "--sampling.top_k", "273"
    )


@pytest.mark.parametrize(
    ("device", "message"), [("banana", 'expected "auto", "cpu" or "gpu:N"'), ("gpu:7", "there is no")]
)
def test_a_device_that_is_not_there(place, tmp_path, capsys, device, message):
    words = ["--config", place.config, "--run_dir", tmp_path / "run", "--devices.policy", device]
    assert f"devices.policy: {message}" in line_of(capsys, main, *words)


def test_plans_of_sizes_that_cannot_be(place, tmp_path, capsys):
    folder = shutil.copytree(place.policy, tmp_path / "policy")
    fields = json.loads((folder / "config.json").read_text())
    for name, value in (
        ("vocab_size", 10**12),
        ("hidden_size", "32"),
        ("num_hidden_layers", -1),
        ("rms_norm_eps", "x"),
    ):
        (folder / "config.json").write_text(json.dumps({**fields, name: value}))
        line = line_of(capsys, main, "--config", place.config, "--policy.path", folder, "--plan")
        assert f"config.json: {name}: expected" in line and short_repr(value) in line


def test_whole_numbers_are_floats_where_a_field_is_one():
    assert identity(SamplingSection(temperature=1)) == identity(SamplingSection(temperature=1.0))
    assert json.dumps(identity(SamplingSection(temperature=1))) == json.dumps(identity(SamplingSection()))
    made = build(SamplingSection, {"temperature": 1})
    assert isinstance(made.temperature, float)


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


def test_a_judge_that_finds_no_memory_is_named():
    class OutOfMemoryError(RuntimeError):
        pass

    with (
        pytest.raises(UserError, match=r"judges\.scorer: loading it raised OutOfMemory"),
        judge_named("scorer"),
    ):
        raise OutOfMemoryError("CUDA out of memory")


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
