"""Arguments of rewards, chat messages too, and the ways to name rewards, by command and from Python."""

import functools
import importlib
import json
import re

import numpy as np
import pytest
from PIL import Image
from support.rollouts import single_turns
from support.text_task import SHORT, completions, rows, train_here

from grpo_jax.config.command_line import load_config, parse
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.models.hf.chat import Message
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import Episode, Observation, Turn
from grpo_jax.rollout.reward_registry import ResolvedReward, bind
from grpo_jax.rollout.rewards import ExtraColumns, RewardError, Score, collect_rewards
from grpo_jax.runs.python_input import from_python
from grpo_jax.train import main

OWN = """
import numpy as np

def seen(completions, completion_ids, trainer_state, log_metric, episodes):
    assert [len(episode.turns) for episode in episodes] == [1] * len(completions)
    log_metric("done", trainer_state.global_step)
    log_metric("of", trainer_state.max_steps)
    return [len(ids) for ids in completion_ids]

def noted(completions, log_extra):
    log_extra("first", [text[:1] or None for text in completions])
    log_extra("count", np.array([len(text) for text in completions]))
    log_extra("mixed", [len(text) if len(text) % 2 else [text] for text in completions])
    return [1.0] * len(completions)

def late(completions, trainer_state, **columns):
    assert "log_metric" not in columns
    return [trainer_state.global_step + 10 * trainer_state.evaluation] * len(completions)

# As TRL's documentation has them, but for what they count.
def format_reward(completions, **kwargs):
    return [len(completion[0]["content"]) for completion in completions]

async def asked(prompts, completions, wish, **kwargs):
    assert {completion[0]["role"] for completion in completions} == {"assistant"}
    assert "completion_messages" not in kwargs
    return [len(prompt) + prompt[-1]["content"].count(letter) for prompt, letter in zip(prompts, wish)]

def beside(completions, completion_messages, **kwargs):
    assert "prompt_messages" not in kwargs
    return [float(text == messages[0]["content"]) for text, messages in zip(completions, completion_messages)]

def spoil(completions, extra, *, words):
    words.append("more")
    for one in extra:
        one["seen"].append(len(words))
    return [len(one["seen"]) for one in extra]

def spared(completions, extra, **columns):
    return [len(one["seen"]) for one in extra]

def rare(completions, one_line_only):
    return [0.0 if value is None else 1.0 for value in one_line_only]

def same(prompts, completions):
    assert [type(prompt) for prompt in prompts] == [type(completion) for completion in completions]
    return [len(one) if isinstance(one, str) else 100 + len(one[0]["content"]) for one in completions]

def plain(prompts, completions, **kwargs):
    assert not {"prompt_messages", "completion_messages"} & kwargs.keys()
    return [len(text) for text in completions]
"""
# Whether each takes messages; None: as its prompts are.
TRL = {"format_reward": True, "asked": True, "beside": False, "plain": False, "same": None}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "asking.py"
    file.write_text(OWN)
    return file


@pytest.fixture(scope="module")
def finished(place, own, tmp_path_factory):
    """Two iterations over texts and conversations whose rewards are named in all ways that a config has."""
    length = {"name": "grpo_jax.rewards:length_penalty", "weight": 0.5}
    trl = [{"name": f"{own}:{name}", "messages": messages} for name, messages in TRL.items()]
    rewards = [
        f"{own}:seen",
        f"{own}:late",
        {"name": f"{own}:noted", "messages": False},
        {**length, "options": {"start": 0, "end": 100, "unit": "characters"}, "label": "typed"},
        {**length, "options": {"start": 0, "end": 3, "unit": "tokens"}, "label": "three"},
        {**length, "options": {"start": 0, "end": 6, "unit": "tokens"}, "label": "six", "condition_on": "three"},
        {"name": f"{own}:spoil", "options": {"words": ["a"]}},
        f"{own}:spared",
        f"{own}:rare",
        *trl,
    ]
    home = tmp_path_factory.mktemp("asked")
    lines = []
    for letter in "abcdefghijklmnop":
        # As many tokens as the prompts of rollout/test_files.py, whose run has the same programs
        talk = [{"role": "system", "content": "Sing well."}, {"role": "user", "content": f"{letter}{letter} 12"}]
        lines.append({"prompt": talk if letter < "i" else f"{letter} 12", "wish": letter})
        lines[-1]["extra"] = {"seen": [1, 2, 3]}
    lines[-1]["one_line_only"] = 1
    (home / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [f"--data.prompts={home / 'p.jsonl'}", "--rewards", json.dumps(rewards), "--training.max_steps=2"]
    assert train_here(place.config, home / "run", *words, *SHORT) == 0
    return home / "run"


@pytest.fixture(scope="module")
def table(finished):
    return completions(finished, 1)


def test_a_reward_gets_token_ids_and_trainer_state(finished):
    """And what it logs stands in the metrics of that iteration."""
    for step, row in enumerate(rows(finished)):
        assert (row["log/done"], row["log/of"]) == (step, 2)
        assert row["reward/seen/mean"] == pytest.approx(row["completion_tokens"])
        assert row["reward/late/mean"] == step
    evaluation = json.loads((finished / "summary.json").read_text())["evaluation"]
    assert evaluation["late"]["before"] == evaluation["late"]["after"] == 12  # as at the end, at any time
    assert evaluation["seen"]["after"] == pytest.approx(evaluation["completion_tokens"]["after"])


def test_columns_that_a_reward_logs_are_those_of_its_completions(table):
    texts = table["completion"]
    assert table["log/first"] == [text[:1] or None for text in texts]
    assert table["log/count"] == [len(text) for text in texts]
    assert table["log/mixed"] == [str(len(text) if len(text) % 2 else [text]) for text in texts]
    with pytest.raises(RewardError, match=r"mine: it raised ValueError: log_extra\('a'\) needs 2 values"):
        log = {"log_extra": ExtraColumns(2).log_extra}
        collect_rewards({"mine": lambda log_extra: log_extra("a", [1])}, ["p"] * 2, ["c"] * 2, log, 2)


def test_rewards_get_messages_or_texts_as_configured(table):
    lengths, chats = [len(text) for text in table["completion"]], [one[0] == one[1] for one in table["prompt"]]
    assert len({*chats}) == 2
    assert table["reward/format_reward"] == table["reward/plain"] == lengths
    assert table["reward/asked"] == [4.0 if chat else 2.0 for chat in chats]
    assert set(table["reward/beside"]) == {1.0}
    assert table["reward/same"] == [n + 100 * chat for n, chat in zip(lengths, chats, strict=True)]
    typed = [-len(text.strip()) / 100 for text in table["completion"]]
    np.testing.assert_allclose(table["reward/typed"], typed, rtol=1e-6)  # a reward that ships reads both


def test_the_messages_of_an_episode_are_all_its_turns():
    turns = (Turn("add", observation=Observation("2; 3", messages=("2", "3"))), Turn("It is 3."))
    talk = (Message("user", ("Add.",)),)
    heard = []
    resolved = ResolvedReward("mine", lambda completions: [heard.append(completions) or 1.0], messages=None)
    score = Score({"mine": bind(resolved, {})}, {}, missing=False, role="tool")
    score([Row(0, "Add.", messages=talk)], [[Episode(turns)]], None)
    spoken = [("assistant", "add"), ("tool", "2"), ("tool", "3"), ("assistant", "It is 3.")]
    assert heard == [[[{"role": role, "content": text} for role, text in spoken]]]


def test_a_reward_that_changes_its_columns_and_options_changes_no_other_input(finished):
    """Neither another reward's, nor another completion's of the group, nor those of later calls."""
    for step in (1, 2):
        table = completions(finished, step)
        assert set(table["reward/spoil"]) == {4.0} and set(table["reward/spared"]) == {3.0}
    (section,) = [one for one in load_config(finished / "config.yaml").rewards if one.called == "spoil"]
    assert section.options == {"words": ["a"]}


def test_texts_that_the_policy_did_not_write_have_tokens_too():
    """Prompts as they are, and an oracle's texts, are judged by the same rewards."""
    score = Score({"n": lambda completion_ids: list(map(len, completion_ids))}, {}, missing=False, tokenize=list)
    rows = [Row(0, "a"), Row(1, "b")]
    rewards, _ = score(rows, single_turns([["ab"], [""]]), None)
    assert rewards.ravel().tolist() == [2, 0]
    rewards, _ = score(rows, single_turns([["ab"], [""]]), None, tokens=[[[7, 8, 9]], [[7]]])
    assert rewards.ravel().tolist() == [3, 1]
    kept = single_turns([["x", "abc"]])  # a group keeps the unchanged prompt
    rewards, _ = score([Row(0, "abc")], kept, None, tokens=[[[7], []]])
    assert rewards.ravel().tolist() == [1, 3]


def test_a_column_is_none_for_a_row_without_a_value():
    got = {}
    score = Score({"n": lambda **columns: got.update(columns) or [0.0] * 4}, {}, missing=False)
    score([Row(0, "a", {"x": 1}), Row(1, "b", {"y": 2})], single_turns([["c", "c"]] * 2), None)
    assert (got["prompts"], got["x"], got["y"]) == ([*"aabb"], [1, 1, None, None], [None, None, 2, 2])


def test_a_column_that_no_row_of_a_batch_has_is_none(finished):
    values = [value for step in (1, 2) for value in completions(finished, step)["reward/rare"]]
    assert 0.0 in values and {*values} <= {0.0, 1.0}


def test_two_rewards_of_one_function_have_a_label_each(finished, table):
    lengths = np.array(table["length"])
    for label, end in (("three", 3), ("six", 6)):
        np.testing.assert_allclose(table[f"reward/{label}"], -np.minimum(1, lengths / end), rtol=1e-6)
    saved = load_config(finished / "config.yaml")
    assert [reward.called for reward in saved.rewards][3:6] == ["typed", "three", "six"]
    assert saved.rewards[5].condition_on == "three"


def test_rewards_are_named_by_plain_texts():
    expected = parse(["--task=text", '--rewards=[{"name": "a.py:f"}, {"name": "b:g"}]']).rewards
    for words in (["--rewards", "a.py:f", "b:g"], ["--rewards=a.py:f, b:g"], ["--rewards=[a.py:f, b:g]"]):
        assert parse(["--task=text", *words, "--seed=1"]).rewards == expected
    assert make_config(task="text", rewards=["a.py:f", "b:g"]).rewards == expected
    assert make_config(task="text", rewards="b:g").model_dump()["rewards"][0]["name"] == "b:g"


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (
            ["{folder}"],
            "rewards: {folder} is a folder: a reward model is a judge, --judges.NAME sequence_classification",
        ),
        (["{own}:seen", "{own}:seen"], "rewards: expected each reward under another name .*give one a label"),
        ([{"name": "{own}:seen", "options": {"trainer_state": 1}}], "expected arguments of the reward .it has none."),
    ],
)
def test_a_bad_reward_is_one_line(place, own, tmp_path, capsys, rewards, message):
    """Before the policy's weights are read."""
    words = json.dumps(rewards).replace("{own}", str(own)).replace("{folder}", str(tmp_path))
    (tmp_path / "config.json").write_text("no JSON")
    config = ["--config", str(place.config), "--policy.path", str(tmp_path)]
    assert main([*config, "--run_dir", str(tmp_path / "run"), "--rewards", words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message.replace("{folder}", re.escape(str(tmp_path))), error), error


def test_functions_of_python_are_named_by_themselves_or_by_their_keys():
    def scaled(completions, *, by, **columns):
        return [by * len(text) for text in completions]

    def labels(rewards):
        return [reward.called for reward in from_python(make_config(task="text"), None, rewards).config.rewards]

    twice = functools.partial(scaled, by=2)
    assert labels([scaled, len]) == ["scaled", "len"] and labels(scaled) == ["scaled"]
    assert labels({"a": twice, "b": lambda completions: [0.0]}) == ["a", "b"]
    for same in ([twice, functools.partial(scaled, by=3)], [lambda: 1, lambda: 2]):
        with pytest.raises(UserError, match=r"each of another name \(or {'name': function}\), got"):
            labels(same)


def test_a_function_under_another_name_is_found_again(own, monkeypatch):
    monkeypatch.syspath_prepend(own.parent)
    asking = importlib.import_module("asking")
    path = f"{own.resolve()}:late"
    (section,) = from_python(make_config(task="text"), None, {"mine": asking.late}).config.rewards
    assert (section.name, section.label, section.called) == (path, "mine", "mine")
    config = make_config(task="text", rewards=[{"name": "x:f", "label": "mine", "weight": 2.0}])
    (section,) = from_python(config, None, {"mine": asking.late}).config.rewards
    assert (section.name, section.called, section.weight) == (path, "mine", 2.0)


def test_a_reward_that_draws_on_pictures_changes_no_others():
    """Torch's, through NumPy's view too, and Pillow's, which a group shares."""
    torch, count = pytest.importorskip("torch"), 4

    def draw(completions, images, picture):
        images.mul_(0)
        images.numpy()[:] += 2
        picture[0].paste((9, 9, 9), (0, 0, 1, 1))
        return [float(one.getpixel((0, 0))[0]) for one in picture]

    def look(completions, images, picture):
        return [float(one.mean()) + other.getpixel((0, 0))[0] for one, other in zip(images, picture, strict=True)]

    shown = {"images": torch.ones(count, 3, 2, 2), "picture": [Image.new("RGB", (2, 2))] * count}
    rewards = {"draw": draw, "look": look}
    found = collect_rewards(rewards, ["go"] * count, ["gone"] * count, shown, count)
    assert found[0].T.tolist() == [[9, 0, 0, 0], [1, 1, 1, 1]]
    assert shown["images"].mean() == 1 and shown["picture"][0].getpixel((0, 0)) == (0, 0, 0)


def test_an_array_of_lists_is_copied_with_them():
    """As tables have them: a column of lists is an array of objects."""

    def grow(completions, facts):
        for each in facts:
            each[0].append(1)
        return [float(len(each[0])) for each in facts]

    facts = np.empty(1, object)
    facts[0] = [7]
    found = collect_rewards({"one": grow, "two": grow}, ["go"] * 2, ["gone"] * 2, {"facts": [facts] * 2}, 2)
    assert found.tolist() == [[[2, 2], [2, 2]]] and facts[0] == [7]
