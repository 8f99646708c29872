"""Sampling ahead: results do not depend on timing; batches are off-policy by one, logged and corrected."""

import threading

import jax
import numpy as np
import pytest
import yaml
from support.rollouts import batch_of
from support.text_task import assert_same_bits, final_state, rows

from grpo_jax.config.command_line import load_config, parse
from grpo_jax.config.fields import to_yaml
from grpo_jax.config.run import make_config
from grpo_jax.config.sections import AlgorithmSection
from grpo_jax.runs.batches import Rollouts, collect_batch
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.loading import load
from grpo_jax.train import main
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import rollout_copy, rollout_variables
from grpo_jax.training.update import make_learner, make_preparation

JUDGE = """
import os, time

def letters(completions, wish, trainer_state, log_metric):
    if not trainer_state.evaluation:
        log_metric("seen", trainer_state.global_step)
        mood = os.environ.get("MOOD")
        if mood == "fails" and trainer_state.global_step == 2:
            raise RuntimeError("the reward is away")
        if mood == "slow":
            time.sleep(0.3 * (trainer_state.global_step % 2))
    return [sum(c.isalpha() for c in text) / 8 + text.count(w) for text, w in zip(completions, wish)]

def brief(completions):
    return [-len(text) / 10 for text in completions]

def alike(completions):
    return [1.0] * len(completions)
"""
STEPS, UPDATES = 4, 2  # iterations of a run, updates of one of them


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert not [thread.name for thread in threading.enumerate() if "ahead" in thread.name]


@pytest.fixture(scope="module")
def config(place, tmp_path_factory):
    """The config of the tiny task, its batches sampled ahead and judged in two chunks."""
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "judge.py").write_text(JUDGE)
    values = yaml.safe_load(to_yaml(load_config(place.config)))  # as printed by --print_config
    values["training"] |= {"async_level": 1, "chunk_prompts": 2, "max_steps": STEPS, "inner_epochs": 1}
    values["data"]["held_out"] = 0
    values["evaluation"] = {"every": 0, "samples": 0}
    values["rewards"] = [{"name": f"{folder / 'judge.py'}:letters"}, {"name": f"{folder / 'judge.py'}:brief"}]
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def finished(config):
    run = config.parent / "run"
    assert main(["--config", str(config), "--run_dir", str(run)]) == 0
    return run


def test_metrics_have_the_samplers_staleness(finished):
    table = rows(finished)
    assert [row["staleness"] for row in table] == [0] + [UPDATES] * (STEPS - 1)
    assert [row["log/seen"] for row in table] == [*range(STEPS)]  # also where two batches are judged at once
    assert table[0]["importance_weight"] == pytest.approx(1, abs=1e-5)
    assert all(abs(row["importance_weight"] - 1) > 1e-4 for row in table[1:])
    assert all(0 <= row["importance_clipped"] <= 1 for row in table)
    assert "importance_cap: null" in (finished / "config.yaml").read_text()


def test_a_failed_and_slow_run_gives_the_same_results(config, finished, tmp_path, monkeypatch, capsys):
    """Nothing depends on time; what was on its way is sampled again with the weights that sampled it."""
    run = tmp_path / "run"
    monkeypatch.setenv("MOOD", "fails")
    assert main(["--config", str(config), "--run_dir", str(run), "--training.save_every=0"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "letters: it raised RuntimeError: the reward is away (" in error
    assert "Saved after iteration 2;" in error
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest_step() == 2
    monkeypatch.setenv("MOOD", "slow")
    saved = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(saved.replace("importance_cap: null", "importance_cap: 2.0"))  # of older runs
    assert main(["--resume", "--run_dir", str(run)]) == 0
    assert rows(run) == rows(finished)
    assert_same_bits(final_state(run)[0], final_state(finished)[0])


def loaded(config, *arguments):
    ctx = load(parse([f"--config={config}", "--evaluation.every=0", *arguments]), info=lambda *_: None)
    return ctx, make_learner(ctx.config, ctx.policy, ctx.iterations)


def test_the_first_batch_is_that_of_lag_0_and_the_second_has_its_weight(config):
    """The importance weight is a NumPy loop's over what was sampled before the update and what the update is given."""
    choices = ["--algorithm.importance_cap=1.02", "--optimizer.warmup_steps=0"]
    ctx, learner = loaded(config, "--training.async_level=0", *choices)
    expected, _, row = collect_batch(ctx, ctx.policy.variables, 0)

    ctx, learner = loaded(config, *choices)
    ahead, state = Rollouts(ctx), learner.start(ctx.policy.variables)
    # What is left behind is a copy, not what an update frees.
    mine = {array.unsafe_buffer_pointer() for array in jax.tree.leaves(rollout_copy(state))}
    assert not mine & {array.unsafe_buffer_pointer() for array in jax.tree.leaves(state._replace(rollout_weights=None))}
    (first, objectives, metrics), state = ahead.collect(state, 0)
    assert metrics == {**row, "staleness": 0}
    jax.tree.map(np.testing.assert_array_equal, first.samples, expected.samples)

    state, _ = learner.update(state, batch_of(ctx, first, objectives), jax.random.key(0))
    rollout, *_ = collect_batch(ctx, rollout_variables(state, state.rollout_weights), 1)
    samples = rollout.samples
    batch = Batch(rollout.prompt_tokens, rollout.prompt_mask, samples.tokens, samples.mask)
    forward = jax.jit(make_forward(ctx.policy, temperature=ctx.config.sampling.temperature))
    logprobs, mask = np.asarray(forward(state.variables, batch).logprobs), samples.mask
    ratios = [
        np.exp(float(new) - float(old)) for new, old in zip(logprobs[mask], samples.sampler_logprobs[mask], strict=True)
    ]
    (second, objectives, _), state = ahead.collect(state, 1)
    np.testing.assert_array_equal(second.rewards, rollout.rewards)
    _, report = learner.update(state, batch_of(ctx, second, objectives), jax.random.key(1))
    ahead.close()
    measured = report["measured"]
    assert measured["importance_weight"] == pytest.approx(np.mean([min(ratio, 1.02) for ratio in ratios]), rel=1e-4)
    clipped = np.mean([ratio >= 1.02 for ratio in ratios])
    assert 0.05 < clipped < 0.95 and measured["importance_clipped"] == pytest.approx(clipped, abs=0.02)


def test_without_a_weight_the_ratio_is_taken_against_the_sampler(config):
    """Lag 1 with importance_cap 0: PPO's own ratio then spans the batch that lies between."""
    section, training = (
        AlgorithmSection(importance_cap=0),
        make_config(task="text", training={"async_level": 1}).training,
    )
    prepare = make_preparation(lambda *_: 1 / 0, section, make_config(task="text").ppo, training)
    shape = (2, 3, 4)
    batch = Batch(np.ones((2, 1), int), np.ones((2, 1), bool), np.ones(shape, int), np.ones(shape, bool))
    sampled = np.random.default_rng(0).normal(size=shape)
    prepared, measured = prepare(None, batch._replace(rollout_logprobs=sampled))
    assert prepared.old_logprobs is sampled and not measured
