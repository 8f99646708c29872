"""sampler_gap in the metrics: how far the trainer's log-probabilities are from the sampler's, of the same policy."""

import jax
import numpy as np
import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.runs.iteration import make_learner, run_iteration, sample_batch
from grpo_jax.runs.parts import load_parts
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import make_forward


def test_the_gap_is_that_of_trainer_and_sampler_alone(place, tmp_path, monkeypatch):
    """In bfloat16; what top-k cuts off is no gap, though the distribution drawn from is another one then."""
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    arguments = [f"--config={place.config}", "--policy.compute_dtype=bfloat16", "--sampling.top_k=5"]
    parts = load_parts(parse(arguments), say=lambda *_: None)
    episodes, _ = sample_batch(parts, parts.policy.variables, 0)
    samples = episodes.samples
    # the run's own weights are donated to it
    variables = jax.tree.map(np.asarray, parts.policy.variables)
    learner = make_learner(parts)
    row = run_iteration(parts, learner, learner.start(parts.policy.variables), 0).row
    batch = Batch(episodes.prompt_tokens, episodes.prompt_mask, samples.tokens, samples.mask)
    forward = jax.jit(make_forward(parts.policy, temperature=parts.config.sampling.temperature))
    gaps = np.abs(forward(variables, batch).logprobs - samples.logprobs)[samples.mask]
    assert gaps.mean() > 1e-5  # a hundred times that of float32
    # the update sees fewer prompts at a time, which moves the last bits of a bfloat16
    assert row["sampler_gap"] == pytest.approx(gaps.mean(), rel=0.1)
    assert np.abs(samples.logprobs - samples.sampler_logprobs)[samples.mask].mean() > 1
