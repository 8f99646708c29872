"""A run that was killed while it wrote and resumed is the run that never was; at other moments: tests/faults."""

import pytest
from support.text_task import (
    assert_same_run,
    final_state,
    finished_run,
    kill,
    rows,
    start,
    train_here,
    wait_for,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(place):
    return finished_run(place)


def steps(run):
    return sorted(
        int(path.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*") if "tmp" not in path.name
    )


def test_six_steps_at_once_have_something_to_restore(uninterrupted):
    """The other tests would pass on a run in which nothing happens."""
    table = rows(uninterrupted)
    assert [row["step"] for row in table] == [1, 2, 3, 4, 5, 6]
    assert len({row["learning_rate"] for row in table}) == 6
    assert all(row["grad_norm"] > 0 and row["kl"] != 0 for row in table)
    assert [("validation/score" in row) for row in table] == [False, True] * 3
    assert table[0]["reward/letters/mean"] != table[5]["reward/letters/mean"]
    assert steps(uninterrupted) == [3, 6]
    state, progress = final_state(uninterrupted)
    assert state["reference"] is not None and progress["iteration"] == 6 and progress["best_score"] is not None


@pytest.mark.wide
def test_killed_before_the_first_checkpoint_then_during_a_write(place, uninterrupted, tmp_path, capsys):
    run = tmp_path / "run"
    process = start(place, run, "--training.save_every", "1", judge="hold:0")
    wait_for((run / "held").exists, process)
    kill(process, run)
    assert steps(run) == []

    process = start(place, run, "--resume", judge="commit:2")  # step 3 is written in full and not committed
    wait_for((run / "held").exists, process)
    kill(process, run)
    assert steps(run)[-1] == 2 and (run / "checkpoints" / ".writing" / "step_3" / "manifest.json").is_file()

    assert final_state(run, "latest")[1]["iteration"] == 2  # the previous one loads
    assert train_here(place.config, run, "--resume") == 0
    assert "resumed after iteration 2 of 6" in capsys.readouterr().out
    assert not list(run.glob("checkpoints/**/.writing/*"))
    assert_same_run(run, uninterrupted)
