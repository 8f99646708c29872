"""A run that draws and scores its pictures in pools."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
pytest.importorskip("diffusers")
pytest.importorskip("open_clip")

from support.text_task import rows

from grpo_jax.train import main

pytestmark = [pytest.mark.slow, pytest.mark.ray]

SMALL = {
    "training.prompts_per_batch": 4,
    "training.max_steps": 3,
    "training.inner_epochs": 1,
    "sampling.group_size": 4,
    "algorithm.kl_coef": 0,
    "evaluation.prompts": 8,
    "evaluation.every": 0,
    "evaluation.samples": 0,
    "judges.renderer.batch_size": 4,
    "eval_rewards": "[alignment_gain]",
    "rewards": json.dumps([{"name": "alignment"}, {"name": "faithfulness"}, {"name": "length"}]),
    "report_to": "[]",
}
POOLS = {"judges.renderer.pool.replicas": 2, "judges.scorer.pool.replicas": 1}


def train(run, **more):
    return main([f"--{name}={value}" for name, value in {**SMALL, "run_dir": run, **more}.items()])


def kill_a_child_that_draws(run: Path, killed: list[int]) -> None:
    """Kills an actor of the renderer's once an iteration is done."""
    import psutil

    while not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").read_text():
        time.sleep(0.05)
    actors = [child for child in psutil.Process().children(recursive=True) if "JudgeActor" in " ".join(child.cmdline())]
    first = min(actors, key=lambda child: child.create_time())
    os.kill(first.pid, signal.SIGKILL)
    killed.append(first.pid)


@pytest.mark.wide
def test_a_run_draws_and_scores_in_pools_what_it_does_in_one_process(cluster, tmp_path):
    assert train(tmp_path / "here") == 0
    killed = []
    killer = threading.Thread(target=kill_a_child_that_draws, args=(tmp_path / "pools", killed), daemon=True)
    killer.start()
    assert train(tmp_path / "pools", **POOLS) == 0
    killer.join(1)
    assert killed
    assert rows(tmp_path / "pools") == rows(tmp_path / "here")
    mine, theirs = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("pools", "here"))
    assert mine["evaluation"] == theirs["evaluation"]
    assert mine["devices"]["renderer"] == "2 actors of a Ray cluster"
