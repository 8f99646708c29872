"""report.html: charts at the right values, one self-contained page, and the result."""

import datetime
import json
import re
from decimal import Decimal
from html.parser import HTMLParser

import numpy as np
import pytest

from grpo_jax.reports.charts import charts_of, draw, number
from grpo_jax.reports.page import RunEnd, completions_table, render, render_report, write_end
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.tasks.prompt_enhancement_task import PromptEnhancement
from grpo_jax.tasks.task import Chart, Curve, Display, GalleryEntry, Table


def test_a_chart_has_its_values_where_they_are_and_under_the_pointer():
    rows = [{"step": step, "a": step * step / 7, **({"b": step / 7} if step < 2 else {})} for step in range(1300)]
    rows += [{"step": 1300, "a": None}, {"step": 1301}, {"step": 1302, "a": float("nan")}]
    curves = (Curve("a", "a <i>"), Curve("b", "b"), Curve("c", "absent"))
    chart = render("chart", draw(Chart("<one>", curves), rows))
    assert draw(Chart("empty", curves[2:]), rows) is None
    assert "&lt;one&gt;" in chart and "absent" not in chart
    assert f"a &lt;i&gt; <b>{number(rows[1299]['a'])}</b>" in chart  # the last one, not smoothed
    (raw,) = re.findall(r'class="raw".*?d="M([^"]*)"', chart)
    assert len(raw.split("L")) <= 500
    ticks = {text: float(y) - 3.5 for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">([^<]+)<', chart)}
    bottom, per_value = ticks["0"], (ticks["2.0e5"] - ticks["0"]) / 200_000
    marks = re.findall(r'class="(?:mark|dot)".*?cx="([\d.]+)" cy="([\d.]+)".*?iteration (\d+): (a|b)', chart)
    assert 60 <= len(marks) <= 102
    for x, y, step, name in marks:
        assert float(x) == pytest.approx(48 + int(step) / 1299 * 262, abs=0.06)
        value = int(step) ** (2 if name == "a" else 1) / 7
        assert float(y) == pytest.approx(bottom + value * per_value, abs=0.2)


def test_a_number_has_three_digits_and_a_whole_one_all_of_them():
    assert [number(value) for value in (123456, -5, 123456.5, 0.12345, 2.0, None)] == [
        "123456", "-5", "1.2e5", "0.123", "2", "–",
    ]  # fmt: skip


def test_a_reward_of_another_judge_is_no_turn_of_an_episode():
    """Its name is NAME@JUDGE."""
    names = ("reward/likes@second/mean", "reward/likes@turn2")
    charts = {chart.title: chart.curves for chart in charts_of([dict.fromkeys(names, 0.5)], Display())}
    assert [curve.label for curve in charts["Rewards turn by turn"]] == ["likes, turn 2"]


class Checker(HTMLParser):
    """Collects what would be fetched or run, and checks that tags close."""

    VOID = ("meta", "img", "line", "circle", "path", "br")

    def __init__(self):
        super().__init__()
        self.open, self.sources, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.sources += [attrs[name] for name in ("src", "href") if name in attrs]
        assert tag not in ("link", "iframe", "script") and not any(name.startswith("on") for name in attrs)
        if tag not in self.VOID or (tag in ("path", "circle")):
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
        "display": PromptEnhancement.display,
        "summary": {
            "evaluation": {"alignment": {"before": -0.03, "after": 0.36, "oracle": 0.45},
                           "pixel_accuracy": {"unchanged": 0.1, "before": 0.2, "after": 0.8, "oracle": 0.9}},
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
    end = RunEnd(gallery, tables=tables, config=config)
    path.write_text(render_report(**arguments, end=end))
    checker = Checker()
    checker.feed(path.read_text())
    assert checker.open == []
    assert all(source.startswith("data:image/png;base64,") for source in checker.sources)
    return path.read_text(), "".join(checker.text), checker.sources


def test_the_page_stands_alone_and_tells_the_result(tmp_path):
    page, text, sources = write_page(tmp_path / "report.html")
    assert "pixel accuracy 20.0% → 80.0% on 128 held-out prompts, 86% of the way to the best possible" in text
    assert "<b>casual</b>" in text and "seed: 3 # <config>" in text and "+60.0 points" in text
    assert len(sources) == 2 and 'class="crisp" width="128" height="128"' in page
    pictures = re.findall('alt="(.*?)"', page)  # "before" is the untrained policy alone
    assert pictures == ["unchanged prompt", "completion"] and "<dt>unchanged prompt</dt><dd class=" in page
    assert "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action" in page
    assert "http://" not in page and "https://" not in page and "url(" not in page


def test_a_start_above_the_oracle_has_no_share_of_a_way(tmp_path):
    values = {"total": {"before": 0.6, "after": 0.4, "oracle": 0.5}}
    text = write_page(tmp_path / "report.html", summary={"evaluation": values, "prompts": 8})[1]
    assert "total 0.60 → 0.40 on 8 held-out prompts." in text


def test_completions_of_some_iterations_are_there(tmp_path):
    run = RunDirectory(tmp_path)
    assert completions_table(run.completions) is None
    for step in range(1, 41):
        texts = ["x" * 5000] + ["y"] * 49
        columns = {"prompt": ["p"] * 50, "raw_completion": [f" {text}" for text in texts], "completion": texts}
        run.write_completions(step, columns | {"pictures": [[]] * 50})
    (run.completions / "step_000040.parquet").write_bytes(b"PAR1")
    table = completions_table(run.completions)
    assert table.columns == ["prompt", "completion", "step"]  # a narrow screen shows the texts
    assert [row[2] for row in table.rows[::40]] == [1, 11, 21, 30] and len(table.rows) == 160
    page = render_report("a run", {}, completions=table)
    assert "x" * 1999 + "…" in page and "x" * 2000 not in page


def test_a_table_may_hold_any_values(tmp_path):
    run, day = RunDirectory(tmp_path), datetime.date(2026, 11, 30)
    table = Table("Days", ("day", "paid"), [[day, Decimal("1.5")]])
    write_end(run, RunEnd(tables=[table]))
    assert json.loads(run.end.read_text())["tables"][0]["rows"] == [["2026-11-30", "1.5"]]
    assert "2026-11-30" in render("table", *table[:3])


def test_a_page_without_pictures_or_rows(tmp_path):
    _, text, sources = write_page(
        tmp_path / "report.html",
        summary={}, gallery=[GalleryEntry("question", "answer")], rows=[], tables=[], config_text="",
    )  # fmt: skip
    assert sources == [] and "question" in text and "answer" in text and "Training" not in text
