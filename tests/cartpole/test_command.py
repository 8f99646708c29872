"""The command on CartPole: without torch, with files that it reads again, and with clear errors."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.text_task import ROOT, rows
from support.xla import devices

from grpo_jax import __main__, train
from grpo_jax.cartpole import program
from grpo_jax.cartpole.__main__ import main
from grpo_jax.cartpole.settings import SETTINGS
from grpo_jax.cartpole.training import Carry, Training, make_training
from grpo_jax.errors import UserError

WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "diffusers", "open_clip", "bridges", "gymnax"):
            raise ImportError(name + " is not to be had")
sys.meta_path.insert(0, Refuse())
from grpo_jax.cartpole import program
from grpo_jax.cartpole.__main__ import main
program.EVERY = 1  # a measurement more often than every tenth iteration
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A training where torch, transformers and diffusers cannot be imported, with a device for each seed."""
    folder = tmp_path_factory.mktemp("cartpole") / "out"
    words = ["--algorithm=ppo", "--seeds=2", "--iterations=2", f"--out={folder}"]
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", WITHOUT_TORCH, *words],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": devices(2)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.splitlines()


def test_it_prints_returns_as_it_learns_and_writes_metrics_a_curve_and_parameters(finished):
    folder, lines = finished
    assert "ppo, upright: seeds 0 to 1, on cpu:0, cpu:1" in lines[0] and "before training" in lines[1]
    assert [line.split()[1] for line in lines if line.startswith("iteration ")] == ["1:", "2:"]
    assert lines[-1].endswith(" of 2 solved")
    table = rows(folder)
    assert [row["step"] for row in table if "solved" in row] == [row["step"] for row in table] == [1, 2]
    assert [row["environment_steps"] for row in table] == [4096 * step for step in (1, 2)]
    assert 5 < table[-1]["evaluation/lowest"] <= table[-1]["evaluation/episode_return"] <= 500
    curve = ElementTree.parse(folder / "curve.svg").getroot()
    (line,) = curve.iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.get("points").split()) == 3  # before training, and two measurements


def test_the_last_block_has_the_iterations_that_are_left(tmp_path, monkeypatch):
    """Three iterations, measured every second, of a training that only counts."""

    def begin(key):
        return Carry({"w": jnp.zeros(1)}, (), (), key, jnp.int32(0), jnp.int32(0))

    def measure(state):
        return {name: 1.0 * state.steps for name in ("episode_return", "centred", "distance")}

    def count(state, iterations):
        after = state._replace(iteration=state.iteration + iterations, steps=state.steps + iterations)
        return after, {"loss": state.iteration + jnp.arange(iterations)}, measure(after)

    monkeypatch.setattr(program, "make_training", lambda _: Training(begin, count, measure))
    monkeypatch.setattr(program, "EVERY", 2)
    program.train(replace(SETTINGS["ppo"], iterations=3), 0, 1, tmp_path / "out")
    table = rows(tmp_path / "out")
    assert [(row["step"], row["loss"]) for row in table] == [(1, 0), (2, 1), (3, 2)]
    assert {row["step"]: row["evaluation/lowest"] for row in table if "solved" in row} == {2: 2, 3: 3}


def test_saved_parameters_measure_as_they_did(finished, capsys):
    """On another number of devices too: one here, two there."""
    folder, lines = finished
    assert main(["--evaluate", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == lines[-3:]


def test_seeds_spread_over_devices_learn_alike(finished, monkeypatch):
    """The training has a device for each seed; here one has both. Later iterations may draw another action."""
    training = make_training(replace(SETTINGS["ppo"], iterations=2))  # the schedule depends on them
    start = jax.vmap(training.init)(program.seed_keys(0, 2))
    _, metrics, _ = program.over_seeds(partial(training.train, iterations=1), jax.devices()[:1])(start)
    spread = rows(finished[0])[0]
    for name in ("environment_steps", "reward/upright/mean", "entropy", "loss"):
        assert spread[name] == pytest.approx(float(np.mean(metrics[name])), rel=1e-3, abs=1e-4)
    monkeypatch.setattr(program.jax, "devices", lambda: [0, 1, 2])
    assert [len(program.seed_devices(count)) for count in (1, 2, 3, 4, 5, 6, 7)] == [1, 2, 3, 2, 1, 3, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm=dapo"], "--algorithm: invalid choice: 'dapo'"),
        (["--algorithms=ppo"], "--algorithms: no such option; did you mean --algorithm?"),
        (["--objectives=upright,wide"], "objectives: expected one or more of upright, centred, each once"),
        (["--objectives=upright,upright"], "objectives: expected one or more of upright, centred, each once"),
        (["--condition=5"], "condition: expected a number in [0, 0], for it takes both objectives, with grpo or gdpo"),
        (["--algorithm=gdpo", "--condition=4000"], "condition: expected a number in [0, 500], got 4000"),
        (["--algorithm=ppo", "--objectives=upright,centred", "--condition=5"], "with grpo or gdpo, got 5"),
        (["--seeds=0"], "seeds: expected 1 to 10,000, got 0"),
        (["--seeds=two"], "--seeds: invalid int value: 'two'"),
        (["--seed=-1"], "seed: expected a number in [0, 2^31)"),
        (["--iterations=0"], "iterations: expected 1 to 100,000, got 0"),
        (["--out={full}"], "full: expected a new or an empty folder"),
        (["--out={full}/file"], "--out: cannot write there"),
        (["--evaluate={full}"], "full: no parameters there; give a folder of --out"),
        (["--evaluate={full}", "--seeds=3"], "--seeds: leave it out with --evaluate"),
        (["--evaluate={broken}"], "parameters: cannot be read"),
    ],
)
def test_a_mistake_is_one_line(words, message, tmp_path, capsys):
    for name in ("full/file", "broken/parameters/file"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    folders = {name: tmp_path / name for name in ("full", "broken")}
    assert main([word.format(**folders) for word in words]) == 2
    line = capsys.readouterr().err
    assert message in line and line.startswith("error: ") and line.count("\n") == 1 and len(line) < 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "GRPO"}, "algorithm: expected grpo, gdpo or ppo, got 'GRPO'"),  # it trained like gdpo
        ({"group_size": 1}, "group_size: expected at least 2 episodes to compare, got 1"),  # no advantage at all
        ({"epochs": 0}, "epochs: expected at least 1 pass, got 0"),  # no update at all
    ],
)
def test_settings_that_would_train_on_something_else_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        replace(SETTINGS["grpo"], **fields)


def test_it_is_a_command_of_grpo_and_no_longer_a_config(capsys):
    assert __main__.main(["cartpole", "--seeds=0"]) == 2
    assert "seeds: expected" in capsys.readouterr().err
    for words in (["--config=cartpole_grpo"], ["--config=configs/cartpole_gdpo.yaml"], ["--task=cartpole"]):
        assert train.main(words) == 2
        assert "it is a command now: python -m grpo_jax.cartpole" in capsys.readouterr().err


def test_a_metric_without_a_number_is_null(tmp_path):
    metrics = {"loss": jnp.array([[1.0, jnp.nan], [2.0, jnp.nan]])}  # two seeds, two iterations
    program._append(tmp_path / "metrics.jsonl", 10, metrics, {"episode_return": jnp.array([500.0, 400.0])})
    first, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == {"step": 9, "loss": 1.5} and last["loss"] is None and last["solved"] == 1
