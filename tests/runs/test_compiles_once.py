"""No step of training compiles twice."""

from functools import partial

import jax
import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.runs.iteration import Prefetcher, make_learner, run_iteration
from grpo_jax.runs.parts import load_parts

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


@pytest.mark.parametrize("updates", ["several", "one", "ahead"])
def test_a_second_iteration_compiles_nothing(updates, place, tmp_path, compiled, monkeypatch):
    """With one update per batch it is the second iteration that takes what an update gave."""
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    choices = ["--algorithm.update_ref_every=1" if updates == "several" else "--algorithm.kl_coef=0"]
    if updates == "one":
        choices += ["--training.inner_epochs=1", "--training.minibatches=1", "--algorithm.update_ref_every=0"]
    choices += ["--training.lag=1"] if updates == "ahead" else []
    config = parse([f"--config={place.config}", f"--run_dir={tmp_path / 'run'}", *choices])
    parts = load_parts(config, say=lambda *_: None)
    learner, ahead = make_learner(parts), Prefetcher(parts)
    iterate = partial(run_iteration, parts, learner, prefetcher=ahead if updates == "ahead" else None)
    state = iterate(learner.start(parts.policy.variables), 0).state
    ahead.settle()
    first = len(compiled)
    assert first > 3  # the sampler, the reference, the update
    for iteration in (1, 2):
        state = iterate(state, iteration).state
    ahead.settle()
    assert len(compiled) == first
