"""The command that serves, in a process of its own: who reaches it, and what is said where none serves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

from bridges import retrieval  # noqa: E402
from bridges.retrieval.__main__ import serve  # noqa: E402
from bridges.retrieval.encoders import ServiceNotFound  # noqa: E402
from grpo_jax.config.sections import RetrievalSection  # noqa: E402
from grpo_jax.errors import StopRun, run_cli  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("no_cluster")]

TITLES = ["red nail polish", "rose hand cream", "shaving brush", "night cream", "red soap"]


SERVE = [sys.executable, "-m", "bridges.retrieval", "serve"]
ROOT = Path(__file__).parents[3]
ASK = """
import sys
from grpo_jax.errors import run_cli
from bridges import retrieval
from grpo_jax.config.sections import RetrievalSection
where = RetrievalSection(backend="ray", address=sys.argv[1])
sys.exit(run_cli(lambda _: retrieval.open_retriever(["red soap"], where) and None, ()))
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The user's cache, in which services say where they are."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("RAY_TMPDIR", str(folder))  # where `ray start` says where a cluster is
        yield folder


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    table = tmp_path_factory.mktemp("catalogue") / "items.tsv"
    table.write_text("item_id\ttitle\n" + "".join(f"{i}\t{title}\n" for i, title in enumerate(TITLES)))
    return table


@pytest.fixture(scope="module")
def served(home, catalogue):
    """(process, address) of the command, ready."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_TMPDIR")  # sockets below it would have too long a name
        process = subprocess.Popen([*SERVE, "--catalogue", str(catalogue), "--cpus", "0.5"], **PIPES)
    try:
        lines = []
        while not lines or not lines[-1].startswith("serving"):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            lines.append(line)
        assert "self-test   100.0%" in "".join(lines)
        (address,) = [line.split()[1] for line in lines if line.startswith("cluster")]
        yield process, address
    finally:
        process.kill()
        process.communicate()
        ray.shutdown()


def open_service(**fields):
    return retrieval.open_retriever(TITLES, RetrievalSection(backend="ray", **fields))


def asking(address, environment):
    """A command that asks the service at an address."""
    changed = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    changed |= {"RAY_NUM_REDIS_GET_RETRIES": "2", **environment}
    return subprocess.Popen([sys.executable, "-c", ASK, address], **PIPES, env=changed)


def test_nothing_outside_this_machine_reaches_the_service(served):
    psutil = pytest.importorskip("psutil")
    process = psutil.Process(served[0].pid)
    listening = []
    for one in (process, *process.children(recursive=True)):
        listening += [c.laddr.ip for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3  # of the cluster, the node, and its workers
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_a_wrong_or_missing_token_is_one_line(served, home):
    none = {"HOME": str(home), "RAY_AUTH_MODE": "token"}  # no ~/.ray/auth_token
    tokens = (none, {"RAY_AUTH_TOKEN": "wrong"})
    for process in [asking(served[1], token) for token in tokens]:  # at once
        said, error = process.communicate(timeout=600)
        assert process.returncode == 2 and said == "", (said, error)
        assert error.startswith("error: ") and error.count("\n") == 1 and len(error) < 300, error
        assert "asks for a token and this process has none or another: set RAY_AUTH_MODE" in error


def test_no_cluster_but_the_named_one_is_joined(served, home, monkeypatch):
    """Neither that of RAY_ADDRESS, nor the one that was started last."""
    (home / "ray").mkdir()
    (home / "ray" / "ray_current_cluster").write_text(served[1])
    monkeypatch.setenv("RAY_ADDRESS", served[1])
    with pytest.raises(ServiceNotFound, match="no cluster is joined without"):
        open_service()
    (home / "ray" / "ray_current_cluster").unlink()
    assert not ray.is_initialized()


def test_the_command_serves_until_it_is_told_to_stop(served, monkeypatch):
    """The last test of the service. Training, here this process, asks it, and stops when it is gone."""
    process, address = served
    for name, value in (("ATTEMPTS", 2), ("BUDGET", 0)):
        monkeypatch.setattr(retrieval, name, value)
    retriever, _ = open_service(address=address)
    assert retriever.score_ranks([TITLES[3]], [3], [[]]).rank == [1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 0
    with pytest.raises(StopRun, match=r"the retrieval failed in 1 of the last 2 calls.*no Ray cluster answers"):
        retriever.score_ranks([TITLES[3]], [3], [[]])
    assert process.stderr.read() == ""


def test_without_a_cluster_the_message_says_how_to_start_one(home):
    """Ray itself would try for minutes to reach a cluster that was killed."""
    message = r"no Ray cluster answers at 127\.0\.0\.1:1\); .*python -m bridges\.retrieval serve"
    with pytest.raises(ServiceNotFound, match=message):
        open_service(address="127.0.0.1:1")


def test_a_catalogue_that_is_not_there_is_one_line(home, tmp_path, capsys):
    assert run_cli(serve, ["serve", "--catalogue", str(tmp_path / "none.tsv")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "none.tsv does not exist" in error
