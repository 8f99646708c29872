"""No step of training compiles twice, and the call stack from command to loss is short."""

import json
import shutil
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.programs import COMPILES_AHEAD

import grpo_jax
from grpo_jax.config.command_line import parse
from grpo_jax.core import losses
from grpo_jax.errors import ABANDONED
from grpo_jax.models.jitted import Jitted
from grpo_jax.runs import ahead, trainer
from grpo_jax.runs.batches import Rollouts, batch_of, draw
from grpo_jax.runs.loading import RunContext, load
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


@pytest.mark.parametrize(("steps", "longest"), [(2, 8), (1, 64)], ids=["longest completions", "short ones"])
def test_programs_compiled_ahead_are_those_that_run(steps, longest, place, tmp_path, monkeypatch, own_programs):
    """Samplers, log-probabilities and update: each once, and none where the run would wait for it."""
    found = []
    ours = {f"jit({name})" for name in ("write", "start", "go_on", "step", "compute")}

    def heard(event, _, **named):
        if event == COMPILED and named["fun_name"] in ours:
            found.append((named["fun_name"], threading.current_thread().name))

    jax.monitoring.register_event_duration_secs_listener(heard)

    def traced_before_the_run(ctx):
        """On a busy machine the run may be first; then it compiles itself."""
        ahead.compile_ahead(ctx)
        for thread in threading.enumerate():
            if thread.name == f"{ABANDONED}tracing":
                thread.join()

    monkeypatch.setattr(trainer, "compile_ahead", traced_before_the_run)
    monkeypatch.setattr(RunContext, "compiles_ahead", COMPILES_AHEAD)
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    policy = shutil.copytree(place.policy, tmp_path / "policy")
    if steps == 1:  # every token ends a completion
        (policy / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(272)]}))
    words = [f"--run_dir={tmp_path / 'run'}", f"--training.max_steps={steps}", "--evaluation.every=0"]
    words += [f"--policy.path={policy}", f"--sampling.max_new_tokens={longest}"]
    assert main(["--config", str(place.config), *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert (rows[0]["completion_tokens_max"] == 1) == (steps == 1)
    greedy_and_training = ["jit(write)" if longest == 8 else "jit(start)"] * 2
    assert sorted(name for name, _ in found) == sorted(["jit(compute)", "jit(step)", *greedy_and_training])
    assert {thread for _, thread in found} == {f"{ABANDONED}compiling"}
    if steps == 1:  # a first update of the batch's own lengths learns the same
        monkeypatch.setattr(RunContext, "compiles_ahead", False)
        assert main(["--config", str(place.config), *words, f"--run_dir={tmp_path / 'cut'}"]) == 0
        full, cut = (load_file(tmp_path / run / "policy/model.safetensors") for run in ("run", "cut"))
        assert all(np.allclose(full[name], cut[name], atol=1e-5) for name in full)


def test_a_failure_to_compile_ahead_is_raised_once_by_the_call(monkeypatch):
    in_thread = []
    monkeypatch.setattr(threading, "excepthook", in_thread.append)
    function = Jitted(lambda x: x + 1, compiler_options={"no_such_option": True})
    function(jax.ShapeDtypeStruct((3,), np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        function(np.ones(3, np.float32))
    for thread in threading.enumerate():
        if thread.name == f"{ABANDONED}compiling":
            thread.join()
    assert not in_thread


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
