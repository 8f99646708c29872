"""The pages of docs/tutorial run and show their own output: docs/make_tutorial.py, without drawing."""

import re

import pytest
from support.imports import ROOT

from grpo_jax.config.named import load_module

maker = load_module(str(ROOT / "docs" / "make_tutorial.py"))
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?%?")
OUTPUT = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in maker.PAGES])


def form(printed: str) -> str:
    """A text with equal numbers and spaces."""
    return " ".join(NUMBER.sub(" 0 ", printed).split())


def differences(committed: str, printed: str) -> list[tuple[str, str]]:
    """Numbers that differ by more than 3 % and two of the last digit, which processors and compilers may change."""
    assert form(committed) == form(printed)
    pairs = zip(NUMBER.findall(committed), NUMBER.findall(printed), strict=True)
    return [(was, now) for was, now in pairs if not near(was.rstrip("%"), now.rstrip("%"))]


def near(was: str, now: str) -> bool:
    digit = 10.0 ** -len(was.partition(".")[2])
    return abs(float(was) - float(now)) <= 0.03 * max(abs(float(was)), abs(float(now))) + 2 * digit


def test_the_pages_are_seven_and_short():
    pages = [path.with_suffix(".md") for path in maker.PAGES]
    assert [path.stem[0] for path in pages] == list("1234567")
    assert not {path.name: count for path in pages if (count := len(path.read_text().splitlines())) > 240}
    linked = set(re.findall(r"images/tutorial/(\w+\.png)", "".join(path.read_text() for path in pages)))
    drawn = {path.name: path.stat().st_size for path in maker.IMAGES.iterdir()}
    assert linked == set(drawn) and max(drawn.values()) <= 60_000
    index = (maker.HERE / "tutorial" / "index.md").read_text()
    assert all(f"]({path.name})" in index for path in pages)


@pytest.mark.wide  # they are made of functions that have tests of their own
@each_page
def test_a_page_is_what_its_code_prints(path):
    """Its own assertions hold, its text and code are those of the .py, its numbers those of this run."""
    cells = maker.read_cells(path.read_text(encoding="utf-8"))
    outcomes = maker.run_cells(path, cells)
    page, committed = (maker.write_page(path, cells, outcomes), path.with_suffix(".md").read_text(encoding="utf-8"))
    assert OUTPUT.sub("", committed) == OUTPUT.sub("", page), f"run python docs/make_tutorial.py {path.stem}"
    printed = [(cell, outcome.printed) for cell, outcome in zip(cells, outcomes, strict=True) if outcome.printed]
    for was, (cell, now) in zip(OUTPUT.findall(committed), printed, strict=True):
        if "learned" not in cell.tags:  # runs whose every draw hangs on the last bits of the one before
            assert not differences(was, now)
