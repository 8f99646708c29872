"""docs/scaling.md shows what the calculator prints."""

import json
import re
import shlex
from pathlib import Path

import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.planning.cards import places_of
from grpo_jax.planning.copies import cards_of
from grpo_jax.train import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text()
SHOWN = re.findall(
    r"^```bash\n(python -m grpo_jax\.train [^`]*--judges [^`]*)```\n\n```text\n(.*?)^```", PAGE, re.M | re.S
)


@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_what_a_command_prints_is_what_the_page_shows(command, shown, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command.replace("\\\n", " "))[3:]) == 0
    printed, lines = capsys.readouterr().out.splitlines(), shown.splitlines()
    whole = lines[-1] != "…"
    assert (printed if whole else printed[: len(lines) - 1]) == (lines if whole else lines[:-1])


def test_every_example_is_shown():
    files = {path.name for path in (ROOT / "examples" / "many_cards").iterdir()}
    assert files == {name for command, _ in SHOWN for name in re.findall(r"many_cards/(\S+)", command)}


@pytest.mark.parametrize(("name", "cards"), [("8", 1), ("64", 3), ("512", 8)])
def test_an_example_counts_its_cards_and_is_placed(name, cards):
    config = parse(["--config=prompt_enhancement_sd3", f"--config={ROOT / 'examples' / 'many_cards' / name}.yaml"])
    places = {"policy": tuple(f"gpu:{card}" for card in range(cards)), "renderer": ("cpu",), "scorer": ("cpu",)}
    assert cards_of(config) == int(name) and places_of(config, cards) == places


def test_the_benchmarks_figures_are_those_of_its_file():
    cases = json.loads((ROOT / "benchmarks" / "scaling" / "lag.json").read_text())["cases"]
    for case in cases:
        assert f"| {case['lag']} | {case['chunks']} | {case['predicted']:.2f} | {case['seconds']:.2f} |\n" in PAGE
