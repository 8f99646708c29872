"""No step of training compiles twice."""

import jax
import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.runs.batches import Rollouts, batch_of, draw
from grpo_jax.runs.loading import load
from grpo_jax.training.update import make_learner

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled():
    """Durations of the compilations so far, a growing list; JAX has no way to stop listening to one alone."""
    found = []

    def heard(event, duration, **_):
        if event == COMPILED:
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(heard)
    return found


@pytest.mark.parametrize("updates", ["one", "several ahead"])
def test_a_second_iteration_compiles_nothing(updates, place, tmp_path, compiled, monkeypatch, own_programs):
    """With one update per batch it is the second iteration that takes what an update gave."""
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    choices = ["--algorithm.update_ref_every=1", "--training.async_level=1"]
    if updates == "one":
        choices = ["--algorithm.kl_coef=0", "--algorithm.update_ref_every=0"]
        choices += ["--training.inner_epochs=1", "--training.minibatches=1"]
    config = parse([f"--config={place.config}", f"--run_dir={tmp_path / 'run'}", *choices])
    ctx = load(config, info=lambda *_: None)
    learner = make_learner(config, ctx.policy, ctx.iterations, allowed_tokens=ctx.allowed_tokens, trie=ctx.trie)
    ahead = Rollouts(ctx)

    def iterate(state, iteration):
        if updates == "one":
            rollout, objectives, _ = draw(ctx, state.variables, iteration)
        else:
            rollout, objectives, _, state = ahead.draw(state, iteration)
        state, _ = learner.update(state, batch_of(ctx, rollout, objectives), jax.random.key(iteration))
        return learner.refresh(state, iteration)

    state = iterate(learner.start(ctx.policy.variables), 0)
    ahead.settle()
    first = len(compiled)
    assert first > 3  # the sampler, the reference, the update
    for iteration in (1, 2):
        state = iterate(state, iteration)
    ahead.settle()
    assert len(compiled) == first
