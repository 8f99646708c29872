"""Variants of training, through the command: a teacher, a baseline for each token, the sampling distribution."""

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from support.text_task import completions, rows, train_values
from support.tiny_models import causal_lm


@pytest.fixture
def values(place):
    values = yaml.safe_load(place.config.read_text())
    values |= {"evaluation": {"every": 0, "samples": 0}, "optimizer": {"learning_rate": 0.02}}
    values["data"]["held_out"] = 0
    values["sampling"]["group_size"] = 16
    values["training"] = {"prompts_per_batch": 4, "max_steps": 8, "save_every": 0}
    return values


def test_a_teacher_grades_each_token_and_rewards_are_only_logged(values, tmp_path, capsys):
    """The reference is what the policy is at first; a teacher with the same weights but a surer head is not."""
    values["training"] |= {"max_steps": 1}
    values["algorithm"] = {"advantage": "opd", "preset": "bnpo"}
    train_values(values, tmp_path / "alone", judge="work:0")
    (row,) = rows(tmp_path / "alone")
    assert abs(row["mean_advantage"]) < 1e-6 and row["kl"] < 1e-6 and row["grad_norm"] < 1e-5
    teacher = causal_lm(tmp_path / "teacher", num_hidden_layers=1)
    weights = load_file(teacher / "model.safetensors")
    save_file(weights | {"lm_head.weight": 10 * weights["lm_head.weight"]}, teacher / "model.safetensors")
    values["algorithm"]["teacher"] = str(teacher)
    train_values(values, tmp_path / "run", judge="work:0")
    (row,) = rows(tmp_path / "run")
    assert row["mean_advantage"] == pytest.approx(-row["loss"], rel=1e-4)
    assert row["kl"] > 0.3 and row["loss"] == pytest.approx(row["kl"], rel=0.5)  # both estimate KL(policy ‖ teacher)
    assert row["grad_norm"] > 0.01
    values["algorithm"]["teacher"] = str(causal_lm(tmp_path / "other", vocab_size=1024))
    capsys.readouterr()
    train_values(values, tmp_path / "refused", judge="work:0", expected=2)
    told = capsys.readouterr().err
    assert "algorithm.teacher: expected a policy with the tokens of policy.path" in told and told.count("\n") == 1


def test_each_token_has_a_baseline_between_the_rewards_of_its_group(values, tmp_path):
    values["training"] |= {"max_steps": 1}
    values["algorithm"] = {"advantage": "optimal_token_baseline", "preset": "bnpo"}
    train_values(values, tmp_path / "run", judge="work:0")
    (row,) = rows(tmp_path / "run")
    assert row["grad_norm"] > 0
    file = completions(tmp_path / "run", 1)
    rewards = np.array(file["reward/letters"]).reshape(4, 16) + np.array(file["reward/brief"]).reshape(4, 16) / 2
    advantages = np.array(file["advantage"]).reshape(4, 16)
    assert (rewards - rewards.max(1, keepdims=True) - 1e-5 <= advantages).all()
    assert (advantages <= rewards - rewards.min(1, keepdims=True) + 1e-5).all()
    means = np.abs(advantages.mean(1)) / rewards.std(1)
    assert (means < 0.5).all() and means.max() > 1e-3  # near the group's mean, not equal to it


@pytest.mark.parametrize("mask", ["keep", pytest.param("none", marks=pytest.mark.wide)])
def test_a_kept_mask_trains_the_distribution_that_was_drawn_from(values, tmp_path, mask):
    """The trainer's log-probabilities are the sampler's own, in all updates the first ratio is 1."""
    values["sampling"] |= {"top_k": 6, "top_p": 0.8, "sampling_mask": mask}
    values["algorithm"] = {"importance_cap": 5.0, "kl_coef": 0.1}
    values["training"] |= {"max_steps": 2}
    train_values(values, tmp_path / "run", judge="work:0")
    for row in rows(tmp_path / "run"):
        assert row["sampler_gap"] < 1e-5 and row["mean_ratio"] == pytest.approx(1, abs=1e-4)
        assert (row["importance_weight"] == pytest.approx(1, abs=1e-4)) == (mask == "keep")
        assert (row["entropy"] < np.log(6)) == (mask == "keep")
