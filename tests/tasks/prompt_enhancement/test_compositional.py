"""Compositional prompts: every kind in every split, disjoint combinations, matching questions."""

import gzip
import re

import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.prompts import load_prompts
from grpo_jax.tasks.prompt_enhancement_task import compositional_records
from grpo_jax.tasks.task import TaskSetup
from scripts import compositional
from scripts.compositional import COLOURS, KINDS, NUMBERS, OBJECTS, TAGS, UNDETECTED, split_of, wishes

SPLITS = ("train", "validation", "test")
ALL = {split: compositional_records(split, 10**6) for split in SPLITS}


def test_splits_share_no_prompt_and_no_combination():
    combinations = {split: set() for split in SPLITS}
    for wish in wishes():
        if (split := split_of(wish)) is not None:
            combinations[split].update(wish.combinations)
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not combinations[one] & combinations[other]
        assert not {row["prompt"] for row in ALL[one]} & {row["prompt"] for row in ALL[other]}
    assert min(map(len, combinations.values())) > 100


def test_the_file_is_what_the_script_makes():
    assert gzip.decompress(compositional.TARGET.read_bytes()).decode() == compositional.text()


@pytest.mark.parametrize("split", SPLITS)
def test_first_prompts_are_of_all_kinds(split):
    few = compositional_records(split, 12)
    assert few == ALL[split][:12] == compositional_records(split, 12)
    expected = set(KINDS) if split == "train" else set(KINDS) - {"object"}
    assert {row["kind"] for row in few} == expected
    assert len({row["prompt"] for row in ALL[split]}) == len(ALL[split]) > 200


@pytest.mark.parametrize("split", SPLITS)
def test_questions_name_what_is_asked_for(split):
    for row in ALL[split]:
        words, asked = row["prompt"].split(), " ".join(row["questions"])
        named = [name for name in OBJECTS if name in words or OBJECTS[name] in words]
        assert named and all(name in asked or OBJECTS[name] in asked for name in named), row
        assert all(word in asked for word in words if word in (*COLOURS, "two", "three", "four", "above")), row
        assert all(question.endswith("?") for question in row["questions"]), row


def described(row):
    """The prompt of GenEval's metadata."""
    include, names = row["include"], [f"{item.get('color', '')} {item['class']}".strip() for item in row["include"]]
    names = [f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in names]
    if row["kind"] == "count":
        return f"{NUMBERS[include[0]['count']]} {OBJECTS[include[0]['class']]}"
    if row["kind"] == "place":
        where, other = include[1]["position"]
        return f"{names[1]} {'to the ' * where.endswith('of')}{where} {names[other]}"
    return " and ".join(names)


@pytest.mark.parametrize("split", SPLITS)
def test_metadata_are_those_of_geneval(split):
    detected = [row for row in ALL[split] if row["include"]]
    assert len(detected) > 0.7 * len(ALL[split]) and {row["tag"] for row in detected} <= {*TAGS.values()}
    assert [described(row) for row in detected] == [row["prompt"] for row in detected]
    undetected = {word for name in UNDETECTED for word in (name, OBJECTS[name])}
    for row in ALL[split]:
        assert bool(row["include"]) == undetected.isdisjoint(row["prompt"].split()), row
        assert bool(row["exclude"]) == bool(row["kind"] == "count" and row["include"])


def test_the_real_configs_have_built_in_and_compositional_prompts_in_turn():
    """The built-in ones split as they are by themselves, and no prompt stands in two parts."""
    shipped = parse(["--config", "prompt_enhancement_sd3"])
    prompts = shipped.task.load(TaskSetup(shipped, None, print)).prompts
    alone = load_prompts("builtin", held_out=shipped.data.held_out)
    for split, part, builtin in zip(SPLITS, prompts, alone, strict=True):
        assert [row.prompt for row in part[::2]] == [row.prompt for row in builtin]
        assert [row.prompt for row in part[1::2]] == [row["prompt"] for row in ALL[split][: len(builtin)]]
    rows = [row for part in prompts for row in part]
    names = ALL["train"][0].keys() - {"prompt"}
    assert all(names <= row.columns.keys() for row in rows)  # so a chunk of any rows has each reward's arguments
    assert len({row.prompt for row in rows}) == len({row.id for row in rows}) == len(rows) == 240


@pytest.mark.parametrize("prompts", ["compositional", "miniature", "builtin+compositional"])
@pytest.mark.parametrize("field", [{"validation": "more.jsonl"}, {"test": "more.jsonl"}, {"columns": {"prompt": "q"}}])
def test_what_is_made_is_read_from_nowhere(prompts, field):
    config = make_config(task="prompt_enhancement", data={"prompts": prompts, **field})
    (name,) = field
    with pytest.raises(UserError, match=f'data.{name}: expected nothing with data.prompts "{re.escape(prompts)}"'):
        config.task.load(TaskSetup(config, None, print))
