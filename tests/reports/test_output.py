"""The output of a run: terminal, log, metrics and completions, also after a kill and a resume."""

import io
import re
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

from grpo_jax.config.run import make_config
from grpo_jax.reports import console as reporting
from grpo_jax.reports.output import RunOutput
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import Episode, Turn
from grpo_jax.runs.directory import RunDirectory, read_metrics
from grpo_jax.runs.metrics import completion_columns
from grpo_jax.tasks.prompt_enhancement_task import PromptEnhancement
from grpo_jax.tasks.task import Display

CTX = SimpleNamespace(fns=SimpleNamespace(reward_names=("alignment", "length"), eval_reward_names=("pixel_accuracy",)))


def iteration(step, prompts=2, group=3):
    """A batch as judged, its advantages, and its row of metrics."""
    rng = np.random.default_rng(step)
    shape = (prompts, group)
    turns = [[Turn(f"text {p} {g}", f"raw {p} {g}") for g in range(group)] for p in range(prompts)]
    rollout = SimpleNamespace(
        rows=[Row(p, f"prompt {p}") for p in range(prompts)],
        episodes=[[Episode((turn,)) for turn in own] for own in turns],
        lengths=np.full((*shape, 1), 4),
        samples=SimpleNamespace(turn=None),
        rewards=rng.normal(size=(*shape, 1, 2)).astype(np.float32),
        eval_rewards=rng.normal(size=(*shape, 1, 1)).astype(np.float32),
    )
    row = {"step": step, "loss": 0.1 * step, "reward/total/mean": 0.5, "reward/total/std": 0.1, "kl": float("nan")}
    return row, (rollout, rng.normal(size=shape))


def test_output_of_a_run_resumed_after_a_kill(tmp_path):
    def run(stop, resume=False):
        stream = io.StringIO()
        config = make_config(task="text", run_dir=str(tmp_path / "run"), resume=resume)
        with RunOutput(config, stream=stream) as output:
            output.info("policy", "Qwen2, [bold]1.1M[/bold] parameters")
            output.truncate(2 if resume else 0)
            output.start(6, 2 if resume else 0)
            for step in range(3 if resume else 1, stop + 1):
                row, judged = iteration(step)
                output.completions(step, completion_columns(CTX, *judged))
                output.iteration(row)
        return stream.getvalue()

    shown = run(4)
    assert "policy     Qwen2, [bold]1.1M[/bold] parameters\n" in shown  # text is not markup
    assert re.search(r"step 1/6  reward 0\.500 ±0\.100  loss 0\.1\b", shown)
    directory = RunDirectory(tmp_path / "run")
    with open(directory.metrics, "a") as file:
        file.write('{"step": 5')
    shown += run(6, resume=True)
    assert [row["step"] for row in read_metrics(directory.metrics)] == [1, 2, 3, 4, 5, 6]
    assert len(list(directory.completions.iterdir())) == 6
    assert directory.log.read_text() == shown
    table = pyarrow.parquet.read_table(directory.completions / "step_000003.parquet").to_pydict()
    assert table["prompt"] == ["prompt 0"] * 3 + ["prompt 1"] * 3
    assert (
        table["raw_completion"][4] == "raw 1 1" and table["completion"][4] == "text 1 1" and table["length"] == [4] * 6
    )
    _, (rollout, advantages) = iteration(3)
    assert table["reward/length"] == rollout.rewards[..., 1].ravel().tolist()
    assert table["eval_rewards/pixel_accuracy"] == rollout.eval_rewards.ravel().tolist()
    assert table["advantage"] == advantages.astype(np.float32).ravel().tolist()


class Terminal(io.StringIO):
    def isatty(self):
        return True


ROW = {
    "epoch": 0.25, "reward/total/mean": 0.5, "reward/total/std": 0.1, "reward/alignment/mean": 0.25,
    "reward/faithfulness/mean": -0.25, "reward/length/mean": -0.125, "loss": 0.0123,
    "zero_variance_groups/total": 0.125,
    "kl": 0.01, "entropy": 1.5, "eval_rewards/pixel_accuracy/mean": 0.75, "tokens_per_second": 1234.4,
}  # fmt: skip


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_gets_one_line_with_bar_count_and_time(tmp_path, monkeypatch, width):
    """The figures have what is left: once the time was known, they drove bar and count from the line."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    console = reporting.Console(tmp_path / "log", stream=stream)
    with console.live(160, PromptEnhancement.display, done=4) as update:
        for step in range(5, 161):
            update(step, ROW)
            if step == 55:
                console.info("said after 55")
    console.close()
    plain = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())  # without colours; the cursor moves between lines
    lines = [line.strip() for line in re.split(r"\x1b\[[\d?]*[A-Z a-z]|[\r\n]", plain)]
    drawn = [line for line in lines if "/160 eta" in line]
    assert "said after 55" in lines
    assert drawn and all(re.match(r"[━╸╺ ]{16} +\d+/160 eta \S+ ", line) and len(line) <= width for line in drawn)
    assert re.match(r"━{16} 160/160 eta 0:00:00 epoch 0\.25  rew", drawn[-1])
    assert drawn[-1].endswith("1234 tok/s" if width >= 200 else "…")
    log = (tmp_path / "log").read_text()
    assert "step 160/160  epoch 0.25  reward 0.500" in log and log.endswith("1234 tok/s  eta 0:00:00\n")


def test_the_time_that_is_left_is_not_that_of_compiling(tmp_path, monkeypatch):
    """The first step ends after 100 seconds, each further one takes 2."""
    clock = [0.0]
    console = reporting.Console(tmp_path / "log", stream=io.StringIO())
    monkeypatch.setattr(console._terminal, "get_time", lambda: clock[0])
    with console.live(10, Display()) as update:
        for step, clock[0] in ((1, 100.0), (2, 102.0), (3, 104.0)):
            update(step, ROW)
    console.close()
    assert re.findall(r"(?:  eta (\S+))?\n", (tmp_path / "log").read_text()) == ["", "0:00:16", "0:00:14"]


def test_a_terminal_without_a_character_stays_a_terminal():
    """An encoding error is a ValueError, as that of a closed stream."""
    written = io.BytesIO()
    stream = reporting.LastingStream(io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    stream.write("reward 0.5 ±0.1 – \ud800")
    stream.write(" and more")
    assert written.getvalue() == b"reward 0.5 \xb10.1 \\u2013 \\ud800 and more" and not stream.lost
