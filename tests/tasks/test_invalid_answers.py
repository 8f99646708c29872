"""task.invalid: rewards of invalid answers, so that an empty answer earns no more than a bad rewrite."""

import json

import jax
import numpy as np
import pytest
from support.text_task import completions

from grpo_jax.config.sections import AlgorithmSection
from grpo_jax.training.estimators import OVERLONG, estimate_advantages, make_objectives, make_turn_objectives

nan = np.nan
JUDGED = np.array([[[0.5, 2.0], [0.3, 4.0], [0.9, 9.0], [nan, 3.0]], [[0.5, 2.0]] * 4], np.float32)  # [P, G, N]
VALID = np.array([[True, True, False, True], [False] * 4])
WEIGHTS = {"a": 1.0, "b": 0.5}


def rewards_of(how, **fields):
    """The objectives' rewards, made by one program, and their names."""
    names, section = [], AlgorithmSection(**fields)

    def make(judged, lengths, valid):
        given = {} if how == "prompt" else {"valid": valid, "fill": how == "worst"}
        found = make_objectives(judged, lengths, section, weights=WEIGHTS, max_new_tokens=10, **given)
        names.extend(found.names)
        return found.rewards

    return np.asarray(jax.jit(make)(JUDGED, np.full(VALID.shape, 10), VALID)), names


def test_it_earns_the_worst_of_its_group_by_objective_or_nothing():
    worst, missing, prompt = (rewards_of(how)[0] for how in ("worst", "missing", "prompt"))
    np.testing.assert_array_equal(prompt, JUDGED)
    np.testing.assert_allclose(worst[0, 2], [0.3, 2.0])
    for came in (worst, missing):
        np.testing.assert_array_equal(came[VALID], JUDGED[VALID])
        assert np.isnan(came[1]).all()  # nothing to be worse than
    assert np.isnan(missing[0, 2]).all()
    lengths, names = rewards_of("worst", overlong_buffer=4)
    assert names[-1] == OVERLONG and np.isnan(lengths[1]).all()
    np.testing.assert_allclose(lengths[0, 2], [0.3, 2.0, -1.0])  # its own length counts
    for advantage in ("gdpo", "grpo", "rloo", "raft", "batch"):
        section = AlgorithmSection(advantage=advantage)
        found = estimate_advantages(worst, np.ones((2, 4, 1), bool), section, (1.0, 0.5))
        assert (np.asarray(found[1]) == 0).all()  # no pull


def test_turns_are_compared_with_the_same_turn_of_the_group():
    judged = np.array([[[[1.0], [5.0]], [[2.0], [nan]], [[7.0], [8.0]], [[4.0], [3.0]]]], np.float32)  # [1, 4, 2, 1]
    valid = np.array([[[True, False], [True, True], [False, True], [True, True]]])
    lengths = np.array([[[3, 3], [3, 0], [3, 3], [3, 3]]])
    section = AlgorithmSection(turn_advantage="return", turn_gamma=1.0)
    options = {"weights": {"a": 1.0}, "max_new_tokens": 4, "valid": valid, "fill": True}
    found = make_turn_objectives(judged, lengths, section, **options)
    np.testing.assert_allclose(found.returns[0, :, :, 0], [[1 + 3, 3], [2, nan], [1 + 8, 8], [4 + 3, 3]])


def run(tmp_path):
    from grpo_jax.train import main

    folder = tmp_path / "run"
    small = {
        "sampling.temperature": 4, "sampling.group_size": 8, "training.prompts_per_batch": 4, "training.max_steps": 1,
        "algorithm.advantage": "grpo", "rewards": "[alignment]", "evaluation.prompts": 4, "evaluation.every": 0,
        "training.inner_epochs": 1, "evaluation.samples": 0, "report_to": "[]", "run_dir": folder,
    }  # fmt: skip
    assert main([*(f"--{name}={value}" for name, value in small.items())]) == 0
    (row,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return row, completions(folder, 1)


@pytest.mark.wide  # a dozen seconds
def test_the_command_pays_an_invalid_answer_the_worst_of_its_group(tmp_path):
    pytest.importorskip("diffusers")
    pytest.importorskip("open_clip")
    row, table = run(tmp_path)
    valid, reward, advantage = (
        np.array(table[name]).reshape(4, 8) for name in ("valid", "reward/alignment", "advantage")
    )
    assert 0 < row["invalid"] < 1 and np.isfinite(reward).all()  # told as it was judged
    said = np.array(table["completion"]) == np.array(table["prompt"])
    assert said.reshape(4, 8)[~valid].all()  # what was drawn
    learned = np.where(valid, reward, np.where(valid, reward, np.inf).min(1, keepdims=True)).astype(float)
    centred = learned - np.nanmean(learned, axis=1, keepdims=True)
    expected = np.nan_to_num(centred / (np.nanstd(learned, axis=1, ddof=1, keepdims=True) + 1e-4))
    np.testing.assert_allclose(advantage, expected, rtol=1e-3, atol=1e-3)
    assert row["reward/total/mean"] == pytest.approx(np.nanmean(learned), abs=1e-5)
