"""No step of training compiles twice."""

from functools import partial

import jax
import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.runs.iteration import SampledAhead, make_learner, run_iteration
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


@pytest.mark.parametrize("updates", ["one", "several ahead"])
def test_a_second_iteration_compiles_nothing(updates, place, tmp_path, compiled, monkeypatch):
    """With one update per batch it is the second iteration that takes what an update gave."""
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    choices = ["--algorithm.update_ref_every=1", "--training.async_level=1"]
    if updates == "one":
        choices = ["--algorithm.kl_coef=0", "--algorithm.update_ref_every=0"]
        choices += ["--training.inner_epochs=1", "--training.minibatches=1"]
    config = parse([f"--config={place.config}", f"--run_dir={tmp_path / 'run'}", *choices])
    parts = load_parts(config, say=lambda *_: None)
    learner, ahead = make_learner(parts), SampledAhead(parts)
    iterate = partial(run_iteration, parts, learner, ahead=None if updates == "one" else ahead)
    state = iterate(learner.start(parts.policy.variables), 0).state
    ahead.settle()
    first = len(compiled)
    assert first > 3  # the sampler, the reference, the update
    for iteration in (1, 2):
        state = iterate(state, iteration).state
    ahead.settle()
    assert len(compiled) == first
