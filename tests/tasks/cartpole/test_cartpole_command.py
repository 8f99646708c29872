"""The command on CartPole: without torch, and with clear errors."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml
from support.text_task import ROOT, rows
from support.xla import devices

from grpo_jax.config.command_line import parse
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.runs.policy import run_config
from grpo_jax.tasks.cartpole import program
from grpo_jax.tasks.cartpole.training import make_train

TINY = {
    "task": "cartpole",
    "num_seeds": 2,
    "report_to": [],
    "algorithm": {"name": "ppo", "epochs": 2},
    "training": {"iterations": 4, "save_every": 2},
    "evaluation": {"every": 2},
}


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "diffusers", "open_clip", "bridges", "gymnax"):
            raise ImportError(name + " is not to be had")
sys.meta_path.insert(0, Refuse())
from grpo_jax.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run by the command, where torch, transformers and diffusers cannot be imported; a device for each seed."""
    folder = tmp_path_factory.mktemp("cartpole") / "run"
    config = folder.parent / "c.yaml"
    config.write_text(yaml.safe_dump(TINY))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", WITHOUT_TORCH, f"--config={config}", f"--run_dir={folder}"],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": devices(2)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_run_directory(finished):
    folder, said = finished
    assert "solved (mean return >= 475 over 100 episodes): 0 of 2 seeds" in said
    assert not (folder / "completions").exists()
    table = rows(folder)
    assert [row["step"] for row in table] == [1, 2, 3, 4]
    assert ["solved" in row for row in table] == [False, True] * 2
    assert [row["environment_steps"] for row in table] == [4096, 8192, 12288, 16384]
    saved = json.loads((folder / "summary.json").read_text())
    measure = saved["evaluation"]["episode_return"]
    assert measure["oracle"] == 500 and 5 < measure["before"] < 500 and 5 < measure["after"] < 500
    assert saved["seeds"] == 2 and len(saved["returns"]) == 2 and saved["solved"] == 0
    np.testing.assert_allclose(np.mean(saved["returns"]), measure["after"])
    assert saved["environment_steps"] == 32768 and saved["environment_steps_per_second"] > 0
    assert saved["parameters"] == {"policy": 385, "value": 385}
    assert {"compile", "train", "total"} <= saved["seconds"].keys() and "jax" in saved["versions"]
    page = (folder / "report.html").read_text()
    assert "Episode return" in page and "steps until first solved" in page and "held-out" not in page
    assert "CartPole-v1, 2 seeds" in (folder / "train.log").read_text()
    config = parse(["--config", str(folder / "config.yaml")])
    assert config == make_config(TINY, run_dir=str(folder))


def test_seeds_spread_over_devices_learn_alike(finished, monkeypatch):
    """The run has a device for each seed; here one has both. Later iterations may draw another action."""
    folder, _ = finished
    assert json.loads((folder / "summary.json").read_text())["devices"]["policy"].count(",") == 1
    training = make_train(make_config(TINY))
    start = jax.vmap(training.init)(program.seed_keys(0, 2))
    _, metrics = program.over_seeds(training.iterate, jax.devices()[:1])(start)
    spread = rows(folder)[0]
    for name in ("environment_steps", "reward/upright/mean", "entropy", "loss"):
        assert spread[name] == pytest.approx(float(np.mean(metrics[name])), rel=1e-3, abs=1e-4)
    monkeypatch.setattr(program.jax, "devices", lambda: [0, 1, 2])
    assert [len(program.seed_devices(count)) for count in (1, 2, 3, 4, 5, 6, 7)] == [1, 2, 3, 2, 1, 3, 1]


def test_language_commands_say_that_it_is_cartpole(finished):
    with pytest.raises(UserError, match="a cartpole run has no language policy"):
        run_config(finished[0])
