"""A user's own rewards: found by import path, called flat, stacked, and never silently 0."""

import sys

import numpy as np
import pytest

from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.reward_registry import TaskRewards, bind, resolve_rewards
from grpo_jax.rollout.rewards import RewardError, collect_rewards
from grpo_jax.rollout.user_code import as_list

PROMPTS, TEXTS = ["1+1", "1+1", "2+3", "2+3"], ["2", "3", "5", "four"]


def load_reward(path):
    """The function that a config's reward of this name is."""
    (found,) = resolve_rewards([RewardSection(name=path)], [], TaskRewards(), ()).maximised
    return bind(found, {})


def call(function, *, columns=None, on_error="raise", names=("mine",)):
    functions = function if isinstance(function, list) else [function]
    rewards = dict(zip(names, functions, strict=True))
    return collect_rewards(rewards, PROMPTS, TEXTS, columns or {}, 2, on_error=on_error)


def test_fractions_survive_integer_values():
    """Integer buffers once truncated fractions."""
    np.testing.assert_array_equal(call(lambda completions: [1, 0.75, True, None])[..., 0], [[1, 0.75], [1, np.nan]])


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int32, object])
def test_what_is_masked_is_missing(kind):
    """Beneath a mask lies whatever was there before: an all-masked array once was 1.0 everywhere."""
    expected = [[1, np.nan], [np.nan, 3]]
    array = np.ma.masked_array(np.array([1, 1, 1, 3], kind), mask=[0, 1, 1, 0])
    for returned in (array, list(array), as_list(array, 4)):
        np.testing.assert_array_equal(call(lambda completions, given=returned: given)[..., 0], expected)
    assert np.isnan(call(lambda completions: np.ma.masked_all(4, kind))).all()
    unmasked = np.ma.masked_array([1.0, np.inf, np.inf, 3.0], mask=[0, 1, 0, 0])
    with pytest.raises(RewardError, match="returned inf for completion 2"):
        call(lambda completions: unmasked)


def test_mutating_rewards_do_not_disturb_each_other():
    def greedy(prompts, completions, **_):
        result = [float(len(text)) for text in completions]
        completions.clear()
        prompts.clear()
        return result

    rewards = call([greedy, lambda completions: [float(len(text)) for text in completions]], names=("a", "b"))
    np.testing.assert_array_equal(rewards[..., 0], rewards[..., 1])


def test_rewards_are_found_in_modules_and_files(tmp_path, monkeypatch):
    (tmp_path / "some_rewards.py").write_text("def f(**_):\n    return 'found'\nlimit = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load_reward("some_rewards:f")() == "found"
    assert load_reward("some_rewards.py:f")() == "found"
    assert load_reward("os.path:join").__wrapped__ is __import__("os").path.join
    sys.modules.pop("some_rewards")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("good.py:limit", "is a int, not a function"),
        ("needing.py:f", "needs the module surely_not_installed"),
    ],
)
def test_bad_import_paths_say_what_is_wrong(tmp_path, monkeypatch, path, message):
    (tmp_path / "good.py").write_text("def f(**_):\n    return []\nlimit = 3\n")
    (tmp_path / "needing.py").write_text("import surely_not_installed\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        load_reward(path)
    assert "\n" not in str(error.value)
