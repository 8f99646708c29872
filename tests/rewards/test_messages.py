"""Rewards that take chat messages: TRL's functions for conversational data as they are (runs: test_asked)."""

import pytest

from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.environment import make_score
from grpo_jax.rollout.prompts import read_prompt
from grpo_jax.rollout.reward_registry import TaskRewards, resolve_rewards
from grpo_jax.rollout.rewards import with_arguments


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


def test_a_tasks_own_reward_takes_texts():
    source = TaskRewards({"own": lambda completions: [0.0]})
    sections = make_config(task="text", rewards=[{"name": "own", "messages": True}]).rewards
    with pytest.raises(UserError, match=r"rewards.own: messages is for rewards of your own"):
        resolve_rewards(sections, (), source, ())
