"""The live line of a run: one line at every width, with bar, count and the time that is left."""

import io
import re
import types

import pytest

from grpo_jax.reports import console as reporting
from grpo_jax.tasks.prompt_enhancement_task import PromptEnhancement
from grpo_jax.tasks.task import Display


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
    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr(reporting, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    console = reporting.Console(tmp_path / "log", stream=io.StringIO())
    with console.live(10, Display(), every=1) as update:
        for step in (1, 2, 3):
            update(step, ROW)
    console.close()
    assert re.findall(r"(?:  eta (\S+))?\n", (tmp_path / "log").read_text()) == ["", "0:00:16", "0:00:14"]
