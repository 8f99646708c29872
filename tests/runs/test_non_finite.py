"""A non-finite loss or gradient: the update is skipped and counted, and a few in a row stop the run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from support import tiny_update
from support.text_task import DONE, assert_same_bits, final_state, rows, train_values

from grpo_jax.config.sections import AlgorithmSection, TrainingSection
from grpo_jax.models.policy import Policy
from grpo_jax.runs.endings import updates_skipped_reason
from grpo_jax.runs.session import Progress
from grpo_jax.training.state import init_state
from grpo_jax.training.update import make_update

# A finite reward whose loss overflows, in the iterations that JUDGE names.
JUDGE = f"""{DONE}
def letters(completions):
    values = [sum(c.isalpha() for c in text) / 8 for text in completions]
    return [3e38, *values[1:]] if str(done()) in os.environ["JUDGE"].split() else values
"""


@pytest.fixture
def values(place, tmp_path):
    """The tiny text task, one update per iteration, every state saved."""
    (tmp_path / "judge.py").write_text(JUDGE)
    values = yaml.safe_load(place.config.read_text())
    values["rewards"] = [{"name": f"{tmp_path / 'judge.py'}:letters"}]
    values["training"] |= {"inner_epochs": 1, "minibatches": 1, "save_every": 1, "keep_checkpoints": 9}
    values["evaluation"] = {"every": 0, "samples": 0}
    values["data"]["held_out"] = 0
    values["algorithm"] = {"preset": "dr_grpo", "advantage": "grpo"}
    return values


def learned(run, step):
    """Return the saved arrays that an update changes, after an iteration."""
    state, _ = final_state(run, step)
    return {name: state[name] for name in ("step", "variables", "opt_state")}


def test_a_run_of_skipped_updates_stops_and_resumes_from_its_last_finite_state(values, tmp_path, capsys):
    """A bad batch leaves weights, moments and count as they were, and the schedule where it was."""
    run = tmp_path / "run"
    train_values(values, run, judge="1 2 3 4", expected=2)
    error = capsys.readouterr().err
    assert error.startswith("error: the policy's loss or its gradient was not finite in 3 updates in a row")
    assert f"continue with --resume --run_dir {run}" in error and error.count("\n") == 1
    assert_same_bits(learned(run, "latest"), learned(run, 1))
    train_values(values, run, "--resume")
    table = rows(run)
    assert [row["skipped_updates"] for row in table] == [0, 1, 1, 1, 0, 0]
    assert table[1]["grad_norm"] is None or table[1]["loss"] is None
    assert table[4]["learning_rate"] == table[1]["learning_rate"] < table[5]["learning_rate"]
    last, before = learned(run, "final"), learned(run, 1)["variables"]
    assert int(last["step"]) == 3
    for (path, now), old in zip(
        jax.tree_util.tree_leaves_with_path(last["variables"]), jax.tree.leaves(before), strict=True
    ):
        assert np.isfinite(now).all() and (np.asarray(now) != np.asarray(old)).any(), path


def test_a_short_run_of_skipped_updates_fails(tmp_path):
    progress = Progress(1, 1, None, 0, {}, {})
    told = updates_skipped_reason(1, 1, progress, str(tmp_path))
    assert "not finite in 1 updates in a row" in told and "fix it and start again" in told
    assert not updates_skipped_reason(1, 1, progress._replace(iterations=6), str(tmp_path))


def updates(advantages):
    """States after updates with these advantages, one after the other."""
    batch = tiny_update.make_batch()
    training = TrainingSection(prompts_per_batch=tiny_update.PROMPTS)
    optimizer = optax.adam(0.01)
    update = make_update(
        Policy(tiny_update.CONFIG, compute_dtype="float32", remat="none"),
        optimizer,
        AlgorithmSection(advantage="grpo"),
        training,
        temperature=1.0,
        max_new_tokens=tiny_update.STEPS,
    )
    state = init_state(tiny_update.make_variables(), optimizer, keep_reference=False)
    for value in advantages:
        given = batch._replace(advantages=batch.advantages.at[2].multiply(value))
        state, report = update(state, given, jax.random.key(2))
        yield jax.device_get(state), report


def test_skipped_updates_count_until_a_finite_one():
    bad = [1.0, jnp.nan, jnp.inf, 1.0, 3e38, jnp.nan]
    found = list(updates(bad))
    assert [int(state.skipped) for state, _ in found] == [0, 1, 2, 0, 1, 2]
    assert [report["skipped"] for _, report in found] == [0, 1, 1, 0, 1, 1]
    assert_same_bits(found[2][0].variables, found[0][0].variables)
    assert_same_bits(found[2][0].opt_state, found[0][0].opt_state)
