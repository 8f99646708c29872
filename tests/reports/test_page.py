"""report.html: charts that are where their values are, a page that stands alone and tells the result."""

import base64
import hashlib
import html
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from grpo_jax.reports.charts import Series, line_chart, nice_ticks, number, series_of, smoothed
from grpo_jax.reports.completions import read_completions
from grpo_jax.reports.page import end_sections, render_report
from grpo_jax.reports.run_files import RunEnd
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.tasks.display import GalleryEntry, Table
from grpo_jax.tasks.prompt_enhancement_task import PromptEnhancement


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


def test_the_figure_beside_a_name_is_the_last_one():
    chart = line_chart("Shares", [Series("truncated", [(step, float(step == 20)) for step in range(1, 21)])])
    assert "class='smooth'" in chart and "truncated <b>1</b>" in chart


def test_the_lines_of_a_chart_are_where_the_values_are():
    chart = line_chart("t", [Series("a", [(0, 0.0), (10, 1.0)])])
    (low_x, low_y), (high_x, high_y) = re.findall(r"[ML]([\d.]+) ([\d.]+)", chart)
    ticks = dict((text, float(y) - 3.5) for y, text in re.findall(r"y='([\d.]+)' text-anchor='end'>([^<]+)<", chart))
    assert float(low_y) == ticks["0"] and float(high_y) == ticks["1"] and float(low_x) < float(high_x)


def test_the_values_under_the_pointer_are_those_of_the_curve():
    points = [(step, step * step / 7) for step in range(1, 1300)]
    chart = line_chart("t", [Series("a 'b' <i>", points), Series("c", points[::2]), Series("d", points[::2])])
    told = json.loads(html.unescape(re.search(r"data-points='([^']*)'", chart)[1]))
    first, second, third = told["lines"]
    assert first["name"] == "a 'b' <i>" and len(first["x"]) <= 500 and third["x"] is None  # as the line before
    for x, y in [*zip(first["x"], first["y"], strict=True), *zip(second["x"], third["y"], strict=True)]:
        assert y == pytest.approx(x * x / 7, rel=1e-4)
    (x, y), *_ = re.findall(r"class='raw'.*?M([\d.]+) ([\d.]+)", chart)
    low_x, high_x, left, right, low, high, bottom, top = told["frame"]
    assert float(x) == left + (1 - low_x) / (high_x - low_x) * (right - left)
    assert float(y) == pytest.approx(bottom + (1 / 7 - low) / (high - low) * (top - bottom), abs=0.06)


def test_every_line_of_a_chart_looks_different():
    chart = line_chart("t", [Series(f"line {i}", [(1, i), (2, i)]) for i in range(30)])
    strokes = re.findall(r"class='smooth' (style='[^']*')", chart)
    assert len(strokes) == len(set(strokes)) == 24
    alone = line_chart("t", [Series("second run", [(1, 1.0), (2, 2.0)], place=1)])
    assert "--series-2" in alone and "--series-1" not in alone


class Checker(HTMLParser):
    """Collects what would be fetched or run, and checks that tags close."""

    VOID = ("meta", "img", "line", "circle", "path", "br")

    def __init__(self):
        super().__init__()
        self.open, self.sources, self.text, self.scripts, self.policy = [], [], [], [], ""

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.sources += [attrs[name] for name in ("src", "href") if name in attrs]
        assert tag not in ("link", "iframe") and not any(name.startswith("on") for name in attrs)
        if tag == "script":
            self.scripts.append([attrs, ""])
        if attrs.get("http-equiv") == "Content-Security-Policy":
            self.policy = attrs["content"]
        if tag not in self.VOID or (tag == "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1][1] += data
        else:
            self.text.append(data)

    def data(self):
        """What the page's script reads; checks that there is no other script, and that no other would run."""
        *given, (attributes, script) = self.scripts
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert attributes == {} and f"script-src 'sha256-{digest}'" in self.policy
        assert self.policy.startswith("default-src 'none'; img-src data:;")
        assert [attributes for attributes, _ in given] in ([], [{"type": "application/json", "id": "data"}])
        return json.loads(given[0][1]) if given else None


def write_page(path, **changes):
    image = np.zeros((32, 32, 3), np.uint8)
    arguments = {
        "title": "a run",
        "display": PromptEnhancement.display,
        "summary": {
            "evaluation": {"alignment": {"before": -0.03, "after": 0.36, "oracle": 0.45},
                           "pixel_accuracy": {"before": 0.2, "after": 0.8, "oracle": 0.9}},
            "prompts": 128, "seed": 3, "seconds": {"sample": 1.5, "total": 9.25}, "versions": {"jax": "0.10.2"},
            "devices": {"policy": "cpu"},
        },
        "rows": [{"step": s, "reward/x/mean": s / 50, "kl": 0.1, "loss": None} for s in range(1, 50)],
        "gallery": [GalleryEntry("<b>casual</b>", "canonical", image, image + 255, {"alignment": (0.1, 0.4)})],
        "tables": [Table("Words", ("word", "share"), [["<i>", 0.5]])],
        "config_text": "seed: 3 # <config>",
    }  # fmt: skip
    arguments |= changes
    gallery, tables, config = (arguments.pop(name) for name in ("gallery", "tables", "config_text"))
    end = RunEnd(end_sections(gallery, [], tables, arguments["display"]), config=config)
    path.write_text(render_report(**arguments, end=end))
    checker = Checker()
    checker.feed(path.read_text())
    assert checker.open == []
    assert all(source.startswith("data:image/png;base64,") for source in checker.sources)
    checker.data()
    return path.read_text(), "".join(checker.text), checker.sources


def test_the_page_stands_alone_and_tells_the_result(tmp_path):
    page, text, sources = write_page(tmp_path / "report.html")
    assert "pixel accuracy 20.0% → 80.0% on 128 held-out prompts, 86% of the way to the best possible" in text
    assert "<b>casual</b>" in text and "seed: 3 # <config>" in text and "+60.0 points" in text
    assert len(sources) == 2 and "width='128' height='128'" in page and "class='crisp'" in page
    page = page.replace("http://www.w3.org/2000/svg", "")  # the name of a format
    assert "http://" not in page and "https://" not in page and "url(" not in page


def test_what_a_run_wrote_stays_text_in_the_page(tmp_path):
    evil = "</p><script>alert(1)</script><!--<script><img src=x onerror='alert(1)'> ' onclick='alert(1)"
    image = np.zeros((2, 2, 3), np.uint8)
    columns = {"prompt": [evil], "completion": [evil], "answer": [evil], f"reward/{evil}": [1.0]}
    RunDirectory(tmp_path).write_completions(1, columns)
    logged = read_completions(tmp_path / "completions")
    page, text, _ = write_page(
        tmp_path / "report.html",
        title=evil,
        completions=logged,
        gallery=[GalleryEntry(evil, evil, image, image, {evil: (0.1, 0.4)})],
        tables=[Table(evil, (evil, "share"), [[evil, 0.5]], note=evil)],
        rows=[{"step": s, f"reward/{evil}/mean": s / 50} for s in range(1, 50)],
        config_text=evil,
    )
    assert text.count("<script>alert(1)") >= 7 and page.count("<script>") == 1
    checker = Checker()
    checker.feed(page)
    assert checker.data() == logged.data and logged.data["columns"][-1]["name"] == f"reward/{evil}"


def test_a_page_without_pictures_or_rows(tmp_path):
    _, text, sources = write_page(
        tmp_path / "report.html",
        summary={}, gallery=[GalleryEntry("question", "answer")], rows=[], tables=[], config_text="",
    )  # fmt: skip
    assert sources == [] and "question" in text and "answer" in text and "Training" not in text
