"""Runs with judges in pools: the metrics of a run in one process, also after actors die."""

import re
from contextlib import suppress

import pytest

pytest.importorskip("ray")

import psutil
import ray
from support.text_task import finish, finished_run, rows, start, train_here, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def test_a_run_learns_the_same_though_an_actor_dies_and_ends_its_own_cluster(no_cluster, place, configured, tmp_path):
    run = tmp_path / "run"
    (tmp_path / "death").touch()
    assert train_here(configured("deadly", replicas=2, options={"folder": str(tmp_path)}), run) == 0
    assert not ray.is_initialized() and not (tmp_path / "death").exists()
    weights, undisturbed = "policy/model.safetensors", finished_run(place)
    assert rows(run) == rows(undisturbed)
    assert (run / weights).read_bytes() == (undisturbed / weights).read_bytes()
    assert "2 actors of a Ray cluster, 32 rows at a time" in (run / "train.log").read_text()


@pytest.mark.wide
@pytest.mark.parametrize("killed", ["all of it", "raylet"])
def test_a_cluster_that_goes_away_ends_the_run_with_a_checkpoint(killed, place, configured, tmp_path):
    """Without its raylet a cluster still answers, and its actors are not started again."""
    run = tmp_path / "run"
    training = start(place._replace(config=configured("patient", replicas=2)), run, "--training.max_steps", "99")
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 2, training)
    cluster = psutil.Process(training.pid).children(recursive=True)  # actors alone would be started again
    assert {"gcs_server", "raylet"} < {process.name() for process in cluster}
    for process in cluster:
        with suppress(psutil.NoSuchProcess):  # some end with those before them
            if killed in ("all of it", process.name()):
                process.kill()
    ended = finish(training)
    assert ended.returncode == 2, ended.stderr
    error = ended.stderr.strip().splitlines()[-1]
    saved = re.search(r"Saved after iteration (\d+); continue with --resume", error)
    assert error.startswith("error: judges.letters: ") and saved, error
    assert (run / "checkpoints" / f"step_{saved[1]}").is_dir() and len(rows(run)) == int(saved[1]) >= 2
