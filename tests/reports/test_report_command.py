"""`grpo report`: a run's page again, from the files of its directory."""

import io
import json

import numpy as np
import pytest

from grpo_jax import __main__, report
from grpo_jax.config.run import make_config
from grpo_jax.reports.output import RunOutput
from grpo_jax.tasks.task import EpisodeEntry, Finished, GalleryEntry, ShownTurn, Table

nan = float("nan")


def picture(value):
    return np.full((8, 6, 3), value, np.uint8)


def shown_end(steps):
    """All that the end of a run may show, missing values and all."""
    turns = [ShownTurn("first", {"x": 0.5, "y": nan}, picture(10), "mend it", [picture(20)]), ShownTurn("second")]
    summary = {
        "iterations": steps,
        "evaluation": {"x": {"before": 0.25, "after": np.float32(0.5), "oracle": None}, "y": {"after": nan}},
        "samples": {"measures": {"x": {"mean@4": {"before": [0.2, 0.1, 0.3], "after": [0.4, 0.375, 0.425]}}}},
        "seconds": {"total": 90.0},
    }
    return Finished(
        summary,
        tables=[
            Table("Ranks", ("user", "rank", "odd"), [("rising", np.int64(4), nan), ("falling", None, True)]),
            Table("Words", ("word", "share"), [("sharp", np.float32(0.75))], "added"),
        ],
        gallery=[GalleryEntry("p", "r", picture(1), None, {"x": (nan, 0.2)}, shown=[picture(2), picture(3)])],
        episodes=[EpisodeEntry("asked", turns, [picture(4)])],
    )


def write_run(folder, steps=14, *, ends=True, task="text", **changes):
    """A run directory as a run writes it, up to so many iterations."""
    config = make_config(task=task, run_dir=str(folder), report_to=[], **changes)
    with RunOutput(config, stream=io.StringIO()) as output:
        output.truncate(0)
        for step in range(1, steps + 1):
            rewards = np.arange(4) / 4 + step
            columns = {"prompt": ["a", "a", "b", "b"], "completion": [f"{i} in {step}" for i in range(4)]}
            output.completions(step, columns | {"reward/x": rewards, "advantage": rewards - rewards.mean()})
            seconds = {"seconds/total": 1.5, "seconds/draw": 1}
            output.iteration({"step": step, "reward/x/mean": step / 7, "loss": -step, "kl": 0.0, **seconds})
        if ends:
            output.finish(shown_end(steps), config=config)
        output.directory.checkpoints.joinpath("step_1").mkdir(parents=True)  # what keeps an unfinished run
    return folder


@pytest.fixture
def refused(capsys):
    """Calls the command with what it must refuse; gives its line."""

    def call(*words):
        assert __main__.main(["report", *map(str, words)]) == 2
        out, line = capsys.readouterr()
        assert out == "" and line.startswith("error: ") and line.count("\n") == 1
        return line

    return call


def test_a_page_written_again_is_the_same(tmp_path, capsys):
    page = write_run(tmp_path / "run") / "report.html"
    first = page.read_text()
    assert first.count("data:image/png") == 6 and "Not finished" not in first
    assert all(word in first for word in ("Ranks", "rising", "sharp", "mend it", "kind: text", "1 in 14"))
    assert "<h2>Episodes</h2>" in first
    pictures = {file.name for file in (tmp_path / "run" / "images").iterdir()}
    assert {"000_turn_1.png", "000_before.png"} <= pictures
    page.unlink()
    assert __main__.main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"report: {page}\n" and page.read_text() == first
    assert report.main([str(tmp_path / "run"), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == first


def test_a_hostile_report_json_stays_text(tmp_path):
    """Markup in any text of it is shown, and never part of the page."""
    run, evil = write_run(tmp_path / "run"), "</p><form action=//x><base href=//x><img src=x onerror=alert(1)>"

    def hostile(value):
        if isinstance(value, dict):
            return {evil if name in ("x", "y") else name: hostile(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [hostile(entry) for entry in value]
        return evil if isinstance(value, str) and not value.startswith("iVBOR") else value

    stored = json.loads((run / "report.json").read_text())
    (run / "report.json").write_text(json.dumps(hostile(stored)))
    assert report.main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert page.count("&lt;form action=//x&gt;") >= 15
    assert not any(tag in page for tag in ("<form", "<base", "<img src=x"))
    assert "form-action 'none'; base-uri 'none'" in page


def test_a_run_that_goes_on_has_a_page(tmp_path):
    run = write_run(tmp_path / "run", 3, ends=False)
    assert report.main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Not finished: after iteration 3." in page and "3 in 3" in page and "The first of 3 of 3 iterations" in page
    finished = write_run(tmp_path / "finished", 3)
    with (finished / "metrics.jsonl").open("a") as file:  # resumed with more iterations
        file.write('{"step": 4, "reward/x/mean": 1.0}\n')
    assert report.main([str(finished)]) == 0
    page = (finished / "report.html").read_text()
    assert "Not finished: after iteration 4." in page and "Ranks" not in page


def test_a_task_that_is_gone_has_a_plain_page(tmp_path, capsys):
    run = write_run(tmp_path / "run", 3)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("kind: text", "kind: gone_package.task:Gone"))
    assert report.main([str(run)]) == 0
    assert "warning: run is shown without its task's own charts" in capsys.readouterr().out
    assert "Rewards" in (run / "report.html").read_text()


def test_what_is_no_run_is_one_line(tmp_path, refused):
    run = write_run(tmp_path / "run", 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("gone", "empty", "file"):
        assert f"{name}: no config.yaml there; give the run directory" in refused(tmp_path / name)
    assert "no config.yaml there" in refused("a\0b") and "no config.yaml there" in refused("a" * 5000)
    bare = write_run(tmp_path / "bare", 0, ends=False)
    assert f"{bare}: no metrics there yet" in refused(bare)
    assert "--out: expected a file in a folder that exists, got" in refused(run, "--out", tmp_path / "no" / "x.html")
    assert "--out: expected a file" in refused(run, "--out", tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("metrics.jsonl", 'nonsense\n{"step": 1}\n', "metrics.jsonl, line 1: not a row of metrics"),
        ("summary.json", "{", "summary.json: cannot be read"),
        ("summary.json", "[1]", "summary.json: cannot be read (expected a JSON object, got [1])"),
        ("summary.json", "[" * 100_000, "summary.json: cannot be read (nested too deeply)"),
        ("report.json", "[" * 100_000, "report.json: cannot be read (nested too deeply)"),
        ("report.json", '{"tables": [{"title": 3}]}', "report.json: RunEnd.tables[0].title: expected a string, got 3"),
        (
            "report.json",
            '{"gallery": [{"prompt": "p", "completion": "r", "before": "<b>"}]}',
            "gallery[0].before: a picture is not valid base64",
        ),
        ("report.json", '{"sections": {"gallery": "<form>"}}', "report.json: RunEnd.sections: no such field"),
    ],
)
def test_a_damaged_run_is_one_line(tmp_path, refused, name, text, line):
    run = write_run(tmp_path / "run", 2)
    (run / name).write_text(text)
    assert line in refused(run)
