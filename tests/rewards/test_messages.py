"""Rewards that take chat messages: TRL's functions for conversational data as they are (runs: test_asked)."""

import re

import numpy as np
import pytest

from grpo_jax.config import RewardSection, make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.environment import make_score
from grpo_jax.rollout.prompts import load_prompts, read_prompt
from grpo_jax.rollout.reward_registry import TaskRewards, bind, resolve_rewards
from grpo_jax.rollout.rewards import RewardError, collect_rewards, with_arguments
from grpo_jax.runs.python_input import from_python
from grpo_jax.tasks.recommendation.rewards import where_ranked


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


def test_a_function_of_python_that_takes_texts_for_messages_is_told_how_it_gets_them():
    """TRL gives messages wherever prompts are; here a reward that reads texts reads those of conversations too."""

    def fmt(prompts, completions, **kwargs):
        return [float(len(prompts[0][-1]["content"]) + len(text[0]["content"])) for text in completions]

    rows = load_prompts([{"prompt": [{"role": "user", "content": "a tree"}]}], held_out=0).train

    def judged(**rewards):
        resolved = from_python(make_config(task="text", **rewards), None, [fmt])
        (reward,) = resolve_rewards(resolved.config.rewards, (), TaskRewards(), (), resolved.rewards).maximised
        return make_score({"fmt": bind(reward, {})}, {}, missing=False)(rows, [["text"]], None)[0].item()

    told = "(in Python make_config(…, rewards=[{'name': 'fmt', 'messages': True}]) beside the function)"
    with pytest.raises(UserError, match=f"set messages: true in its section of rewards {re.escape(told)}") as caught:
        judged()
    assert "\n" not in str(caught.value)
    assert judged(rewards=[{"name": "fmt", "messages": True}]) == 10


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


def test_only_texts_taken_for_messages_are_told_of_them(tmp_path):
    file = tmp_path / "taken.py"
    file.write_text(TAKEN)
    for name, helped in {"get": True, "first": True, "other": False, "knows": False}.items():
        section = RewardSection(name=f"{file}:{name}")
        (found,) = resolve_rewards([section], (), TaskRewards(), ()).maximised
        columns = {"completion_messages": [[{"role": "assistant", "content": "text"}]]}
        with pytest.raises(RewardError, match=f"reward {name}: it raised") as caught:
            collect_rewards({name: bind(found, {})}, ["a"], ["text"], columns, 1)
        assert ("messages: true" in str(caught.value)) == helped


def test_rewards_that_a_task_adapts_take_messages():
    """The task's adapter is called with texts and columns, and the reward within it with messages."""

    def mine(completions):
        return [len(completion[0]["content"]) for completion in completions]

    section = RewardSection(name="<given>:mine", messages=True)
    (found,) = resolve_rewards([section], (), TaskRewards(adapt=where_ranked), (), {"mine": mine}).maximised
    score = make_score({"mine": bind(found, {})}, {}, missing=False)
    rows = [Row(0, "a", {"rank": 1.0}), Row(1, "b", {"rank": float("nan")})]
    values, _ = score(rows, [["x", "xy"], ["", "x"]], None)
    np.testing.assert_array_equal(values[..., 0], [[1, 2], [np.nan, np.nan]])


def test_a_tasks_own_reward_takes_texts():
    source = TaskRewards({"own": lambda completions: [0.0]})
    sections = make_config(task="text", rewards=[{"name": "own", "messages": True}]).rewards
    with pytest.raises(UserError, match=r"rewards.own: messages and group are for rewards of your own"):
        resolve_rewards(sections, (), source, ())
