"""A run that was killed while it wrote and resumed is the run that never was; at other moments: tests/faults."""

import pytest
from support.text_task import (
    final_state,
    finished_run,
    rows,
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
