"""The script of the page, run: its tables by Node, the page itself in a browser, where the machine has them."""

import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from grpo_jax.reports import page as module
from grpo_jax.reports.completions import read_completions
from grpo_jax.reports.page import render_report
from grpo_jax.runs.directory import RunDirectory

TABLES = Path(module.__file__).with_name("tables.js")
NODE = shutil.which("node")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser", "chrome"))), None)


def logged(folder, steps=9):
    """Iterations of two prompts that come each time and one that is new; every reward different, some missing."""
    draw = random.Random(0)
    evil = "<img src=x onerror='window.evil = 1'></script><script>window.evil = 1</script>"
    for step in range(1, steps + 1):
        prompts = [prompt for prompt in ("first prompt", "Second\nprompt", f"new {step} {evil}") for _ in range(4)]
        columns = {
            "prompt": prompts,
            "completion": [f"{draw.choice(['Red', 'blue', 'GREEN'])} {place} of {step} {evil}" for place in range(12)],
            "reward/x": [None if draw.random() < 0.1 else draw.gauss(0, 1) for _ in prompts],
            "watch/y": [float(step)] * 12,
            "advantage": [draw.gauss(0, 1) for _ in prompts],
            "usable": [draw.random() < 0.5 for _ in prompts],
        }
        RunDirectory(folder).write_completions(step, columns)
    return read_completions(folder / "completions")


SCRIPT = """
const tables = require(process.argv[1]);
const data = JSON.parse(require("fs").readFileSync(0));
const table = tables.openTable(data);
const column = (name) => table.columns.find((one) => one.name === name);
const prompts = tables.groupPrompts(table);
console.log(JSON.stringify({
  rows: table.rows,
  all: tables.search(table, table.rows, " "),
  green: tables.search(table, table.rows, "green"),
  second: tables.search(table, table.rows, "SECOND\\nP"),
  up: tables.sort(column("reward/x"), table.rows, false),
  down: tables.sort(column("reward/x"), table.rows, true),
  texts: tables.sort(column("completion"), table.rows, false).map((row) => tables.cell(column("completion"), row)),
  usable: tables.sort(column("usable"), table.rows, true),
  history: tables.history(table, table.rows, column("reward/x")),
  labels: prompts.columns.map((one) => one.label),
  prompts: prompts.rows.map((row) => prompts.columns.map((one) => tables.cell(one, row))),
  groups: prompts.groups,
  numbers: [0, 12, 0.12345, -1.5, 1234.5, 2.5e-6, null, 100.5, 0.999999, 123456.7].map(tables.number),
}));
"""


@pytest.mark.skipif(NODE is None, reason="no node on this machine")
def test_tables_search_sort_and_group_as_loops_do(tmp_path):
    data = logged(tmp_path).data
    done = subprocess.run([NODE, "-e", SCRIPT, str(TABLES)], input=json.dumps(data), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    came = json.loads(done.stdout)
    columns = {column["name"]: column for column in data["columns"]}

    def cells(name):
        column = columns[name]
        return [column["words"][v] if "words" in column else v for v in column["values"]]

    rows, steps, rewards = list(range(108)), cells("step"), cells("reward/x")
    prompts, texts = cells("prompt"), cells("completion")
    assert came["rows"] == came["all"] == rows and None in rewards
    assert came["green"] == [row for row in rows if "GREEN" in texts[row]] != []
    assert came["second"] == [row for row in rows if prompts[row].startswith("Second")]
    there = sorted((row for row in rows if rewards[row] is not None), key=lambda row: rewards[row])
    missing = [row for row in rows if rewards[row] is None]
    assert came["up"] == there + missing and came["down"] == there[::-1] + missing
    assert [text.split()[0] for text in came["texts"]] == sorted((t.split()[0] for t in texts), key=str.lower)
    usable = cells("usable")
    assert came["usable"] == sorted(rows, key=lambda row: -usable[row])  # equals as they stood
    for step, mean, values in came["history"]:
        expected = [r for r, s in zip(rewards, steps, strict=True) if s == step and r is not None]
        assert values == expected and mean == pytest.approx(sum(expected) / len(expected))
    assert [point[0] for point in came["history"]] == list(range(1, 10))
    assert came["labels"] == ["prompt", "iterations", "completions", "x, last", "x, change", "y, last", "y, change"]
    by_prompt = {line[0]: line[1:] for line in came["prompts"]}
    assert len(by_prompt) == 11 and by_prompt["first prompt"][:2] == [9, 36] and by_prompt["first prompt"][4:] == [9, 8]
    assert [prompts[group[0]] for group in came["groups"]] == list(by_prompt)
    last = [r for r, s, p in zip(rewards, steps, prompts, strict=True) if s == 9 and p == "first prompt" and r]
    assert by_prompt["first prompt"][2] == pytest.approx(sum(last) / len(last))
    assert came["numbers"] == ["0", "12", "0.123", "-1.5", "1235", "2.5e-6", "–", "101", "1", "1.2e5"]


ACT = """
const $ = (what) => [...document.querySelectorAll(what)], told = {};
const texts = () => $(".browser tbody tr").map((row) => row.textContent);
const press = (what, label) => $(what).find((one) => one.textContent.startsWith(label)).click();
told.rows = texts().length;
told.pages = $(".pager")[0].textContent;
$(".pager button")[1].click();
told.second = texts()[0];
const box = $("input[type=search]")[0];
box.value = "of 7 ";
box.dispatchEvent(new Event("input"));
told.found = texts();
told.marks = $("mark").map((one) => one.textContent);
press(".browser th button", "advantage");
told.sorted = $(".browser tbody tr").map((row) => row.querySelector("[data-label=advantage]").textContent);
told.heading = $("[aria-sort=descending]").map((one) => one.textContent);
$(".browser tbody tr")[0].click();
told.open = $(".browser tr.open").length;
press(".tabs button", "prompts");
told.prompts = $(".count")[0].textContent;
box.value = "first";
box.dispatchEvent(new Event("input"));
$(".browser tbody tr")[0].dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
told.chosen = [".count", ".whole", ".about figcaption"].map((what) => $(what).map((one) => one.textContent));
press(".browser th button", "advantage");
press(".about button", "← back");
told.back = [$(".count")[0].textContent, box.value, texts().length];
const chart = $("figure.chart").find((one) => one.querySelector("figcaption").textContent === "Rewards");
const svg = chart.querySelector("svg:not(.swatch)"), edge = svg.getBoundingClientRect();
const at = { clientX: edge.left + edge.width * 174 / 320, clientY: edge.top + 9, pointerType: "touch" };
svg.dispatchEvent(new PointerEvent("pointerdown", at));
told.touched = chart.querySelector(".readout").textContent;
svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
told.right = chart.querySelector(".readout").textContent;
svg.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
told.hidden = chart.querySelector(".readout").hidden;
told.wide = document.documentElement.scrollWidth <= innerWidth;
told.evil = window.evil ?? null;
document.body.append(Object.assign(document.createElement("pre"), { id: "told", textContent: JSON.stringify(told) }));
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_the_page_in_a_browser(tmp_path):
    path = tmp_path / "report.html"
    rows = [{"step": step, "reward/x/mean": step / 8, "reward/y/mean": 0.5} for step in range(1, 30)]
    page = render_report("run", {}, rows=rows, completions=logged(tmp_path))
    path.write_text(page.replace("</body>", "<script>document.body.id = 'changed'</script></body>"))
    came = dom(path, tmp_path)
    assert '<body id="changed">' not in came and "<button" in came  # its own script runs, and no other

    path.write_text(re.sub("<meta http-equiv[^>]*>", "", page).replace("</body>", f"<script>{ACT}</script></body>"))
    told = json.loads(html.unescape(re.search(r'<pre id="told">(.*?)</pre>', dom(path, tmp_path))[1]))
    assert told["rows"] == 50 and told["pages"] == "‹page 1 of 3›" and " 2 of 5 " in told["second"]
    assert (
        len(told["found"]) == 12 and all("of 7 " in text for text in told["found"]) and told["marks"] == ["of 7"] * 12
    )
    values = [float(text) for text in told["sorted"]]
    assert values == sorted(values, reverse=True) and len(values) == 12 and told["heading"] == ["advantage"]
    assert told["open"] == 1 and told["prompts"] == "11 prompts"
    assert told["chosen"] == [["36 completions"], ["first prompt"], ["x", "y"]]
    assert told["back"] == ["1 prompt", "first", 1]
    assert told["touched"] == "iteration 15x 1.88y 0.5" and told["right"] == "iteration 16x 2y 0.5" and told["hidden"]
    assert told["evil"] is None and told["wide"]


def dom(path, folder):
    """What a page is once its scripts have run."""
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=390,900",
        f"--user-data-dir={folder / 'user'}",
    ]
    done = subprocess.run([BROWSER, *words, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
