"""sampler_gap in the metrics: how far the trainer's log-probabilities are from the sampler's, of the same policy."""

import jax
import numpy as np
import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.runs.iteration import make_learner, run_iteration, sample_batch
from grpo_jax.runs.parts import load_parts
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import make_forward


def first_iteration(place, *arguments):
    """The run's parts, its first batch, and the metrics of the iteration that learns from it."""
    parts = load_parts(parse([f"--config={place.config}", *arguments]), say=lambda *_: None)
    # the run's own weights are donated to it
    episodes, _ = sample_batch(parts, parts.policy.variables, 0)
    variables = jax.tree.map(np.asarray, parts.policy.variables)
    learner = make_learner(parts)
    row = run_iteration(parts, learner, learner.start(parts.policy.variables), 0).row
    return parts, variables, episodes, row


def test_the_gap_is_that_of_trainer_and_sampler_in_bfloat16(place, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    parts, variables, episodes, row = first_iteration(place, "--policy.compute_dtype=bfloat16")
    samples = episodes.samples
    batch = Batch(episodes.prompt_tokens, episodes.prompt_mask, samples.tokens, samples.mask)
    forward = jax.jit(make_forward(parts.policy, temperature=parts.config.sampling.temperature))
    gaps = np.abs(forward(variables, batch).logprobs - samples.logprobs)[samples.mask]
    assert gaps.mean() > 1e-5  # a hundred times that of float32
    # the update sees fewer prompts at a time, which moves the last bits of a bfloat16
    assert row["sampler_gap"] == pytest.approx(gaps.mean(), rel=0.1)


def test_what_top_k_cuts_off_is_no_gap(place, tmp_path, monkeypatch):
    """The distribution drawn from is another one then; the policy's own log-probabilities agree."""
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    _, _, episodes, row = first_iteration(place, "--sampling.top_k=5")
    samples = episodes.samples
    assert np.abs(samples.logprobs - samples.sampler_logprobs)[samples.mask].mean() > 1
    assert 0 <= row["sampler_gap"] < 1e-5
