"""A tiny text task, trained through the real command: a policy folder, a prompt file, a judge that can fail.

What the judge does is set by the environment: JUDGE="action:rows" acts once metrics.jsonl of JUDGE_RUN has that many
rows.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import yaml
from support.imports import ROOT

PATIENCE = 600  # seconds; only a hang takes that long
TIMINGS = ("seconds/", "tokens_per_second", "environment_steps_per_second")

JUDGE = '''
import os, pathlib, re, time

def letters(prompts, completions, wish, **columns):
    """Share of letters; more for the letter that is wished for."""
    values = [sum(c.isalpha() for c in text) / 8 + text.count(w) for text, w in zip(completions, wish)]
    action, _, rows = os.environ.get("JUDGE", "work:0").partition(":")
    metrics = pathlib.Path(os.environ.get("JUDGE_RUN", ".")) / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.is_file() else 0  # /dev/full has no end
    if done < int(rows):
        return values
    training = len(completions) == 16
    if action == "raise" or (action == "validation" and not training):
        raise RuntimeError("the reward is away")
    if action == "interrupt" and training:
        os.kill(os.getpid(), 2)
    if action == "hang":
        time.sleep(4)
    if action == "hold":
        flag = pathlib.Path(os.environ["JUDGE_RUN"]) / "held"
        flag.touch()
        while flag.exists():
            time.sleep(0.02)
    if action == "lock":
        (pathlib.Path(os.environ["JUDGE_RUN"]) / "held").touch()
        re.match(r"(a+)+$", "a" * 40 + "b")  # longer than anybody waits, with the interpreter lock held
    return values

def brief(completions):
    return [-len(text) / 10 for text in completions]
'''


SHORT = (
    *("--algorithm.kl_coef=0", "--optimizer.schedule=constant"),
    *("--training.inner_epochs=1", "--training.minibatches=1"),
)
"""One update for each batch, and no reference: the programs of most short runs, which share them."""


class Place(NamedTuple):
    """Where everything lies: a config that names it all."""

    folder: Path
    config: Path
    policy: Path
    judge: Path


def make_place(folder: Path, layers: int = 1) -> Place:
    """Writes policy, prompts, judge and a config in which everything that a resume must restore matters."""
    from support.tiny_models import causal_lm  # torch, which the readers of a run's files do not need

    policy = causal_lm(folder / "policy", num_hidden_layers=layers)
    judge = folder / "judge.py"
    judge.write_text(JUDGE)
    lines = [json.dumps({"prompt": f"{c} tree", "wish": c}) + "\n" for c in "abcdefghijklmnop"]
    (folder / "prompts.jsonl").write_text("".join(lines))
    config = {
        "task": "text",
        "seed": 3,
        "report_to": [],
        "policy": {"path": str(policy), "remat": "none"},
        "data": {"prompts": str(folder / "prompts.jsonl"), "held_out": 0.25, "max_prompt_tokens": 64},
        "sampling": {"group_size": 4, "max_new_tokens": 8},
        "algorithm": {"kl_coef": 0.1, "update_ref_every": 2},
        "optimizer": {"learning_rate": 0.01, "schedule": "cosine", "warmup_steps": 3},
        "training": {"prompts_per_batch": 4, "max_steps": 6, "inner_epochs": 2, "minibatches": 2, "save_every": 3},
        "evaluation": {"every": 2, "samples": 0},
        "rewards": [{"name": f"{judge}:letters"}, {"name": f"{judge}:brief", "weight": 0.5}],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return Place(folder, folder / "config.yaml", policy, judge)


def finished_run(place: Place) -> Path:
    """Six steps at once, made by the first who asks."""
    run = place.folder / "uninterrupted"
    if not (run / "summary.json").exists():
        assert train_here(place.config, run) == 0
    return run


def train_here(config: Path, run: Path, *arguments: str, judge: str = "work:0") -> int:
    """The training command in this process, which has imported already what it needs; its exit code."""
    from grpo_jax.train import main

    named = [] if "--resume" in arguments else ["--config", str(config)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE", judge)
        patch.setenv("JUDGE_RUN", str(run))
        return main([*named, "--run_dir", str(run), *arguments])


DONE = """
import os, pathlib

def done():
    metrics = pathlib.Path(os.environ["JUDGE_RUN"]) / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0
"""
"""How a judge's file begins whose rewards change with the iterations that are done."""


def train_values(values: dict, run: Path, *arguments: str, judge: str = "work", expected: int = 0) -> None:
    """`train_here` with a config's values, which must end with that exit code."""
    file = run.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(values))
    assert train_here(file, run, *arguments, judge=judge) == expected


def rewound(run: Path, to: Path, step: int) -> Path:
    """A copy of a finished run as it stood after a checkpoint, with the metrics of what came later still there."""
    from grpo_jax.runs.checkpoint import Checkpoints

    shutil.copytree(run, to, symlinks=True)
    with Checkpoints(to / "checkpoints", read_only=True) as checkpoints:
        late = [name for name in checkpoints.available() if checkpoints.read_meta(name)["step"] > step]
    for name in late:
        if name.isdigit():
            shutil.rmtree(to / "checkpoints" / f"step_{name}")
        else:
            (to / "checkpoints" / name).unlink()
    (to / "summary.json").unlink()
    return to


SMALL_EXAMPLE = {
    "policy.new.width": 16,
    "policy.new.layers": 1,
    "policy.new.heads": 2,
    "policy.remat": "none",
    "sft.batch": 16,
    "sft.learning_rate": 0.03,
    "sampling.group_size": 4,
    "training.prompts_per_batch": 4,
    "training.save_every": 0,
    "evaluation.samples": 0,
    "report_to": "[]",
}
"""Fields of a run of an example, whose policy is a new one."""


def environment(run: Path, judge: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", "JUDGE": judge, "JUDGE_RUN": str(run)}


def start(place: Place, run: Path, *arguments: str, judge: str = "work:0") -> subprocess.Popen:
    """Starts the training command; a new run unless --resume is among the arguments."""
    config = [] if "--resume" in arguments else ["--config", str(place.config)]
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_jax.train", *config, "--run_dir", str(run), *arguments],
        env=environment(run, judge),
        cwd=place.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """Waits for its end; one that hangs shows where, and is not left behind."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler's
        out, err = kill_all(process)
        raise AssertionError(f"it hangs: {out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill_all(process: subprocess.Popen) -> tuple[str, str]:
    """Ends a process and what it has started; what it wrote."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    return process.communicate()


def wait_for(condition, process: subprocess.Popen) -> None:
    """Waits while the process lives."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.send_signal(signal.SIGABRT)
            raise AssertionError(f"it ended or hangs ({process.poll()}): {kill_all(process)}")
        time.sleep(0.01)


def rows(run: Path) -> list[dict]:
    """metrics.jsonl without timings."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: v for name, v in json.loads(line).items() if not name.startswith(TIMINGS)} for line in lines]


def completions(run: Path, step: int) -> dict[str, list]:
    """Columns of an iteration's completions."""
    import pyarrow.parquet

    return pyarrow.parquet.read_table(run / "completions" / f"step_{step:06d}.parquet").to_pydict()


def episodes_of(run: Path) -> list[list[dict]]:
    """Rows of completions/, one list for each episode."""
    import pyarrow.parquet

    episodes = {}
    for file in sorted((run / "completions").glob("*.parquet")):
        for row in pyarrow.parquet.read_table(file).to_pylist():
            episodes.setdefault((file.name, row["prompt"], row["episode"]), []).append(row)
    return [*episodes.values()]


def final_state(run: Path, which: int | str = "final"):
    """Everything a checkpoint holds: its arrays (parameters, optimizer, reference), and progress, but no processes."""
    import orbax.checkpoint as ocp

    from grpo_jax.runs.checkpoint import Checkpoints

    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        progress = checkpoints.read_meta(which)["progress"]
        path = run / "checkpoints" / checkpoints._find(which)
    del progress["seconds"]
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = {}
    with ocp.StandardCheckpointer() as reader:
        for item in filter(Path.is_dir, (path / "variables", path / "renderer", path / "training")):
            saved = reader.metadata(item).item_metadata.tree
            placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), saved)
            state |= reader.restore(item, placed)
    return state, progress


def aged(checkpoint: Path, seconds: float) -> None:
    """Makes a checkpoint one of a process that took that much longer, in all and in each of its stages."""
    from grpo_jax.runs.checkpoint import read_manifest, write_manifest

    content = read_manifest(checkpoint)
    spent = content["meta"]["progress"]["seconds"]
    spent |= {name: value + seconds for name, value in spent.items()}
    write_manifest(checkpoint, content)


def assert_same_bits(came, expected) -> None:
    assert jax.tree.structure(came) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(came), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


def assert_same_run(came: Path, expected: Path) -> None:
    """Metrics, completions, final and best states, export and results are those of the other run, bit for bit.

    A run that validated nothing has no best state.
    """
    import pyarrow.parquet

    assert rows(came) == rows(expected)
    for path in sorted((expected / "completions").iterdir()):
        other = came / "completions" / path.name
        tables = [pyarrow.parquet.read_table(file) for file in (other, path)]
        assert repr(tables[0].to_pydict()) == repr(tables[1].to_pydict()), path.name  # NaN is itself here
    best = ["best"] if (expected / "checkpoints" / "best").exists() else []
    for which in ("final", *best):
        (state, progress), (other, other_progress) = final_state(came, which), final_state(expected, which)
        assert_same_bits(state, other)
        assert progress == other_progress
    weights = "policy/model.safetensors"
    assert (came / weights).read_bytes() == (expected / weights).read_bytes()
    mine, theirs = (json.loads((run / "summary.json").read_text()) for run in (came, expected))
    for name in ("evaluation", "reward", "best", "iterations"):
        assert repr(mine[name]) == repr(theirs[name]), name
