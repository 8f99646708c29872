"""report.html as a run writes it: at its end, and when it stops or fails."""

import io
import json

import numpy as np
import pytest

from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
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


def write_run(folder, steps=14, *, ends=shown_end, task="text", **changes):
    """A run directory as a run writes it, up to so many iterations; `ends` is what `finish` gets, None: it stops."""
    config = make_config(task=task, run_dir=str(folder), report_to=[], **changes)
    with RunOutput(config, stream=io.StringIO()) as output:
        output.truncate(0)
        for step in range(1, steps + 1):
            rewards = np.arange(4) / 4 + step
            columns = {"prompt": ["a", "a", "b", "b"], "completion": [f"{i} in {step}" for i in range(4)]}
            output.completions(step, columns | {"reward/x": rewards, "advantage": rewards - rewards.mean()})
            seconds = {"seconds/total": 1.5, "seconds/draw": 1}
            output.iteration({"step": step, "reward/x/mean": step / 7, "loss": -step, "kl": 0.0, **seconds})
        output.directory.checkpoints.joinpath("step_1").mkdir(parents=True)  # what keeps an unfinished run
        if ends is not None:
            output.finish(ends(steps), config=config)
    return folder


def test_the_page_of_a_finished_run_shows_all(tmp_path):
    page = (write_run(tmp_path / "run") / "report.html").read_text()
    assert page.count("data:image/png") == 6 and "Not finished" not in page
    assert all(word in page for word in ("Ranks", "rising", "sharp", "mend it", "kind: text", "1 in 14"))
    assert "<h2>Episodes</h2>" in page
    pictures = {file.name for file in (tmp_path / "run" / "images").iterdir()}
    assert {"000_turn_1.png", "000_before.png"} <= pictures
    stored = json.loads((tmp_path / "run" / "report.json").read_text())
    assert stored["episodes"][0]["turns"][0]["observation"] == "mend it"


def test_hostile_texts_stay_texts(tmp_path):
    """Markup in any text of a run is shown, and never part of the page."""
    evil = "</p><form action=//x><base href=//x><img src=x onerror=alert(1)>"

    def hostile(value):
        if isinstance(value, dict):
            return {evil if name in ("x", "y") else name: hostile(entry) for name, entry in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(hostile, value))
        if isinstance(value, list | tuple):
            return [hostile(entry) for entry in value]
        return evil if isinstance(value, str) else value

    page = (write_run(tmp_path / "run", ends=lambda steps: hostile(shown_end(steps))) / "report.html").read_text()
    assert page.count("&lt;form action=//x&gt;") >= 14
    assert not any(tag in page for tag in ("<form", "<base", "<img src=x"))
    assert "form-action 'none'; base-uri 'none'" in page


def test_a_run_that_stops_or_fails_has_a_page_of_its_iterations(tmp_path):
    page = (write_run(tmp_path / "run", 3, ends=None) / "report.html").read_text()
    assert "Not finished: after iteration 3." in page and "3 in 3" in page and "The first of 3 of 3 iterations" in page

    def fail(steps):
        raise RuntimeError("the judge is away")

    with pytest.raises(RuntimeError, match="the judge is away"):
        write_run(tmp_path / "failed", 2, ends=fail)
    assert "Not finished: after iteration 2." in (tmp_path / "failed" / "report.html").read_text()


def test_a_refused_resume_leaves_the_page_of_the_finished_run(tmp_path):
    run = write_run(tmp_path / "run", 3)
    first = (run / "report.html").read_text()
    config = make_config(task="text", run_dir=str(run), report_to=[], resume=True)
    with pytest.raises(UserError, match="other values"), RunOutput(config, stream=io.StringIO()):
        raise UserError("the checkpoint was made with other values")
    assert (run / "report.html").read_text() == first
