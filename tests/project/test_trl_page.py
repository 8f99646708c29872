"""The page for users of TRL: every field of its config has a line, which agrees with what a mistake is told."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.config.other_names import TRL

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from_trl.md").read_text()
ROWS = re.findall(r"^\| ([\w, ]+) \| (.+) \|$", PAGE, re.MULTILINE)
LINES = {name: ours for names, ours in ROWS for name in names.split(", ")}


def test_every_field_of_the_config_is_there():
    found = importlib.util.find_spec("trl")
    if found is None:
        pytest.skip("trl is not installed")
    source = Path(found.submodule_search_locations[0], "trainer", "grpo_config.py").read_text()
    (config,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    fields = {line.target.id for line in config.body if isinstance(line, ast.AnnAssign)}
    assert len(fields) > 70
    assert not fields - LINES.keys()


@pytest.mark.parametrize("name", sorted(TRL.keys() & LINES.keys()))
def test_what_an_option_is_told_is_what_the_page_says(name):
    assert TRL[name].rpartition(".")[2] in LINES[name]


def test_its_config_is_one(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope = {}
    exec(code[: code.index("run(config")].replace("make_config, run", "make_config"), scope)
    assert scope["config"].algorithm.preset == "dapo"
    assert parse(["--task=text", "--algorithm.preset=dapo"]).algorithm.advantage == "gdpo"
