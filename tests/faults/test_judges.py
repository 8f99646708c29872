"""Judges that fail in every known way: one line if the run stops, else a missing reward, never a number."""

import numpy as np
import pytest
from faults.judge_faults import FAULTS

from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import StageError, UserError, one_line
from grpo_jax.rollout.pipeline import Work
from grpo_jax.rollout.reward_registry import TaskRewards, bind, judge_named, resolve_rewards
from grpo_jax.rollout.rewards import RewardError, collect_rewards
from grpo_jax.train import main

TEXTS = ["a", "bb", "ccc", "dddd"]
by_name = pytest.mark.parametrize("fault", FAULTS, ids=[fault.name.replace(" ", "_") for fault in FAULTS])


def find(folder, fault):
    """The reward of a fault, as a config's section finds it."""
    path = folder / "odd_judge.py"
    path.write_text(fault.source)
    section, source = RewardSection(name=f"{path}:judged"), TaskRewards()
    (found,) = resolve_rewards([section], [], source, ()).maximised
    return bind(found, {})


def judge(reward, on_error):
    """The reward's numbers f32 [4], from a stage's thread as in a run."""

    work = Work()

    def score(chunk):
        with work.stage("score", chunk):
            return collect_rewards({"judged": reward}, TEXTS, TEXTS, {"wish": list("abcd")}, 2, on_error=on_error)

    return work.run(1, score)[0].ravel()


def in_one_line(text):
    return len(text) < 220 and text.isprintable() and "judged" in text


@by_name
def test_a_fault_is_named_or_missing(fault, tmp_path):
    if fault.early:
        with pytest.raises(UserError) as refused:
            find(tmp_path, fault)
        assert str(refused.value).replace(str(tmp_path), "").isprintable()
        assert "odd_judge.py" in str(refused.value) and in_one_line(str(refused.value).replace(str(tmp_path), ""))
        return
    reward = find(tmp_path, fault)
    numbers = judge(reward, "missing")
    expected = np.full(4, fault.number, np.float32)
    expected[: {"all": 4, "first": 1, "none": 0}[fault.missing]] = np.nan
    np.testing.assert_array_equal(numbers, expected)
    if fault.missing == "none":
        np.testing.assert_array_equal(judge(reward, "raise"), expected)
        return
    with pytest.raises(StageError) as stopped:
        judge(reward, "raise")
    assert isinstance(stopped.value.__cause__, RewardError) and stopped.value.__cause__.reward == "judged"
    assert in_one_line(str(stopped.value).replace(str(tmp_path), "")), str(stopped.value)


@pytest.mark.parametrize("where", ["task", "judges.odd"])
def test_a_file_of_a_task_or_judge_that_exits_is_named(place, tmp_path, capsys, where):
    path = tmp_path / "odd_file.py"
    words = ["--config", str(place.config), f"--{where}", f"{path}:Odd", "--run_dir", str(tmp_path / "run")]
    path.write_text("import sys; sys.exit(0)")
    assert main(words) == 2
    assert f"error: {where}: importing odd_file.py raised SystemExit: 0\n" == capsys.readouterr().err
    path.write_text("raise KeyboardInterrupt")  # a Ctrl-C while it is imported
    assert main(words) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("error", ["SystemExit('bye')", "RuntimeError('no card')", "GeneratorExit()"])
def test_a_judge_that_cannot_be_loaded_names_itself(error):
    with pytest.raises(UserError, match=r"judges.odd: loading it raised \w+: (bye|no card|)$"), judge_named("odd"):
        raise eval(error)
    with pytest.raises(KeyboardInterrupt), judge_named("odd"):  # a Ctrl-C while weights are read
        raise KeyboardInterrupt


@pytest.mark.parametrize("on_error", ["raise", "missing"])
def test_a_ctrl_c_in_a_loop_of_ones_own_is_no_failed_reward(on_error):
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_rewards({"mine": interrupted}, TEXTS, TEXTS, {}, 2, on_error=on_error)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("two\r\nlines\tand  more", "two lines and more"),
        (ValueError("a\x1b[2Jb\x00\udc80"), "a\\x1b[2Jb\\x00\\udc80"),
        ("x" * 10**6, "x" * 99 + "…"),
        (["x" * 10**6] * 10**5, "['" + "x" * 12 + "..."),
        (10**5000, "<int>"),
        (KeyError("k"), "'k'"),
    ],
    ids=["lines", "control characters", "long", "a long list", "a long number", "an exception"],
)
def test_what_a_user_made_is_told_in_one_short_line(value, line):
    told = one_line(value)
    assert told.startswith(line) and len(told) <= 100 and told.isprintable()
