"""Rewards that take chat messages: TRL's functions for conversational data as they are, in all ways they run."""

import json
import re

import numpy as np
import pyarrow.parquet
import pytest
import yaml
from support.text_task import train_here

from grpo_jax import make_config, run
from grpo_jax.config import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.binding import TaskRewards, bind, resolve_rewards
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.environment import make_score
from grpo_jax.rollout.prompts import read_prompt
from grpo_jax.rollout.rewards import RewardError, collect_rewards, with_arguments
from grpo_jax.tasks.recommendation.rewards import where_ranked

# As TRL's documentation has them, but for what they count.
TRL = """
def format_reward(completions, **kwargs):
    return [len(completion[0]["content"]) for completion in completions]

async def asked(prompts, completions, wish, **kwargs):
    assert {completion[0]["role"] for completion in completions} == {"assistant"}
    assert "completion_messages" not in kwargs
    return [len(prompt) + prompt[-1]["content"].count(letter) for prompt, letter in zip(prompts, wish)]

def beside(completions, completion_messages, **kwargs):
    assert "prompt_messages" not in kwargs
    return [float(text == messages[0]["content"]) for text, messages in zip(completions, completion_messages)]

def plain(prompts, completions, **kwargs):
    assert not {"prompt_messages", "completion_messages"} & kwargs.keys()
    return [len(text) for text in completions]
"""


def test_a_run_gives_messages_to_rewards_that_want_them(place, tmp_path):
    """Those that do not get texts; in the run's process and in one of their own."""
    file = tmp_path / "trl_rewards.py"
    file.write_text(TRL)
    wanted = {"format_reward": True, "asked": True, "beside": False, "plain": False}
    rewards = [{"name": f"{file}:{name}", "messages": messages} for name, messages in wanted.items()]
    rewards += [{**reward, "isolated": True, "label": f"apart_{reward['name'].split(':')[1]}"} for reward in rewards]
    lines = []
    for letter in "abcdefghijklmnop":
        talk = [{"role": "system", "content": "Sing."}, {"role": "user", "content": f"{letter}{letter} 12"}]
        lines.append({"prompt": talk if letter < "i" else f"{letter} 12", "wish": letter})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    short = {"training.max_steps": 1, "training.inner_epochs": 1, "training.minibatches": 1, "evaluation.every": 0}
    short |= {"training.prompts_per_batch": 8, "data.held_out": 0, "data.prompts": tmp_path / "p.jsonl"}
    words = [f"--{name}={value}" for name, value in short.items()]
    assert train_here(place.config, tmp_path / "run", *words, "--rewards", json.dumps(rewards)) == 0
    table = pyarrow.parquet.read_table(tmp_path / "run" / "completions" / "step_000001.parquet").to_pydict()
    lengths, chats = [len(text) for text in table["completion"]], [one[0] == one[1] for one in table["prompt"]]
    assert len({*chats}) == 2
    for home in ("reward/", "reward/apart_"):
        assert table[f"{home}format_reward"] == table[f"{home}plain"] == lengths
        assert table[f"{home}asked"] == [4.0 if chat else 2.0 for chat in chats]
        assert set(table[f"{home}beside"]) == {1.0}


def test_pictures_are_parts_of_prompt_messages():
    seen = []

    def look(prompts, completions):
        seen.extend(prompts)
        return [0.0] * len(completions)

    asked = read_prompt([{"role": "user", "content": [{"type": "text", "text": "what?"}]}], [b"x"], None)
    rows = [Row(0, asked.text, pictures=(), messages=asked.messages), Row(1, "plain")]
    make_score({"look": with_arguments(look, {}, messages=True)}, {}, missing=False)(rows, [["x"], ["y"]], None)
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    assert seen == [[{"role": "user", "content": parts}], [{"role": "user", "content": "plain"}]]


def test_tokens_are_made_only_where_a_reward_gets_them():
    made = []

    def tokens():
        made.append(1)
        return [[[7, 8]]]

    def never(text):
        raise AssertionError(text)

    score = make_score({"n": lambda prompts, completions: [1]}, {}, missing=False, tokenize=never)
    assert score([Row(0, "a")], [["b"]], None)[0].item() == 1 and score([Row(0, "a")], [["b"]], None, tokens=tokens)
    assert not made
    for reward in (lambda completion_ids: [len(completion_ids[0])], lambda **k: [len(k["completion_ids"][0])]):
        score = make_score({"n": reward}, {}, missing=False, tokenize=never)
        assert score([Row(0, "a")], [["b"]], None, tokens=tokens)[0].item() == 2


def test_a_function_of_python_that_takes_texts_for_messages_is_told_how_it_gets_them(place, tmp_path):
    """TRL gives messages wherever prompts are; here a reward that reads texts reads those of conversations too."""

    def fmt(prompts, completions, **kwargs):
        return [
            len(prompt[-1]["content"]) + len(completion[0]["content"])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    talks = [{"prompt": [{"role": "user", "content": f"{letter} tree"}]} for letter in "abcd"]
    values = yaml.safe_load(place.config.read_text())
    del values["rewards"]
    values["training"] = {"prompts_per_batch": 4, "max_steps": 1, "save_every": 0}
    values |= {"algorithm": {}, "data": {"held_out": 0, "max_prompt_tokens": 64}, "evaluation": {"every": 0}}
    told = "(in Python make_config(…, rewards=[{'name': 'fmt', 'messages': True}]) beside the function)"
    with pytest.raises(UserError, match=f"set messages: true in its section of rewards {re.escape(told)}") as caught:
        run(make_config(values, run_dir=str(tmp_path / "texts")), prompts=talks, rewards=[fmt])
    assert "\n" not in str(caught.value)
    values["rewards"] = [{"name": "fmt", "messages": True}]
    assert run(make_config(values, run_dir=str(tmp_path / "talks")), prompts=talks, rewards=[fmt])["iterations"] == 1


TAKEN = """
async def get(completions, **kwargs):
    return [completion[-1].get("content") for completion in completions]

def first(completions, **kwargs):
    return [completion[0]["content"] for completion in completions]

def other(completions, **kwargs):
    return [int("no number") for _ in completions]

def knows(completions, completion_messages):
    return [completion[0]["content"] for completion in completions]
"""


@pytest.mark.parametrize("isolated", [False, True])
def test_only_texts_taken_for_messages_are_told_of_them(tmp_path, isolated):
    file = tmp_path / "taken.py"
    file.write_text(TAKEN)
    for name, helped in {"get": True, "first": True, "other": False, "knows": False}.items():
        section = RewardSection(f"{file}:{name}", isolated=isolated)
        (found,) = resolve_rewards([section], (), TaskRewards(), ()).maximised
        columns = {"completion_messages": [[{"role": "assistant", "content": "text"}]]}
        with pytest.raises(RewardError, match=f"reward {name}: it raised") as caught:
            collect_rewards([bind(found, {})], [name], ["a"], ["text"], columns, 1)
        assert ("messages: true" in str(caught.value)) == helped


def test_rewards_that_a_task_adapts_take_messages():
    """The task's adapter is called with texts and columns, and the reward within it with messages."""

    def mine(completions):
        return [len(completion[0]["content"]) for completion in completions]

    section = RewardSection("<given>:mine", messages=True)
    (found,) = resolve_rewards([section], (), TaskRewards(adapt=where_ranked), (), {"mine": mine}).maximised
    score = make_score({"mine": bind(found, {})}, {}, missing=False)
    rows = [Row(0, "a", {"rank": 1.0}), Row(1, "b", {"rank": float("nan")})]
    values, _ = score(rows, [["x", "xy"], ["", "x"]], None)
    np.testing.assert_array_equal(values[..., 0], [[1, 2], [np.nan, np.nan]])


def test_a_tasks_own_reward_takes_texts():
    source = TaskRewards({"own": lambda completions: [0.0]})
    sections = make_config(task="text", rewards=[{"name": "own", "messages": True}]).rewards
    with pytest.raises(UserError, match=r"rewards.own.messages: expected false, the task's own rewards take texts"):
        resolve_rewards(sections, (), source, ())


def test_messages_are_no_names_for_columns():
    from grpo_jax.rollout.prompts import split_records

    with pytest.raises(UserError, match="column 'completion_messages' is a name the trainer itself"):
        split_records([{"prompt": "a", "completion_messages": 1}], held_out=0)
