"""Rewards that take chat messages: TRL's functions for conversational data as they are (runs: test_asked)."""

import numpy as np
import pytest

from grpo_jax.config import RewardSection, make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.environment import make_score
from grpo_jax.rollout.prompts import read_prompt
from grpo_jax.rollout.reward_registry import TaskRewards, bind, resolve_rewards
from grpo_jax.rollout.rewards import with_arguments
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
    with pytest.raises(UserError, match=r"rewards.own: messages is for rewards of your own"):
        resolve_rewards(sections, (), source, ())
