"""One run on several processes of this machine, through the command: the results of one, and a common end."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import yaml
from support.processes import announcement, ended, held, lines, start
from support.text_task import ROOT, finish, finished_run, rows, train_here, wait_for

from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.runs import processes

pytestmark = pytest.mark.slow


def stop_and_kill(place, run):
    """Two processes, of which the second is asked to stop; then the second is killed at the next checkpoint's batch."""
    both = start(place, run, judge="hold:2")
    held(both, run)
    both[1].send_signal(signal.SIGTERM)
    (run / "held").unlink()
    first, second = ended(both)
    assert first.returncode == 0 and "stopped and saved after iteration 3" in first.stdout, first.stderr
    assert second.returncode == 0, second.stderr
    both = start(place, run, "--resume", judge="hold:4")
    held(both, run)
    both[1].kill()
    first, _ = ended(both)  # it is held in a reward, and misses signs of the second
    assert first.returncode != 0 and "resumed after iteration 3 of 6" in first.stdout
    (run / "held").unlink()


@pytest.mark.wide  # two minutes; the update of two processes is that of one in tests/models/test_sharding.py
def test_a_run_that_was_stopped_and_killed_is_the_run_of_one_process(place, tmp_path, capsys):
    run = tmp_path / "run"
    stop_and_kill(place, run)
    assert train_here(place.config, run, "--resume", "--policy.mesh.fsdp=1") == 0
    assert re.search("resumed after iteration [34] of 6", capsys.readouterr().out)  # 4 if it was the best
    for came, wanted in zip(rows(run), rows(finished_run(place)), strict=True):
        assert came == {name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in wanted.items()}


PAINTER = """
import torch
from grpo_jax import Judge

class Painter(Judge):
    def load(self, device):
        return Grey()

class Grey:
    device, window = "cpu", 77

    def draw(self, texts, seeds, *, evaluation):
        return torch.tensor([len(text) / 100 for text in texts]).reshape(-1, 1, 1, 1).expand(-1, 3, 8, 8)

    def count_tokens(self, texts):
        return [len(text) for text in texts]

def bright(prompts, completions, *, images, **columns):
    return images.mean((1, 2, 3)).tolist()
"""


@pytest.mark.wide  # most of a minute
def test_two_processes_end_with_summary_and_report(place, tmp_path):
    """The report draws the first test prompts, which are fewer than it has places for, in all processes."""
    run, file = tmp_path / "run", tmp_path / "painter.py"
    file.write_text(PAINTER)
    values = yaml.safe_load(place.config.read_text())
    values |= {"task": "prompt_enhancement", "algorithm": {}, "rewards": [f"{file}:bright"]}
    values["judges"] = dict.fromkeys(("renderer", "scorer"), f"{file}:Painter")
    values["training"] = {"prompts_per_batch": 4, "max_steps": 1, "save_every": 0}
    values["evaluation"] = {"prompts": 2, "validation_prompts": 2, "samples": 0, "every": 0}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    first, second = ended(start(place._replace(config=tmp_path / "config.yaml"), run))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert len(json.loads((run / "report.json").read_text())["gallery"]) == 2
    assert (run / "summary.json").is_file() and (run / "report.html").is_file()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"policy\.mesh: .* a multiple of the 2 processes, got 1"),
        (
            {"policy": {"mesh": {"fsdp": 2}}, "training": {"async_level": 1}},
            r"training\.async_level: expected 0 with a policy over 2 processes, got 1",
        ),
        (
            {"policy": {"mesh": {"fsdp": 2}}, "task": "prompt_enhancement", "judges": {"renderer": {"train": {}}}},
            r"training\.learns: expected 'rewriter' in 2 processes, got 'both'",
        ),
    ],
)
def test_several_processes_refuse_unsupported_settings(fields, message, monkeypatch):
    for name, value in announcement(2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(UserError, match=message):
        processes.join(make_config({"task": "text", **fields}))


def test_processes_that_differ_end_with_2_and_one_line(place, tmp_path):
    first, second = ended(start(place, tmp_path / "run", last=("--policy.path=/nowhere",)))
    assert (first.returncode, second.returncode) == (2, 2) and not lines(second.stderr)
    (line,) = lines(first.stderr)
    told = r"error: policy.path: expected the same in all processes, got files of .* and /nowhere in process 1"
    assert re.match(told, line), line
    assert not os.path.exists(tmp_path / "run")


def test_a_mistake_that_process_0_alone_can_see_ends_both_with_one_line(place, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.txt").write_text("years of work")
    first, second = ended(start(place, run))
    assert (first.returncode, second.returncode) == (2, 2) and not lines(second.stderr)
    (line,) = lines(first.stderr)
    assert line.startswith(f"error: {run} is not empty; continue it with --resume")


LEAVES = """
import json, math, time
import jax, numpy as np
from grpo_jax.models import sharding
from grpo_jax.models.broadcast import process_index
from grpo_jax.runs.processes import join_processes

join_processes()

def held():  # by this process's one device
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.live_arrays())

def gather(leaf, mesh, real=sharding.gather):
    gathered = real(leaf, mesh)
    peaks.append(held())
    return gathered

kernels = {f"{name}_proj": {"kernel": np.full((2, 64, 64), place)} for place, name in enumerate("qkvo")}
tree = {"params": {"embed_tokens": np.ones((256, 64)), "layers": kernels, "norm": {"scale": np.ones(64)}}}
tree = jax.tree.map(np.float32, tree)
sharded = sharding.shard(tree, sharding.make_mesh(2, 1, jax.devices()))
share, peaks = held(), []
sharding.gather = gather
whole = sharding.on_host(sharded)
assert all(jax.tree.leaves(jax.tree.map(np.array_equal, whole, tree)))
sizes = [x.nbytes for x in jax.tree.leaves(tree)]
print(json.dumps([share, max(peaks), max(sizes), sum(sizes)]), flush=True)
time.sleep(4 * process_index())  # the coordinator waits for one that leaves late
"""


def test_no_device_holds_more_than_its_share_and_a_leaf_while_weights_come_to_the_host():
    environment = os.environ | announcement(2) | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", LEAVES]
    both = [subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(n)}, **pipes) for n in range(2)]
    for process in ended(both):
        assert process.returncode == 0, process.stderr
        share, peak, largest, whole = json.loads(process.stdout.splitlines()[-1])
        assert share < peak <= share + largest < whole


FROZEN = """
import os, signal, time
from grpo_jax.models.broadcast import process_index
from grpo_jax.runs import processes

processes.SILENT_SECONDS = 4.0
processes.join_processes()
with processes.exit_if_peer_failed("runs/mine"):
    time.sleep(1)
    if process_index() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if process_index() == 2:
        processes.exchange("")  # waits for the others
    time.sleep(600)
"""


def test_a_frozen_process_ends_the_others_with_one_line():
    environment = os.environ | announcement(3) | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", FROZEN]
    started = [subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(n)}, **pipes) for n in range(3)]
    try:
        for process in (started[0], started[2]):
            _, shown = process.communicate(timeout=120)
            again = "its last checkpoint is sound; continue with --resume --run_dir runs/mine\n"
            assert (process.returncode, shown) == (1, f"error: another process of the run is gone: {again}")
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.wide  # half a minute
def test_no_process_outlives_the_first(place, tmp_path):
    processes = start(place, tmp_path / "run", judge="hold:1")
    held(processes, tmp_path / "run")
    processes[0].kill()
    finish(processes[0])
    assert finish(processes[1]).returncode != 0


@pytest.mark.wide  # half a minute
def test_a_process_that_cannot_write_its_checkpoint_ends_all(place, tmp_path, capsys):
    run = tmp_path / "run"
    processes = start(place, run, "--training.save_every=1", judge="hold:2")
    held(processes, run)
    wait_for((run / "checkpoints" / "step_2").exists, processes[0])  # it may still be on its way
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (0, 0))
    while any(process.poll() is None for process in processes):
        (run / "held").unlink(missing_ok=True)  # it is held at each batch that follows
        time.sleep(0.1)
    first, second = ended(processes)
    assert first.returncode != 0, first.stderr
    assert second.returncode == 2 and "error: process 1: cannot write a checkpoint" in second.stderr, second.stderr
    assert train_here(place.config, run, "--resume", "--policy.mesh.fsdp=1") == 0
    assert "resumed after iteration 2 of 6" in capsys.readouterr().out
    assert len(rows(run)) == 6


@pytest.mark.wide  # half a minute
def test_a_run_directory_that_is_not_shared_is_refused(place, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first, second = ended(start(place, "run", folders=folders))  # as a path that is each machine's own
    assert (first.returncode, second.returncode) == (2, 2) and not lines(second.stderr)
    (line,) = lines(first.stderr)
    assert line.endswith("expected one folder for all processes, but process 1 does not see it")
