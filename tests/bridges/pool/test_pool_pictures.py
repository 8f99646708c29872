"""Pictures of a pooled renderer: where they lie, what fetches them, and a run that draws and scores them in pools."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")
pytest.importorskip("diffusers")
pytest.importorskip("open_clip")

from support.text_task import rows  # noqa: E402

from bridges.pool import stored  # noqa: E402
from grpo_jax.rollout.episodes import as_uint8  # noqa: E402
from grpo_jax.train import main  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ray]

SMALL = {
    "training.prompts_per_batch": 4,
    "training.max_steps": 3,
    "training.inner_epochs": 1,
    "sampling.group_size": 4,
    "algorithm.kl_coef": 0,
    "evaluation.prompts": 8,
    "evaluation.every": 0,
    "evaluation.gallery": 0,
    "evaluation.sampled": "false",
    "judges.renderer.batch_size": 4,
    "watch": "[alignment_gain]",
    "rewards": json.dumps([{"name": "alignment"}, {"name": "faithfulness"}, {"name": "length"}]),
    "report_to": "[]",
}
POOLS = {"judges.renderer.pool.replicas": 2, "judges.scorer.pool.replicas": 1, "judges.scorer.pool.max_restarts": 0}


def train(run, **more):
    return main([f"--{name}={value}" for name, value in {**SMALL, "run_dir": run, **more}.items()])


@pytest.fixture
def pictures(cluster):
    """(stored, plain): the same pictures in the object store, as two blocks, and here."""
    plain = torch.rand(6, 3, 4, 4)
    return stored.concatenated([stored.as_stored(part) for part in (plain[:4], plain[4:])]), plain


def test_shape_rows_and_devices_fetch_nothing(pictures):
    there, plain = pictures
    repeated = there.to("cpu").repeat_interleave(2, dim=0)
    taken = repeated[3:11][[0, -1, 4]]
    assert isinstance(there, torch.Tensor) and len(there) == 6 and there.shape == plain.shape
    assert (there.ndim, there.dtype, there.device, there.size()) == (4, plain.dtype, plain.device, plain.size())
    assert there.is_floating_point() and "fetched=False" in repr(there)
    assert not any(one.contents.tensor is not None for one in (there, repeated, taken))
    assert torch.equal(taken, plain.repeat_interleave(2, dim=0)[3:11][[0, -1, 4]])
    assert torch.equal(repeated, plain.repeat_interleave(2, dim=0)) and there.contents.tensor is None


def test_anything_else_is_done_with_the_values(pictures):
    there, plain = pictures
    assert torch.equal(there[2], plain[2]) and type(there[2]) is torch.Tensor and there.contents.tensor is not None
    assert torch.equal(1 - there * 2, 1 - plain * 2) and torch.equal(there.mean(dim=(2, 3)), plain.mean(dim=(2, 3)))
    assert torch.equal(torch.stack(list(there)), plain) and torch.equal(torch.cat([there, plain])[:6], plain)
    assert torch.equal(there.to(torch.float64), plain.double()) and torch.equal(there[:, 0], plain[:, 0])
    assert torch.equal(there[torch.tensor([5, 0])], plain[[5, 0]])
    np.testing.assert_array_equal(np.asarray(there), plain.numpy())
    np.testing.assert_array_equal(as_uint8(there[0]), as_uint8(plain[0]))
    there += 1  # the store lends its memory for reading: what was fetched is a copy
    assert torch.equal(there, plain + 1)
    narrow = stored.as_stored(plain.bfloat16())
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow + 0, plain.bfloat16())


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
def test_a_run_draws_and_scores_in_pools_what_it_does_in_one_process(cluster, tmp_path, monkeypatch):
    assert train(tmp_path / "here") == 0
    fetched, killed = [], []
    plain = stored.Contents.fetch
    monkeypatch.setattr(stored.Contents, "fetch", lambda contents: fetched.append(contents) or plain(contents))
    killer = threading.Thread(target=kill_a_child_that_draws, args=(tmp_path / "pools", killed), daemon=True)
    killer.start()
    assert train(tmp_path / "pools", **POOLS) == 0
    killer.join(1)
    assert killed
    assert rows(tmp_path / "pools") == rows(tmp_path / "here")
    assert not fetched  # the pictures went from actor to actor
    mine, theirs = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("pools", "here"))
    assert mine["evaluation"] == theirs["evaluation"]
    assert mine["devices"]["renderer"] == "2 actors of a Ray cluster"
