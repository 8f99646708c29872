"""The Ray service with real actors: the same ranks as in process, and what happens when an actor misbehaves.

Starting actors is slow, so one service of two actors serves most tests; a file tells its actors what to do wrong.
"""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from bridges import retrieval  # noqa: E402
from bridges.retrieval import Retriever, service  # noqa: E402
from bridges.retrieval.encoders import ServiceNotFound  # noqa: E402
from bridges.retrieval.ranking import local_backend, make_queries  # noqa: E402
from grpo_jax.config.judge import PoolSection  # noqa: E402
from grpo_jax.config.sections import RetrievalSection  # noqa: E402
from grpo_jax.errors import StopRun, UserError  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ray]

WORDS = ["red", "blue", "rose", "nail", "polish", "hand", "cream", "soap", "brush", "night", "shaving", "palette"]
RNG = np.random.default_rng(0)
TITLES = [" ".join(RNG.choice(WORDS, 4)) + f" no {row}" for row in range(200)]
QUERIES = [" ".join(RNG.choice(WORDS, 2)) for _ in range(100)] + ["", "xyzzy"]
TARGETS = RNG.integers(0, 200, len(QUERIES))
EXCLUDE = [RNG.integers(0, 200, 4).tolist() for _ in QUERIES]
POOL = PoolSection(replicas=2, resources={"num_cpus": 0.5}, batch_timeout=0)
RAY = RetrievalSection(backend="ray")


def held_file(orders):
    """Is there once an actor holds a step."""
    return orders.with_name("held")


def make_faulty(path):
    """What the actors load, with faults that a file orders; made in a function, so that Ray sends its code along."""
    held = held_file(path)

    class Faulty(service.RankService):
        def count(self, queries):
            orders = json.loads(path.read_text())
            time.sleep(orders.get("sleep", 0.0))
            if orders.get("hold") and not held.exists():  # once: until it is killed
                held.write_text(str(os.getpid()))
                time.sleep(600)
            return super().count(queries)

    return Faulty


def end(backend):
    for actor in backend.actors:
        ray.kill(actor)


@pytest.fixture(scope="module")
def running(cluster, tmp_path_factory):
    """(backend, orders): a service of two actors, and the file that orders faults."""
    folder = tmp_path_factory.mktemp("ray")
    orders = folder / "orders.json"
    orders.write_text("{}")
    section = RetrievalSection(cache=str(folder / "cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "RankService", make_faulty(orders))
        backend = service.start_service(TITLES, section, POOL)
    yield backend, orders
    end(backend)


@pytest.fixture
def misbehave(running):
    orders = running[1]
    yield lambda **faults: orders.write_text(json.dumps(faults))
    orders.write_text("{}")
    held_file(orders).unlink(missing_ok=True)


@pytest.fixture
def impatient(monkeypatch):
    """One attempt, and no call may go missing."""
    for name, value in (("ATTEMPTS", 1), ("BUDGET", 0), ("WINDOW", 1)):
        monkeypatch.setattr(retrieval, name, value)


def when_held(running, act):
    """Starts a thread that acts in the midst of the step that an actor holds."""

    def wait():
        while not held_file(running[1]).exists() or not held_file(running[1]).read_text():
            time.sleep(0.02)
        act(int(held_file(running[1]).read_text()))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_ray_and_in_process_agree(running):
    over_ray, share = retrieval.open_retriever(TITLES, RAY)
    here = Retriever(local_backend(TITLES))
    assert share == here.self_test(TITLES) > 0.9
    assert over_ray.fingerprint == here.fingerprint
    for history in (None, retrieval.History(EXCLUDE, 2.0, 0.7)):
        found, expected = (r.score_ranks(QUERIES, TARGETS, EXCLUDE, history) for r in (over_ray, here))
        np.testing.assert_array_equal(found.rank, expected.rank)
        np.testing.assert_array_equal(found.probability, expected.probability)


def test_a_service_for_another_run_or_that_is_missing_is_refused(running):
    with pytest.raises(UserError, match=r"has the encoder tfidf and 200 titles, .*; this run has tfidf and 200 t"):
        service.connect(TITLES[::-1], RAY)
    with pytest.raises(UserError, match=r"has the encoder tfidf and .*; this run has some/model and "):
        service.connect(TITLES, RAY.replace(encoder="some/model"))
    with pytest.raises(UserError, match="runs on this cluster already"):
        service.start_service(TITLES, RAY, POOL)
    with pytest.raises(ServiceNotFound, match=r"not found: 'other' .*bridges\.retrieval serve --catalogue"):
        service.connect(TITLES, RAY.replace(service="other"))
    with pytest.raises(UserError, match=r"large\.resources\.num_cpus: expected at most .* for all actors, got 50"):
        service.start_service(TITLES, RetrievalSection(service="large"), POOL.replace(replicas=100))


def test_an_actor_that_raises_is_a_failure(running):
    with pytest.raises(retrieval.RetrievalError, match="the service failed: IndexError"):
        running[0].count(make_queries(["a"], [9999], [[]]))  # the row does not exist


def test_an_answer_that_comes_too_late_is_a_failure(running, misbehave, impatient):
    misbehave(sleep=1.5)
    late = service.connect(TITLES, RAY.replace(timeout=0.3))
    with pytest.raises(StopRun, match=r"RetrievalError: retrieval: no answer within 0\.3 s"):
        Retriever(late).score_ranks(["red soap"], [0], [[]])
    misbehave()
    patient = Retriever(running[0])
    assert patient.score_ranks(["red soap"], [0], [[]]).rank >= 1  # the actor has come back to itself


def test_an_actor_killed_in_mid_step_is_restarted_and_the_step_repeated(running, misbehave, impatient):
    backend = running[0]
    expected = Retriever(backend).score_ranks(QUERIES, TARGETS, EXCLUDE)
    misbehave(hold=True)
    killer = when_held(running, lambda pid: os.kill(pid, signal.SIGKILL))
    retriever = Retriever(backend)
    found = retriever.score_ranks(QUERIES, TARGETS, EXCLUDE)
    killer.join()
    np.testing.assert_array_equal(found.rank, expected.rank)
    np.testing.assert_array_equal(found.probability, expected.probability)


def test_a_service_that_stays_dead_stops_the_run(running, misbehave, impatient):
    """The last test of the service: afterwards it is gone."""
    backend = running[0]
    misbehave(hold=True)
    when_held(running, lambda _: end(backend))
    with pytest.raises(retrieval.RetrievalError, match="no actor is left"):
        backend.count(make_queries(["a"], [0], [[]]))
    with pytest.raises(StopRun, match="ServiceNotFound: RetrievalService not found"):
        Retriever(backend).score_ranks(["red soap"], [0], [[]])
