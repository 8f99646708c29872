"""Run directory, metric files, console, report: written whole, cut back exactly, readable."""

import errno
import io
import json
import math
import re
import sys
import types
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import NamedTuple

import numpy as np
import pyarrow.parquet
import pytest

from grpo_jax.errors import UserError
from grpo_jax.reports import console as reporting
from grpo_jax.reports.charts import Series, line_chart, nice_ticks, number, series_of, smoothed
from grpo_jax.reports.page import Table, write_report
from grpo_jax.reports.writers import JsonLines, open_writers, read_metrics, truncate_metrics
from grpo_jax.runs.directory import GalleryEntry, RunDirectory, disk_errors, encode_png, write_atomically


@dataclass(frozen=True)
class Config:
    run_dir: str
    resume: bool = False
    report_to: list = field(default_factory=list)
    seed: int = 3


class Rows(NamedTuple):
    prompt: str


def iteration(step, prompts=2, group=3):
    """An `Iteration` as the loop hands it over."""
    rng = np.random.default_rng(step)
    shape = (prompts, group)
    samples = types.SimpleNamespace(mask=np.ones((*shape, 4), bool), truncated=np.zeros(shape, bool))
    judgement = types.SimpleNamespace(
        rewards=rng.normal(size=(*shape, 2)).astype(np.float32),
        watched=rng.normal(size=(*shape, 1)).astype(np.float32),
    )
    rollout = types.SimpleNamespace(
        rows=[Rows(f"prompt {p}") for p in range(prompts)],
        completions=[[f"raw {p} {g}" for g in range(group)] for p in range(prompts)],
        texts=[[f"text {p} {g}" for g in range(group)] for p in range(prompts)],
        usable=np.ones(shape, bool), samples=samples, judgement=judgement,
    )  # fmt: skip
    row = {"step": step, "loss": 0.1 * step, "reward/total/mean": 0.5, "reward/total/std": 0.1, "kl": float("nan")}
    return row, types.SimpleNamespace(rollout=rollout, advantages=rng.normal(size=shape))


PARTS = types.SimpleNamespace(
    environment=types.SimpleNamespace(reward_names=("alignment", "length"), watch_names=("pixel_accuracy",))
)


# run directory


def test_a_run_directory_is_not_overwritten(tmp_path):
    run = RunDirectory.open(tmp_path / "run")
    run.write_config("seed: 0\n")
    with pytest.raises(UserError, match=r"run is not empty; continue it with --resume or choose another --run_dir"):
        RunDirectory.open(tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run", resume=True).config.read_text() == "seed: 0\n"


def test_nothing_to_resume_a_file_and_an_unwritable_place(tmp_path):
    with pytest.raises(UserError, match="holds no run to resume"):
        RunDirectory.open(tmp_path / "none", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file; choose another --run_dir"):
        RunDirectory.open(tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot write .*file/run \(Not a directory\)"):
        RunDirectory.open(tmp_path / "file" / "run")


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match=r"cannot write .*a\.json \(No space left on device\): make room"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_summary_is_strict_json(tmp_path):
    run = RunDirectory.open(tmp_path / "run")
    run.write_summary({"a": {"before": np.float32(0.5), "after": float("nan"), "oracle": None}, "n": [np.int64(3)]})
    text = run.summary.read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": {"before": 0.5, "after": None, "oracle": None},
        "n": [3],
    }
    with pytest.raises(TypeError, match="set cannot be written"):
        run.write_summary({"a": {1}})


def test_completions_are_one_whole_file_per_iteration(tmp_path):
    run = RunDirectory.open(tmp_path / "run")
    columns = {"prompt": ["a", "b"], "reward/x": np.array([1.5, np.nan], np.float32), "truncated": [True, False]}
    table = pyarrow.parquet.read_table(run.write_completions(7, columns)).to_pydict()
    assert table["step"] == [7, 7] and table["prompt"] == ["a", "b"] and table["truncated"] == [True, False]
    assert table["reward/x"][0] == 1.5 and math.isnan(table["reward/x"][1])
    with pytest.raises(ValueError, match="expected equal lengths"):
        run.write_completions(8, {"prompt": ["a"], "length": [1, 2]})
    assert [path.name for path in run.completions.iterdir()] == ["step_000007.parquet"]


def test_png_is_the_picture(tmp_path):
    from PIL import Image

    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(image)))), image)
    with pytest.raises(ValueError, match=r"expected uint8 \[H, W, 3\], got float64 \[5, 7, 3\]"):
        encode_png(image / 255)


# metrics


def test_metrics_are_cut_back_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    for step in range(1, 6):
        writer.write(step, {"loss": step / 3, "kl": float("inf")})
    writer.close()
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + b'{"step": 6, "lo')  # killed in the middle of a line
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert read_metrics(path)[0] == {"step": 1, "loss": 1 / 3, "kl": None}
    truncate_metrics(path, 3)
    assert path.read_bytes() == b"".join(whole[:3])
    truncate_metrics(path, 0)
    assert path.read_bytes() == b""


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2: not a row of metrics"):
        read_metrics(path)
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_full_disk_is_named():
    writer = JsonLines("/dev/full")
    with pytest.raises(UserError, match=r"cannot write /dev/full \(No space left on device\).*--resume"):
        writer.write(1, {"loss": 1.0})
    writer.close()
    console = reporting.Console("/dev/full", stream=io.StringIO())
    with pytest.raises(UserError, match="cannot write /dev/full"):
        console.say("a line")
    console.close()
    with pytest.raises(UserError, match=r"cannot write x \(Read-only"), disk_errors("x"):
        raise OSError(errno.EROFS, "Read-only file system")


def test_tensorboard_reads_the_scalars_of_a_resumed_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDirectory.open(tmp_path / "run")
    (lines, board), notes = open_writers(run, ["tensorboard"])
    assert notes == []
    lines.close()
    for step in (1, 2, 3):
        board.write(step, {"loss": float(step), "kl": float("nan"), "note": "text"})
    board.close()
    (lines, board), _ = open_writers(run, ["tensorboard"], resume_step=1)
    lines.close()
    board.write(2, {"loss": 20.0})
    board.close()
    found = EventAccumulator(str(run.tensorboard))
    found.Reload()
    assert found.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1.0), (2, 20.0)]
    assert "tensorflow" not in sys.modules


def test_missing_writers(tmp_path, monkeypatch):
    run = RunDirectory.open(tmp_path / "run")
    for name in ("tensorboard.compat.proto.event_pb2", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    writers, notes = open_writers(run, ["tensorboard"])
    writers[0].close()
    assert len(writers) == 1 and notes == ["no TensorBoard events: pip install tensorboard adds them"]
    with pytest.raises(UserError, match="wandb is not installed; pip install wandb"):
        open_writers(run, ["wandb"])
    with pytest.raises(UserError, match="expected tensorboard or wandb, got mlflow"):
        open_writers(run, ["mlflow"])


def test_wandb_continues_its_run(tmp_path, monkeypatch):
    calls = []

    class Service:
        def log(self, metrics, step):
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return Service()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    run = RunDirectory.open(tmp_path / "run")
    for _ in range(2):
        lines, writer = open_writers(run, ["wandb"], config={"seed": 1})[0]
        lines.close()
        writer.write(1, {"loss": 1.0, "kl": float("nan")})
        writer.close()
    first, second = (call for call in calls if isinstance(call, dict))
    assert first["id"] == second["id"] and first["resume"] == "allow" and first["config"] == {"seed": 1}
    assert calls.count((1, {"loss": 1.0})) == 2 and calls.count("finish") == 2

    def refuse(**_):
        raise RuntimeError("api_key not configured\nmore")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with pytest.raises(UserError, match=r"wandb does not start \(api_key not configured\); run `wandb login`"):
        open_writers(run, ["wandb"])


# console and the whole output


def test_output_of_a_run_resumed_after_a_kill(tmp_path):
    def run(stop, resume=False):
        stream = io.StringIO()
        config = Config(str(tmp_path / "run"), resume, ["tensorboard"])
        with reporting.RunOutput(config, stream=stream) as output:
            output.part("policy", "Qwen2, [bold]1.1M[/bold] parameters")
            output.truncate(2 if resume else 0)
            output.start(6, 2 if resume else 0)
            for step in range(3 if resume else 1, stop + 1):
                row, result = iteration(step)
                output.iteration(row, PARTS, result)
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
    assert table["completion"][4] == "raw 1 1" and table["text"][4] == "text 1 1" and table["length"] == [4] * 6
    _, result = iteration(3)
    assert table["reward/length"] == result.rollout.judgement.rewards[..., 1].ravel().tolist()
    assert table["watch/pixel_accuracy"] == result.rollout.judgement.watched.ravel().tolist()
    assert table["advantage"] == result.advantages.ravel().tolist()


def test_status_names_each_reward_of_several():
    one = {"reward/length/mean": 0.25, "reward/total/mean": 0.25, "reward/total/std": 0.5}
    assert reporting.status(one) == "reward 0.250 ±0.500"
    assert reporting.status(one | {"reward/x/mean": 1.0, "loss": np.float32(2), "kl": 0.0}) == (
        "reward 0.250 ±0.500  length 0.250  x 1.000  loss 2"
    )


def test_result_lines():
    summary = {
        "evaluation": {"pixel_accuracy": {"before": 0.25, "after": 0.75, "oracle": 0.9}, "x": {"after": 1.0}},
        "baseline_reward": 0.2, "reward": 0.5, "improvement": 0.3, "relative_improvement": 1.5,
    }  # fmt: skip
    lines = reporting.result_lines(summary)
    assert lines[1].split() == ["pixel_accuracy", "0.250", "0.750", "0.900"]
    assert lines[2].split() == ["x", "–", "1.000", "–"]
    assert lines[3] == "baseline reward 0.200, reward after training 0.500: improvement +0.300, +150%"


# charts and page


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.5, 1]),
        (0, 100, [0, 50, 100]),
        (-0.031, 0.36, [-0.1, 0, 0.1, 0.2, 0.3, 0.4]),
        (1e-6, 3e-6, [1e-6, 2e-6, 3e-6]),
        (5, 5, [4.4, 4.6, 4.8, 5.0, 5.2, 5.4, 5.6]),
    ],
)
def test_ticks_are_round_and_enclose(low, high, ticks):
    found = nice_ticks(low, high)
    assert found[0] <= low + 1e-12 and found[-1] >= high - 1e-12
    steps = np.diff(found)
    np.testing.assert_allclose(steps, steps[0])
    mantissa = steps[0] / 10.0 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert min(abs(mantissa - nice) for nice in (1, 2, 5)) < 1e-6
    assert 3 <= len(found) <= 7


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (0.12345, "0.123"), (-1.5, "-1.5"), (1234.5, "1234"), (2.5e-6, "2.5e-6"), (None, "–"),
     (100.0, "100"), (0.999999, "1"), (float("nan"), "–")],
)  # fmt: skip
def test_numbers_for_people(value, text):
    assert number(value) == text


def test_smoothing_keeps_a_constant_and_its_start():
    np.testing.assert_allclose(smoothed([2.0] * 5), 2.0)
    assert smoothed([1.0, 0.0])[0] == 1.0


def test_a_chart_leaves_out_what_is_missing():
    rows = [{"step": 1, "a": 0.5}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": float("nan")}]
    assert series_of(rows, "a", "A").points == [(1, 0.5)]
    assert line_chart("empty", [Series("b", [])]) == ""
    chart = line_chart("<one>", [series_of(rows, "a", "A & B")])
    assert "&lt;one&gt;" in chart and "A &amp; B <b>0.5</b>" in chart


def test_the_lines_of_a_chart_are_where_the_values_are():
    chart = line_chart("t", [Series("a", [(0, 0.0), (10, 1.0)])])
    (low_x, low_y), (high_x, high_y) = re.findall(r"[ML]([\d.]+) ([\d.]+)", chart)
    ticks = dict((text, float(y) - 3.5) for y, text in re.findall(r"y='([\d.]+)' text-anchor='end'>([^<]+)<", chart))
    assert float(low_y) == ticks["0"] and float(high_y) == ticks["1"] and float(low_x) < float(high_x)


class Checker(HTMLParser):
    """Collects what would be fetched or run, and checks that tags close."""

    VOID = ("meta", "img", "line", "circle", "path", "br")

    def __init__(self):
        super().__init__()
        self.open, self.sources, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.sources += [attrs[name] for name in ("src", "href") if name in attrs]
        assert tag not in ("script", "link", "iframe")
        if tag not in self.VOID or (tag == "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def write_page(path, **changes):
    image = np.zeros((32, 32, 3), np.uint8)
    arguments = {
        "title": "a run",
        "summary": {
            "evaluation": {"alignment": {"before": -0.03, "after": 0.36, "oracle": 0.45},
                           "pixel_accuracy": {"before": 0.2, "after": 0.8, "oracle": 0.9}},
            "prompts": 128, "seed": 3, "seconds": {"sample": 1.5, "total": 9.25}, "versions": {"jax": "0.10.2"},
            "devices": {"policy": "cpu"},
        },
        "metrics_rows": [{"step": s, "reward/x/mean": s / 50, "kl": 0.1, "loss": None} for s in range(1, 50)],
        "gallery": [GalleryEntry("<b>casual</b>", "canonical", image, image + 255, {"alignment": (0.1, 0.4)})],
        "tables": [Table("Words", ("word", "share"), [["<i>", 0.5]])],
        "config_text": "seed: 3 # <config>",
    }  # fmt: skip
    write_report(path, **(arguments | changes))
    checker = Checker()
    checker.feed(path.read_text())
    assert checker.open == []
    assert all(source.startswith("data:image/png;base64,") for source in checker.sources)
    return path.read_text(), "".join(checker.text), checker.sources


def test_the_page_stands_alone_and_tells_the_result(tmp_path):
    page, text, sources = write_page(tmp_path / "report.html")
    assert "pixel accuracy 20.0% → 80.0% on 128 held-out prompts, 86% of the way to the best possible" in text
    assert "<b>casual</b>" in text and "seed: 3 # <config>" in text and "+60.0 points" in text
    assert len(sources) == 2 and "width='128' height='128'" in page and "class='crisp'" in page
    assert "http://" not in page and "https://" not in page and "url(" not in page


def test_a_page_without_pictures_or_rows(tmp_path):
    _, text, sources = write_page(
        tmp_path / "report.html",
        summary={}, gallery=[GalleryEntry("question", "answer")], metrics_rows=[], tables=[], config_text="",
    )  # fmt: skip
    assert sources == [] and "question" in text and "answer" in text and "Training" not in text


def test_write_run_report_from_what_a_run_hands_over(tmp_path):
    directory = RunDirectory.open(tmp_path / "run")
    writer = JsonLines(directory.metrics)
    writer.write(1, {"reward/x/mean": 0.5})
    writer.close()
    image = np.full((64, 64, 3), 7, np.uint8)
    entry = {"prompt": "p", "rewrite": "r", "before": image, "after": image, "scores": {"x": (0.1, 0.2)}, "seed": 5}
    reporting.write_run_report(
        directory,
        summary={"evaluation": {"x": {"before": 0.1, "after": 0.2, "oracle": None}}},
        gallery=[entry],
        added_words=[("sharp", 0.75)],
        table=[{"prompt": "p", "rewrite": "r", "x": 0.2}],
    )
    page = directory.report.read_text()
    assert "sharp" in page and "0.75" in page and "Held-out prompts after training" in page
    names = ["000_after.png", "000_before.png", "gallery.json"]
    assert sorted(path.name for path in directory.images.iterdir()) == names
    assert json.loads((directory.images / "gallery.json").read_text())[0]["rewrite"] in page


def test_versions_name_what_computes():
    assert {"python", "jax", "flax", "optax", "numpy"} <= set(reporting.versions())
