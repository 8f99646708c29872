"""The package's rewards on typical completions; a simpler rule would fail each case."""

import inspect

import numpy as np
import pytest
from support.text_task import ROOT

from grpo_jax import rewards
from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.reward_registry import TaskRewards, bind, resolve_rewards
from grpo_jax.rollout.rewards import RewardError, collect_rewards, with_arguments

ALL = [one for one in vars(rewards).values() if inspect.isfunction(one) and one.__module__ == rewards.__name__]
PUBLIC = [one for one in ALL if not one.__name__.startswith("_")]


def values(reward, texts, answer=None, **options):
    """As a run calls it: with all that there is, options fixed; chat messages give the same."""
    columns = {} if answer is None else {"answer": answer}
    columns |= {"completion_ids": [list(range(len(text.split()) + 1)) for text in texts], "topic": [None] * len(texts)}
    bound = with_arguments(reward, options)
    found = collect_rewards({"mine": bound}, ["?"] * len(texts), texts, columns, 1)
    talks = [[{"role": "assistant", "content": text}] for text in texts]
    np.testing.assert_array_equal(found, collect_rewards({"mine": bound}, ["?"] * len(texts), talks, columns, 1))
    return [None if value != value else value for value in found.ravel().tolist()]


def test_each_shipped_reward_is_documented():
    page = (ROOT / "docs" / "rewards.md").read_text()
    assert len(PUBLIC) == 6
    for reward in PUBLIC:
        options = [p.name for p in inspect.signature(reward).parameters.values() if p.kind is p.KEYWORD_ONLY]
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{reward.__name__}`")]
        assert all(f"`{option}" in row for option in options), reward.__name__
        assert list(inspect.signature(reward).parameters)[:2] == ["prompts", "completions"]


@pytest.mark.parametrize(("options", "value"), [({}, 1.0), ({"tag": "plan"}, 0.0)])
def test_a_column_with_the_name_of_an_option_is_no_option(options, value):
    """Such as the kind of a problem."""
    sections = [RewardSection(name="grpo_jax.rewards:think_format", options=options)]
    (found,) = resolve_rewards(sections, [], TaskRewards(), []).maximised
    columns = {"tag": ["algebra"], "opened": [False], "answer_tag": [None]}
    text = "<think>a</think> 4"
    assert collect_rewards({"mine": bind(found, {})}, ["?"], [text], columns, 1) == [[[value]]]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("It is 42.", "42"),
        ("First 7, then 42", "<<6*7=42>> so ... #### 42"),
        ("1,234,567 apples", "1234567"),
        ("$1,234.50", "1234.5"),
        ("sum: 1,2,3", "3"),
        ("x = -0.5", "-.5"),
        ("−7 degrees", "-7"),
        ("It is –7 °C", "- 7"),
        (r"\boxed{- 7}", "-{7}"),
        (r"\boxed{-\$1,000}", "a loss: -$1,000"),
        (r"\boxed{-7}", r"x = - \frac{14}{2}"),
        ("46-4", "4"),  # a minus between two numbers is no sign
        ("1e3", "1000"),
        (r"so \boxed{12} as shown in 3 steps", "12"),
        (r"\boxed{1} no, \boxed{x = \text{about } 2} (see 9)", r"Therefore \boxed{2}."),
        (r"\boxed{12{,}000}", "12000"),
        (r"\boxed{12\,000 \text{ m}}", "12000 cm"),
        (r"It is $\frac{3}{4}$.", "3/4"),
        (r"\boxed{\dfrac34}", "0.75"),
        (r"\boxed{-\frac{1}{2}}", r"$x = -1/2$"),
        ("so 3/4 of them", r"\frac{3}{4}"),
        ("on 3/4/2020", "2020"),
        (r"\boxed{30^\circ}", "30°C"),
        (r"\boxed{50\%}", "50 %"),
        ("18 a day", "$18 a day"),
        ("10000000000000000000000000000001", "10000000000000000000000000000001"),
    ],
)
def test_the_number_of_an_answer_is_found(text, right):
    assert values(rewards.numeric_answer, [text], [right]) == [1.0]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("42 or 43", "42"),
        ("no idea", "42"),
        (r"\boxed{\frac{3}{4}}", "4"),  # its last number is no answer
        (r"\boxed{unknown} 42", "42"),
        (r"\boxed{4}", r"\frac{3}{4}"),
        ("2", "1/2"),
        ("2", "- 2"),
        (r"\boxed{-\$2}", "2"),
        ("1/0", "0"),
        (r"\boxed{5\sqrt{2}}", "2"),
        (r"\boxed{1\frac{1}{2}}", "0.5"),
        (r"\boxed{2\pi}", "2"),
        (r"\boxed{x - 5}", "5"),
        (r"\boxed{\pm 5}", "5"),
        ("9" * 5000, "9"),
        ("1000001", "1000000"),
        ("10000000000000000000000000000002", "10000000000000000000000000000001"),
    ],
)
def test_another_number_is_wrong(text, right):
    assert values(rewards.numeric_answer, [text], [right]) == [0.0]


def test_a_number_may_be_off_by_the_tolerance():
    texts = ["101", "102.1", "0.015", "0.03"]
    assert values(rewards.numeric_answer, texts, [100, 100, 0, 0], tolerance=0.02) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "answer", ["x = y", r"5\sqrt{2}", "2x", "(3, 4)", "3,14", "6*7 = 42", r"\pm 5", "1/0", "5k", "1 1/2", ""]
)
def test_an_answer_without_a_number_is_an_error_and_none_is_no_reward(answer):
    assert values(rewards.numeric_answer, ["1", "1", "1"], [None, "1", float("nan")]) == [None, 1.0, None]
    rewards.numeric_answer.check_row({"answer": float("nan")})  # as pandas has it
    with pytest.raises(RewardError, match=r"the answer '.*' holds no single number; exact_match compares texts"):
        values(rewards.numeric_answer, ["2"], [answer])


def test_boxes_without_an_end_take_no_time_that_grows_with_their_number_squared():
    """A policy may write anything; 200,000 openings took hours where each looked for its end."""
    assert values(rewards.numeric_answer, ["\\boxed{" * 200_000 + "3"], ["3"]) == [1.0]


def test_an_exact_match_is_the_answer_and_nothing_else():
    texts = [" Paris\n", "paris", "Paris, France", "the  Seine"]
    right = ["Paris", "Paris", "Paris", ["The Seine", "the Seine"]]
    assert values(rewards.exact_match, texts, right) == [1.0, 0.0, 0.0, 1.0]
    assert values(rewards.exact_match, texts, right, ignore_case=True) == [1.0, 1.0, 0.0, 1.0]
    assert values(rewards.exact_match, ["nan", "no"], [float("nan"), "no"]) == [None, 1.0]
    whole = ["42", "42.0", "42", "4.5"]  # a column of whole numbers is one of floats in pandas if a value is missing
    assert values(rewards.exact_match, whole, [42.0, 42.0, [1.0, 42.0], 4.5]) == [1.0] * 4
    tagged = ["<answer>no</answer> <answer>\n7 </answer>", "7", "<answer>no</answer>"]
    assert values(rewards.exact_match, tagged, [7, 7, None], pattern="<answer>(.*?)</answer>") == [1.0, 0.0, None]
    with pytest.raises(RewardError, match=r"pattern must have a group \(…\) around the answer, got 'answer'"):
        values(rewards.exact_match, ["7"], ["7"], pattern="answer")


def test_a_form_is_that_of_the_whole_completion():
    texts = ["Answer: 4\n", "So\nAnswer: 4", "Answer: four"]
    assert values(rewards.regex_format, texts, pattern=r"Answer: \d+") == [1.0, 0.0, 0.0]
    assert values(rewards.regex_format, texts, pattern=r"Answer: \d+", whole=False) == [1.0, 1.0, 0.0]
    assert values(rewards.regex_format, texts, pattern=r"So.Answer.*") == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "options", "value"),
    [
        ("<think>a\nb</think>\n4", {}, 1.0),
        ("<think>a</think>", {}, 0.0),  # nothing is said
        ("<think> </think> 4", {}, 0.0),  # nothing is thought
        ("so <think>a</think> 4", {}, 0.0),
        ("<think>a<think>b</think>4", {}, 0.0),
        ("<think>a</think>4</think>", {}, 0.0),
        ("a</think> 4", {"opened": True}, 1.0),
        ("<think>a</think> 4", {"opened": True}, 0.0),
        ("<plan>a</plan> <say>4</say>", {"tag": "plan", "answer_tag": "say"}, 1.0),
        ("<plan>a</plan> <say>4</say> more", {"tag": "plan", "answer_tag": "say"}, 0.0),
        ("<plan>a</plan> <say>4</say><say>5</say>", {"tag": "plan", "answer_tag": "say"}, 0.0),
        ("<plan>a</plan> 4", {"tag": "plan", "answer_tag": "say"}, 0.0),
    ],
)
def test_thinking_comes_first_and_ends(text, options, value):
    assert values(rewards.think_format, [text], **options) == [value]


def test_lengths_are_counted_in_the_configured_unit():
    texts = ["", "a b", "a b c d", "a b c d e f g h i"]
    assert values(rewards.length_penalty, texts, start=2, end=6) == [0.0, 0.0, -0.5, -1.0]
    assert values(rewards.length_penalty, texts, start=2, end=6, unit="tokens") == [0.0, -0.25, -0.75, -1.0]


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        (rewards.length_penalty, {"start": 3, "end": 3}, "start must be at least 0 and end above it, got 3 and 3"),
        (rewards.length_penalty, {"start": 0, "end": 3, "unit": "lines"}, 'must be "characters", "words" or "tokens"'),
    ],
)
def test_options_that_mean_nothing_are_refused(reward, options, message):
    with pytest.raises(RewardError, match=message):
        values(reward, ["{}"], **options)
