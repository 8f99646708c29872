"""The page for users of TRL equals the table of hints, which has every name of the installed TRL."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
from support.imports import ROOT

from grpo_jax.config.command_line import parse
from grpo_jax.config.fields import flat
from grpo_jax.config.other_names import NOT_HERE, TABLES
from grpo_jax.config.run import make_config

PAGE = (ROOT / "docs" / "coming_from_trl.md").read_text()
FOUND = importlib.util.find_spec("trl")
TRAINER, GRPO_CONFIG, TRAINING_ARGUMENTS, COMMAND = (
    TABLES[name] for name in ("trainer", "grpo_config", "training_arguments", "command")
)


def names_of(table):
    return {name for names in table for name in names.split(", ")}


def class_of_trl(module):
    """The last class of a module of TRL, as its source has it."""
    source = Path(FOUND.submodule_search_locations[0], "trainer", f"{module}.py").read_text()
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)][-1]


@pytest.mark.skipif(FOUND is None, reason="trl is not installed")
@pytest.mark.parametrize(
    ("module", "table"), [("grpo_config", GRPO_CONFIG), ("base_config", {**GRPO_CONFIG, **TRAINING_ARGUMENTS})]
)
def test_every_field_of_its_config_is_in_the_table(module, table):
    fields = {line.target.id for line in class_of_trl(module).body if isinstance(line, ast.AnnAssign)}
    assert fields and not fields - names_of(table)


@pytest.mark.skipif(FOUND is None, reason="trl is not installed")
def test_every_argument_of_its_trainer_is_in_the_table():
    (init,) = (node for node in class_of_trl("grpo_trainer").body if getattr(node, "name", None) == "__init__")
    assert not {argument.arg for argument in init.args.args[1:]} - names_of(TRAINER)


def test_every_place_is_a_field_that_takes_a_value():
    values = make_config(task="text").model_dump()
    in_force = flat(values) | values | {"policy.lora": values["policy"]["lora"], "policy.lora.rank": 4}
    settings = set()
    tables = TRAINER | GRPO_CONFIG | TRAINING_ARGUMENTS | COMMAND | TABLES["verl"] | TABLES["openrlhf"]
    for entry in tables.values():
        settings |= set() if entry.startswith(NOT_HERE) else {*entry.partition("; ")[0].split(", ")}
    while settings:  # each field once in a config
        chosen = {setting.partition(": ")[0]: setting for setting in sorted(settings)}
        settings -= {*chosen.values()}
        given = {field: setting.partition(": ")[2] or in_force[field] for field, setting in chosen.items()}
        texts = {field: value if isinstance(value, str) else json.dumps(value) for field, value in given.items()}
        words = [f"--{field}={text}" for field, text in texts.items()]
        config = flat(parse(["--task=text", *words, "--policy.lora.rank=4"]).model_dump())
        assert all(config[field] == value for field, value in given.items() if field in config and value is not None)


def test_epsilon_is_both_bounds_as_in_trl():
    assert GRPO_CONFIG["epsilon"].startswith("algorithm.clip_low, algorithm.clip_high; both")


def test_the_page_has_the_table():
    spec = importlib.util.spec_from_file_location("make_trl_page", ROOT / "docs" / "make_trl_page.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.with_tables(PAGE) == PAGE, "run docs/make_trl_page.py"
    for name in TABLES.keys() - {"removed"}:
        assert page.rows(TABLES[name]) in PAGE


def test_its_config_is_one():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope = {}
    exec(code[: code.index("run(config")].replace("make_config, run", "make_config"), scope)
    assert scope["config"].algorithm.preset == "dapo"
    assert parse(["--task=text", "--algorithm.preset=dapo"]).algorithm.advantage == "gdpo"
