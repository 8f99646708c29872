"""Every section of every task is built alike from files, Python and saved configs."""

import os

import pytest
import yaml
from support.imports import FILES
from support.text_task import ROOT

from grpo_jax.config.command_line import find_config, load_config, parse
from grpo_jax.config.fields import ConfigField, Section, build, differences, identity, to_yaml, walk
from grpo_jax.config.named import load_module, load_object
from grpo_jax.config.run import JUDGES, TASKS, Config, find_task, make_config
from grpo_jax.config.sections import PolicySection, RewardSection
from grpo_jax.tasks.text_task import Text

SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
NAMES = [*TASKS.kinds]
OWN_TASK, OWN_JUDGE = ROOT / "examples" / "own_task" / "task.py", ROOT / "examples" / "own_judge" / "brightness.py"


JUDGE_CLASSES = [JUDGES.class_of(name) for name in JUDGES.kinds]
CLASSES = [Config, *map(find_task, NAMES), *JUDGE_CLASSES]
SECTIONS = list(dict.fromkeys(field.about for kind in CLASSES for field in walk(kind, {})))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_its_help(section):
    fields = [field for field in walk(section, {}) if field.about is section and field.inner is None]
    assert all(field.info.description.endswith((".", ".)")) for field in fields)


MOST = 220
"""Every field is a line that users read and a case that runs must hold."""


def sections(kind=Section):
    """Every section of the packages: those of runs, tasks, judges, pools, retrieval."""
    for inner in kind.__subclasses__():
        yield from (inner, *sections(inner))


def test_there_are_few_fields():
    """Each counts where it is defined, once; what holds a section counts by the section's fields."""
    for name in FILES:
        if name.startswith(("grpo_jax.config", "grpo_jax.tasks", "bridges.judges")):
            load_module(name)
    kinds = {kind for kind in sections() if kind.__module__ in FILES}
    own = [(kind, name) for kind in kinds for name in kind.__annotations__ if name in kind.model_fields]
    fields = [ConfigField("", kind, name, kind.model_fields[name], None) for kind, name in own]
    leaves = [field for field in fields if field.inner is None and field.marked is None]
    assert len(kinds) > 30 and len(leaves) <= MOST, len(leaves)


def same_again(config, folder):
    """Through plain values, YAML and a file, by Python and by the command."""
    assert build(Config, config.model_dump()) == config
    assert make_config(yaml.safe_load(to_yaml(config))) == config
    (folder / "config.yaml").write_text(to_yaml(config))
    assert load_config(folder / "config.yaml") == config
    assert parse([f"--config={folder / 'config.yaml'}"]) == config


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_is_read_and_written(name, tmp_path):
    config = load_config(find_config(name))
    assert name.startswith((config.model_dump()["task"]["kind"], "prompt_joint"))
    same_again(config, tmp_path)
    header = find_config(name).read_text().splitlines()[:12]
    assert any("python -m grpo_jax.train" in line for line in header)
    assert any("Hardware" in line for line in header)


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_of_a_task_are_a_config(name, tmp_path):
    same_again(make_config(task=name), tmp_path)


def test_anyones_task_and_judge_are_named_by_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    judge = {"kind": "examples/own_judge/brightness.py:Brightness", "red": 0.5}
    config = make_config(task={"kind": "examples/own_task/task.py:Countdown"}, judges={"brightness": judge})
    assert type(config.task).__name__ == "Countdown" and config.judges["brightness"].red == 0.5
    assert "calculator" in config.judges  # of the task's own defaults
    monkeypatch.chdir(tmp_path)  # the names that are saved do not depend on where one stands
    saved = config.model_dump()
    assert saved["task"]["kind"] == f"{OWN_TASK}:Countdown"
    assert saved["judges"]["brightness"] == {"kind": f"{OWN_JUDGE}:Brightness", "pool": None, "red": 0.5}
    same_again(config, tmp_path)


def test_a_file_that_changed_is_read_anew_even_at_the_same_age(tmp_path):
    file = tmp_path / "mine.py"
    for value in (1.0, 2.0):
        file.write_text(f"def score(completions):\n    return [{value}]\n")
        os.utime(file, (10**9, 10**9))
        score = load_object(f"{file}:score", "reward")
        assert score(["a"]) == [value] and load_object(f"{file}:score", "reward") is score


def test_objects_of_python_stand_in_their_places():
    config = Config(task=Text(), policy=PolicySection(path="x"), rewards=[RewardSection(name="m:f")])
    fields = {"environment": "", "pictures": False, "seeds": 1024}
    assert config.model_dump()["task"] == {"kind": "text", **fields}
    same = make_config(task="text", policy=PolicySection(path="x"), rewards=[RewardSection(name="m:f")])
    assert same.policy == config.policy and same.rewards == config.rewards
    assert same.sampling.max_new_tokens == 128 != config.sampling.max_new_tokens  # a task's defaults are make_config's


def test_a_config_keeps_what_it_was_given():
    """A loop over settings may change and reuse its dictionaries."""
    options = {"patterns": ["a"]}
    given = {"task": "text", "policy": {"path": "x"}, "rewards": [{"name": "m:f", "options": options}]}
    first = make_config(given)
    options["patterns"].append("b")
    second = make_config(given)
    assert [config.rewards[0].options["patterns"] for config in (first, second)] == [["a"], ["a", "b"]]


def test_a_difference_is_told_with_both_values():
    saved = identity(make_config(task="text", seed=1, judges={"a": "open_clip"}))
    now = make_config(task="text", seed=2, judges={"a": {"kind": "open_clip", "dtype": "bfloat16"}, "b": "open_clip"})
    told = differences(saved, now)
    assert told[:2] == ["seed: 1 → 2", "judges.a.dtype: float32 → bfloat16"]
    assert "judges.b.kind: None → open_clip" in told
