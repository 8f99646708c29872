"""No step of training compiles twice, and the call stack from command to loss is short."""

import sys
from pathlib import Path

import jax
import pytest
from support.rollouts import batch_of

import grpo_jax
from grpo_jax.config.command_line import parse
from grpo_jax.core import losses
from grpo_jax.runs.batches import Rollouts, collect_batch
from grpo_jax.runs.loading import load
from grpo_jax.train import main
from grpo_jax.training.update import make_learner

MOST_FRAMES = 12  # of ours; those of JAX and of Python do not count
PACKAGE = str(Path(grpo_jax.__file__).parent)
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


@pytest.mark.parametrize("updates", [pytest.param("one", marks=pytest.mark.wide), "several ahead"])
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
            rollout, objectives, _ = collect_batch(ctx, state.variables, iteration)
        else:
            (rollout, objectives, _), state = ahead.collect(state, iteration)
        state, _ = learner.update(state, batch_of(ctx, rollout, objectives), jax.random.key(iteration))
        return learner.refresh(state, iteration)

    state = iterate(learner.start(ctx.policy.variables), 0)
    ahead.wait()
    first = len(compiled)
    assert first >= 3  # the sampler, the reference, the update
    for iteration in (1, 2):
        state = iterate(state, iteration)
    ahead.wait()
    assert len(compiled) == first


def test_few_frames_lie_between_main_and_the_loss(place, tmp_path, monkeypatch, own_programs):
    found = []

    class Seen(Exception):
        """Ends the run where the loss would be compiled."""

    def looking(*arguments, **options):
        frame, names = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        found.extend(names)
        raise Seen

    monkeypatch.setattr(losses, "grpo_loss", looking)
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    words = [f"--run_dir={tmp_path / 'run'}", "--training.max_steps=1", "--evaluation.every=0", "--data.held_out=0"]
    with pytest.raises(Seen):
        main(["--config", str(place.config), *words])
    outer = found[: found.index("main") + 1]
    assert len(outer) + 1 <= MOST_FRAMES, outer
