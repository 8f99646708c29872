"""The retrieval service by its command, in a process and a Ray cluster of its own: access and answers."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from support.imports import ROOT

ray = pytest.importorskip("ray")

from bridges import ray_cluster, retrieval  # noqa: E402
from bridges.retrieval import Retriever, service  # noqa: E402
from bridges.retrieval.__main__ import serve  # noqa: E402
from bridges.retrieval.encoders import ServiceNotFound  # noqa: E402
from bridges.retrieval.ranking import local_backend, make_queries  # noqa: E402
from grpo_jax.config.sections import RetrievalSection  # noqa: E402
from grpo_jax.errors import StopRun, UserError, run_cli  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("no_cluster")]

WORDS = ["red", "blue", "rose", "nail", "polish", "hand", "cream", "soap", "brush", "night", "shaving", "palette"]
RNG = np.random.default_rng(0)
TITLES = [" ".join(RNG.choice(WORDS, 4)) + f" no {row}" for row in range(200)]
QUERIES = [" ".join(RNG.choice(WORDS, 2)) for _ in range(100)] + ["", "xyzzy"]
TARGETS = RNG.integers(0, 200, len(QUERIES))
EXCLUDE = [RNG.integers(0, 200, 4).tolist() for _ in QUERIES]
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
    """The user's cache, and where `ray start` says where a cluster is."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("RAY_TMPDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def served(home, tmp_path_factory):
    """(process, address) of the command, ready, with two actors."""
    table = tmp_path_factory.mktemp("catalogue") / "items.tsv"
    table.write_text("item_id\ttitle\n" + "".join(f"{i}\t{title}\n" for i, title in enumerate(TITLES)))
    command = [sys.executable, "-m", "bridges.retrieval", "serve", "--catalogue", str(table), "--replicas", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_TMPDIR")  # sockets below it would have too long a name
        process = subprocess.Popen(command, **PIPES)
    try:
        said = ""
        while "serving" not in said:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line
        yield process, re.search(r"cluster +(\S+)", said)[1]
    finally:
        process.kill()
        process.communicate()
        ray.shutdown()


def section(served, **fields):
    return RetrievalSection(backend="ray", address=served[1], **fields)


def asking(address, environment):
    """A command that asks the service at an address."""
    changed = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    changed |= {"RAY_NUM_REDIS_GET_RETRIES": "2", **environment}
    return subprocess.Popen([sys.executable, "-c", ASK, address], **PIPES, env=changed)


def processes(served):
    process = psutil.Process(served[0].pid)
    return [process, *process.children(recursive=True)]


def test_nothing_outside_this_machine_reaches_the_service(served):
    listening = []
    for one in processes(served):
        listening += [c.laddr.ip for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3  # of the cluster, the node, and its workers
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_a_wrong_or_missing_token_is_one_line(served, home):
    none = {"HOME": str(home), "RAY_AUTH_MODE": "token"}  # no ~/.ray/auth_token
    for process in [asking(served[1], token) for token in (none, {"RAY_AUTH_TOKEN": "wrong"})]:  # at once
        said, error = process.communicate(timeout=600)
        assert process.returncode == 2 and said == "", (said, error)
        assert error.startswith("error: ") and error.count("\n") == 1 and "token" in error, error


def test_no_cluster_but_the_named_one_is_joined(served, home, monkeypatch):
    """Neither that of RAY_ADDRESS, nor the one that was started last."""
    (home / "ray").mkdir()
    (home / "ray" / "ray_current_cluster").write_text(served[1])
    monkeypatch.setenv("RAY_ADDRESS", served[1])
    with pytest.raises(ServiceNotFound, match="no cluster is joined without"):
        service.connect(TITLES, RetrievalSection(backend="ray"))
    (home / "ray" / "ray_current_cluster").unlink()
    assert not ray.is_initialized()


def test_what_is_missing_is_one_line(home, tmp_path, capsys):
    """Ray itself would try for minutes to reach a cluster that was killed."""
    message = r"no Ray cluster answers at 127\.0\.0\.1:1; .*python -m bridges\.retrieval serve --catalogue"
    with pytest.raises(ServiceNotFound, match=message) as error:
        service.connect(TITLES, RetrievalSection(backend="ray", address="127.0.0.1:1"))
    assert isinstance(error.value, UserError)  # a command shows it in one line
    assert run_cli(serve, ["serve", "--catalogue", str(tmp_path / "none.tsv")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "none.tsv: cannot be read" in said


def test_the_titles_column_is_named_as_a_run_names_it(tmp_path, capsys):
    """The error of a missing column advises this option."""
    (tmp_path / "items.tsv").write_text("item_id\tname\n")
    words = ["serve", "--catalogue", str(tmp_path / "items.tsv")]
    assert [run_cli(serve, [*words, *more]) for more in ((), ("--data.columns.title", "name"))] == [2, 2]
    without, named = capsys.readouterr().err.splitlines()
    assert "rename it with --data.columns.title NAME" in without and "has no items" in named


def test_a_service_for_another_run_and_a_second_one_are_refused(served, tmp_path):
    (tmp_path / "items.tsv").write_text("item_id\ttitle\n1\tred soap\n")
    with pytest.raises(UserError, match="a retrieval service runs on this cluster already"):
        serve(["serve", "--catalogue", str(tmp_path / "items.tsv"), "--address", served[1]])
    with pytest.raises(UserError, match=r"has the encoder tfidf and 200 titles, .*; this run has tfidf and 200 t"):
        service.connect(TITLES[::-1], section(served))
    with pytest.raises(UserError, match=r"has the encoder tfidf and .*; this run has some/model and "):
        service.connect(TITLES, section(served, encoder="some/model"))


def test_it_answers_as_a_retriever_in_process_also_after_an_actor_was_killed(served):
    over_ray = retrieval.open_retriever(TITLES, section(served))
    here = Retriever(local_backend(TITLES))
    assert over_ray.fingerprint == here.fingerprint
    for history in (None, retrieval.History(EXCLUDE, 2.0, 0.7)):
        found, expected = (r.score_ranks(QUERIES, TARGETS, EXCLUDE, history) for r in (over_ray, here))
        np.testing.assert_array_equal(found.rank, expected.rank)
        np.testing.assert_array_equal(found.probability, expected.probability)
        alive = [one for one in processes(served) if one.status() != psutil.STATUS_ZOMBIE]
        next(one for one in alive if "JudgeActor" in " ".join(one.cmdline())).kill()


def test_calls_that_fail_are_failures_and_the_service_that_has_ended_stops_the_run(served, monkeypatch):
    """The last test of the service."""
    monkeypatch.setattr(retrieval, "PAUSES", (0.01,))
    backend = service.connect(TITLES, section(served))
    with pytest.raises(retrieval.RetrievalError, match="the service failed: IndexError"):
        backend.count(make_queries(["a"], [9999], [[]]))  # the row does not exist
    with monkeypatch.context() as patch:
        patch.setattr(service, "TIMEOUT", 1e-9)
        patch.setattr(retrieval, "PAUSES", ())  # a second attempt may find the first one's answer
        with pytest.raises(StopRun, match=r"retrieval: no answer within 1e-09 s"):
            Retriever(backend).score_ranks(["red soap"], [0], [[]])
    retriever = Retriever(backend)
    assert retriever.score_ranks([TITLES[3]], [3], [[]]).rank == [1]  # found again
    served[0].send_signal(signal.SIGTERM)
    assert served[0].wait(timeout=600) == 0
    with pytest.raises(StopRun, match=r"the retrieval failed 2 times: .*no Ray cluster answers"):
        retriever.score_ranks([TITLES[3]], [3], [[]])
    assert ray_cluster.is_gone() and served[0].stderr.read() == ""
