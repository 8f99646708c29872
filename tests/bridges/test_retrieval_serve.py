"""The command that serves, in a process of its own, and what is said where nothing serves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# before Ray is imported: a process that gives an address must say that it has the cluster's token
os.environ.setdefault("RAY_AUTH_MODE", "token")
ray = pytest.importorskip("ray")

from bridges import retrieval  # noqa: E402
from grpo_jax.errors import StopRun  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves log files and sockets to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TITLES = ["red nail polish", "rose hand cream", "shaving brush", "night cream", "red soap"]


def test_the_command_serves_until_it_is_told_to_stop(tmp_path):
    """A process of its own; training, here this process, finds it, and stops when it is gone."""
    table = tmp_path / "items.tsv"
    table.write_text("item_id\ttitle\n" + "".join(f"{i}\t{title}\n" for i, title in enumerate(TITLES)))
    command = [sys.executable, "-m", "bridges.retrieval", "serve", "--catalogue", str(table)]
    process = subprocess.Popen(
        [*command, "--cache", str(tmp_path / "cache"), "--cpus", "0.5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        lines = []
        while not lines or not lines[-1].startswith("serving"):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            lines.append(line)
        assert "self-test   100.0%" in "".join(lines)
        (address,) = [line.split()[1] for line in lines if line.startswith("cluster")]
        patience = retrieval.Patience(attempts=2, first_wait=0.1, budget=0)
        retriever, _ = retrieval.open_retriever(TITLES, backend="ray", address=address, patience=patience)
        assert retriever.score_ranks([TITLES[3]], [3], [[]]).rank == [1]
        retriever.close()  # it is not ours to end
        assert retriever.score_ranks([TITLES[3]], [3], [[]]).rank == [1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        with pytest.raises(StopRun, match="no Ray cluster answers"):
            retriever.score_ranks([TITLES[3]], [3], [[]])
    finally:
        process.kill()
        process.communicate()
        ray.shutdown()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_without_a_cluster_the_message_says_how_to_start_one(address, monkeypatch, tmp_path):
    """Ray itself would try for minutes to reach a cluster that was killed."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    message = rf"no Ray cluster answers at {address}.*python -m bridges\.retrieval serve"
    with pytest.raises(retrieval.ServiceNotFound, match=message):
        retrieval.open_retriever(TITLES, backend="ray", address=address)


def test_a_catalogue_that_is_not_there_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bridges.retrieval", "serve", "--catalogue", str(tmp_path / "none.tsv")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "none.tsv does not exist" in done.stderr
