"""A run reports its objective and its computations: best, total, improvement, charts, seconds.

A judge that turns during the run: from the third validation on, every completion earns much of the easy reward
without the hard one that it waits for. One process dies after three iterations and another goes on.
"""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from support.rollouts import rollout_of
from support.text_task import DONE, aged, completions, rows, train_values

from grpo_jax import PromptSet, evaluate, make_config, run
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.reward_registry import ResolvedRewards
from grpo_jax.runs.loading import check_measures
from grpo_jax.runs.metrics import require_names, turn_measures

JUDGE = f"""{DONE}
def easy(completions):
    if os.environ["JUDGE"] == f"raise:{{done()}}":
        raise RuntimeError("the reward is away")
    return [(5 if done() >= 2 else 1) + len(text) / 100 for text in completions]

def hard(completions):
    return [0.5 if done() >= 2 else 1.0 for _ in completions]

def same(completions):
    return [0.0] * len(completions)
"""

BY_PLACE = """
def by_place(values):
    def reward(completions):
        if len(completions) < 16:  # held-out prompts
            return values[:1] * len(completions)
        return [values[i % 4] for i in range(len(completions))]
    return reward

right = by_place([1.0, 1.0, 0.0, None])
brief = by_place([-5.0, -6.0, -2.0, None])
watched = by_place([3.0, 3.0, 3.0, 3.0])
"""


@pytest.fixture(scope="module")
def config(place, tmp_path_factory):
    """Three iterations' worth of what every run here shares: no reference, one update for each batch."""
    folder = tmp_path_factory.mktemp("turning")
    (folder / "judge.py").write_text(JUDGE)
    values = yaml.safe_load(place.config.read_text())
    values |= {"algorithm": {}, "optimizer": {"learning_rate": 0.01, "warmup_steps": 3}}
    values["training"] = {"prompts_per_batch": 4, "max_steps": 5, "save_every": 0}
    values["evaluation"] = {"every": 1, "samples": 0}
    values["rewards"] = [
        {"name": f"{folder / 'judge.py'}:easy", "condition_on": "hard", "threshold": 1.0},
        {"name": f"{folder / 'judge.py'}:hard", "weight": 2.0},
        {"name": f"{folder / 'judge.py'}:same"},
        {"name": "grpo_jax.rewards:length_penalty", "options": {"start": 1000, "end": 2000}},
    ]
    return values


@pytest.fixture(scope="module")
def turned(config, tmp_path_factory):
    """Killed by its judge after three iterations, as if they had taken a thousand seconds; then five in all."""
    folder = tmp_path_factory.mktemp("turned") / "run"
    train_values(config, folder, judge="raise:3", expected=2)
    aged(folder / "checkpoints" / "step_3", 1000.0)
    train_values(config, folder, "--resume")
    return folder


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_the_best_policy_is_not_the_one_that_games_the_easy_reward(turned):
    table = rows(turned)
    honest = [row["validation/easy"] + 2 * row["validation/hard"] for row in table[:2]]
    np.testing.assert_allclose([row["validation/score"] for row in table], [*honest, 1.0, 1.0, 1.0], rtol=1e-6)
    assert table[4]["validation/easy"] > 4 + table[1]["validation/easy"] / 2  # which would make up for the hard one
    best = summary_of(turned)["best"]
    assert best["iteration"] <= 2 and best["validation_score"] == max(honest)


def test_the_total_of_a_batch_has_its_conditions(turned):
    for row in rows(turned):
        found = completions(turned, row["step"])
        easy, hard = np.array(found["reward/easy"]), np.array(found["reward/hard"])
        total = np.where(hard >= 1, easy, 0) + 2 * hard
        assert row["reward/total/mean"] == pytest.approx(total.mean(), rel=1e-6)
        assert row["reward/total/std"] == pytest.approx(total.std(), abs=1e-6)
        assert row["reward/easy/mean"] == pytest.approx(easy.mean(), rel=1e-6)  # as judged


def test_the_improvement_is_that_of_the_maximised_total(turned, capsys):
    summary = summary_of(turned)
    easy, hard, total = (summary["evaluation"][name] for name in ("easy", "hard", "total"))
    assert easy["after"] > 5 > 2 > easy["before"]  # as judged
    before, after = easy["before"] + 2 * hard["before"], 0.0 + 2 * hard["after"]
    assert summary["baseline_reward"] == total["before"] == pytest.approx(before)
    assert summary["reward"] == total["after"] == pytest.approx(after)
    assert summary["improvement"] == pytest.approx(after - before)
    assert summary["relative_improvement"] == pytest.approx((after - before) / before)
    log = (turned / "train.log").read_text()
    assert f"improvement {after - before:+.3f}" in log
    assert re.search(r"total +\d\.\d+ +1\.000", log)
    assert log.count("warning: the reward same was 0 for every completion of the last 5 iterations") == 1
    assert log.count("the policy learns nothing from it") == 1  # not of the penalty, which no completion pays
    page = (turned / "report.html").read_text()
    assert '<p class="claim">total' in page


def test_evaluate_shows_the_total(turned, capsys, monkeypatch):
    monkeypatch.setenv("JUDGE_RUN", str(turned))
    monkeypatch.setenv("JUDGE", "work")
    assert summary_of(turned)["reward"] == pytest.approx(1.0)
    assert evaluate.main(["--run", str(turned)]) == 0
    assert re.search(r"^total +1\.0000$", capsys.readouterr().out, re.MULTILINE)


def test_conditions_missing_rewards_and_the_penalty_on_length(place, config, tmp_path):
    """What a run learns from, against a loop over its completions; over 8 tokens of 8 the penalty is -tokens / 8."""
    (tmp_path / "judge.py").write_text(BY_PLACE)
    values = config | {"rewards": [{"name": f"{tmp_path / 'judge.py'}:right"}]}
    values["rewards"] += [
        {"name": f"{tmp_path / 'judge.py'}:brief", "weight": 0.5, "condition_on": "right", "threshold": 1.0},
        {"name": f"{tmp_path / 'judge.py'}:watched", "weight": 0.0},
    ]
    values["algorithm"] = {"advantage": "batch", "advantage_eps": 0.5, "overlong_buffer": 8, "overlong_weight": 0.25}
    values["training"] = {"prompts_per_batch": 4, "max_steps": 1}
    folder = tmp_path / "run"
    train_values(values, folder)
    (row,), summary, found = rows(folder), summary_of(folder), completions(folder, 1)
    totals = []
    for number, length in enumerate(found["length"]):
        right, brief = [(1.0, -5.0), (1.0, -6.0), (0.0, -6.0), (np.nan, np.nan)][number % 4]  # -2 is not paid
        totals.append(right + 0.5 * brief - 0.25 * length / 8)
    present = np.array(totals)[~np.isnan(totals)]
    expected = (np.array(totals) - present.mean()) / (present.std(ddof=1) + 0.5)
    np.testing.assert_allclose(found["advantage"], np.nan_to_num(expected), atol=1e-5)
    assert row["reward/total/mean"] == pytest.approx(present.mean(), abs=1e-5)
    assert row["validation/score"] == pytest.approx(1 - 0.5 * 5 - 0.25 * row["validation/completion_tokens"] / 8)
    for kind, name in (("before", "baseline_reward"), ("after", "reward")):
        tokens = summary["evaluation"]["completion_tokens"][kind]
        assert summary[name] == pytest.approx(1 - 0.5 * 5 - 0.25 * tokens / 8) and summary[name] < 0
    assert summary["relative_improvement"] is None  # a share of a negative reward means nothing
    (line,) = re.findall("baseline reward.*", (folder / "train.log").read_text())
    assert line.endswith(f"improvement {summary['improvement']:+.3f}")

    # Whatever this run has measured of which no reward has the name, none can have.
    measured = {name for key in row if (name := key.removeprefix("validation/")) != key} | {*summary["evaluation"]}
    measured |= {
        match[1] for key in row if (match := re.fullmatch(r"(?:reward|zero_variance_groups)/([^/]*)(?:/mean)?", key))
    }
    own = measured - {"right", "brief", "watched"}
    assert {"score", "total", "valid", "completion_tokens", "overlong"} <= own
    for name in own:
        values["rewards"] = [{"name": f"{tmp_path / 'judge.py'}:right", "label": name}]
        with pytest.raises(UserError, match=f"rewards.{name}: expected a name that no other .* got '{name}'"):
            run(make_config(values, run_dir=str(tmp_path / name)))
    values["rewards"] = []
    with pytest.raises(UserError, match=r"rewards.score: expected a name that .* in Python: {.name.: function}"):
        run(make_config(values, run_dir=str(tmp_path / "python")), rewards={"score": lambda completions: []})


def test_a_column_splits_eval_rewards_and_no_others():
    config = make_config(task="text", evaluation={"by": "kind"})
    prompts = PromptSet(*([Row(n, "a", {"kind": "b"})] for n in range(3)))
    check_measures(config, prompts, SimpleNamespace(reward_names=("f",), eval_reward_names=("g",)))
    with pytest.raises(UserError, match=r"^evaluation.by: expected nothing without eval_rewards.*, got 'kind'"):
        check_measures(config, prompts, SimpleNamespace(reward_names=("f",), eval_reward_names=()))


def test_measures_have_different_names():
    """Of a reward and what is watched, of a reward and another's turns, of a reward and another's control."""

    def names(rewards, eval_rewards=(), controls=(), turns=1):
        sections = tuple(RewardSection(**one) if isinstance(one, dict) else RewardSection(name=one) for one in rewards)
        task = {"kind": "text", "environment": "a.py:answers" if turns > 1 else ""}
        config = make_config(task=task, sampling={"turns": turns})
        require_names(config, ResolvedRewards(sections, (), (), tuple(eval_rewards)), controls)

    names(["a.py:f", "b.py:g", "overlong", "f_gain"], ["a.py:f", "h"], ["blind"])  # watched as it is rewarded
    values = np.ones((2, 1, 3, 1), np.float32)
    found = turn_measures(rollout_of(values, values[..., :0]), ["f"])
    assert len(found) == 5
    for name in found:
        with pytest.raises(UserError, match=f"rewards.{name}: expected a name that no other measure of the run has"):
            names(["a.py:f", f"a.py:{name}"], turns=3)
    for arguments, place in (
        ((["a.py:f"], ["b.py:f"]), "eval_rewards.f"),
        (([{"name": "a.py:f", "options": {"x": 1}}], ["a.py:f"]), "eval_rewards.f"),
        ((["f"], ["a.py:g", "b.py:g"]), "eval_rewards.g"),
        ((["f"], ["a.py:valid"]), "eval_rewards.valid"),
        ((["f", "f_blind"], [], ["blind"]), "rewards.f_blind"),
    ):
        with pytest.raises(UserError, match=f"{place}: expected a name that no other measure of the run has"):
            names(*arguments)


def test_seconds_include_earlier_processes(turned):
    seconds = summary_of(turned)["seconds"]
    assert {"sample", "score", "update", "evaluate"} < seconds.keys()
    assert 1000 < max(seconds.values()) == seconds["total"] < 2000


def chart(folder, title):
    """A figure of the report; empty where there is none."""
    found = re.search(rf"(?s)<figcaption>{title}</figcaption>.*?</figure>", (folder / "report.html").read_text())
    return found.group() if found else ""


def test_charts_show_the_computed_values(turned):
    """Without a reference, and with one update for each batch, the rows hold zeros."""
    assert all(row["kl"] == row["clip_low"] == row["clip_high"] == 0 for row in rows(turned))
    assert not chart(turned, "KL to the reference") and not chart(turned, "Clipped tokens")
    assert chart(turned, "Entropy of the policy") and chart(turned, "Gradient norm")


def test_the_first_iteration_which_compiles_is_not_drawn(turned):
    figure = chart(turned, "Seconds per iteration")
    assert set(re.findall(r"<title>iteration (\d+):", figure)) == {"2", "3", "4", "5"}


nan = math.nan
VALUES = [  # of each prompt, of each turn: a share that is right at 1, and a score that may be missing
    [(1.0, 3.0), (0.5, 2.0), (1.0, 4.0)],
    [(1.0, 1.0), (1.0, nan), (0.0, 5.0)],
    [(0.0, nan), (1.0, 2.0)],
    [(0.25, 2.0)],
]


def judged():
    turns = np.full((4, 1, 3, 2), nan, np.float32)
    for p, episode in enumerate(VALUES):
        turns[p, 0, : len(episode)] = episode
    last = np.array([[len(episode) - 1] for episode in VALUES])
    return rollout_of(turns[..., :1], turns[..., 1:], last)


def mean(values):
    present = [value for value in values if not math.isnan(value)]
    return sum(present) / len(present) if present else nan


def loop(n):
    """One prompt after the other, from what the names promise."""
    found = {"turn_1": [], "turn_2": [], "peak": [], "kept": [], "gain": []}
    for episode in VALUES:
        own = [turn[n] for turn in episode]
        for turn in (1, 2):
            found[f"turn_{turn}"].append(own[min(turn, len(own)) - 1])
        present = [value for value in own if not math.isnan(value)]
        found["peak"].append(max(present) if present else nan)
        if own[0] >= 1.0:
            found["kept"].append(float(own[-1] >= own[0]))
        found["gain"].append(own[-1] - own[0])
    return {name: mean(values) for name, values in found.items()}


def test_measures_of_turns_are_those_of_a_loop():
    came = turn_measures(judged(), ["share", "score"])
    assert len(came) == 10
    for n, name in enumerate(("share", "score")):
        for what, expected in loop(n).items():
            assert came[f"{name}_{what}"] == pytest.approx(expected, nan_ok=True), (name, what)
    assert came["share_kept"] == 0.5 and came["share_gain"] == pytest.approx(0.0)


def test_a_reward_of_ends_alone_has_no_measures_of_turns():
    """The mean of those that end at once would be another thing than the first turn's value."""
    values = np.array([[[[nan, 0.1], [1.0, 0.2]]], [[[0.0, 0.3], [nan, nan]]]], np.float32)
    came = turn_measures(rollout_of(values, values[..., :0], np.array([[1], [0]])), ["end", "each"])
    assert all(math.isnan(value) for name, value in came.items() if name.startswith("end_"))
    assert came["each_turn_1"] == pytest.approx(0.2) and came["each_gain"] == pytest.approx(0.05)
