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
from bridges.retrieval import service  # noqa: E402
from bridges.retrieval.queries import make_queries  # noqa: E402
from bridges.retrieval.retriever import Retriever  # noqa: E402
from grpo_jax.config.judge import PoolSection  # noqa: E402
from grpo_jax.errors import StopRun, UserError  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ray]

WORDS = ["red", "blue", "rose", "nail", "polish", "hand", "cream", "soap", "brush", "night", "shaving", "palette"]
RNG = np.random.default_rng(0)
TITLES = [" ".join(RNG.choice(WORDS, 4)) + f" no {row}" for row in range(200)]
QUERIES = [" ".join(RNG.choice(WORDS, 2)) for _ in range(100)] + ["", "xyzzy"]
TARGETS = RNG.integers(0, 200, len(QUERIES))
EXCLUDE = [RNG.integers(0, 200, 4).tolist() for _ in QUERIES]
CPU = {"num_cpus": 0.5}
IMPATIENT = retrieval.RetrievalSection(attempts=1, budget=0, window=1)


def held_file(orders):
    """Is there once an actor holds a step."""
    return orders.with_name("held")


def make_faulty(path):
    """What the actors load, with faults that a file orders; made in a function, so that Ray sends its code along."""
    held = held_file(path)

    class Faulty(service.RankService):
        def count(self, queries, scale):
            orders = json.loads(path.read_text())
            time.sleep(orders.get("sleep", 0.0))
            if orders.get("hold") and not held.exists():  # once: until it is killed
                held.write_text(str(os.getpid()))
                time.sleep(600)
            counts = super().count(queries, scale)
            return counts._replace(score=counts.score * np.nan) if orders.get("nan") else counts

    return Faulty


@pytest.fixture(scope="module")
def running(cluster, tmp_path_factory):
    """(backend, orders): a service of two actors, and the file that orders faults."""
    folder = tmp_path_factory.mktemp("ray")
    orders = folder / "orders.json"
    orders.write_text("{}")
    section, pool = (
        retrieval.RetrievalSection(cache=str(folder / "cache")),
        PoolSection(replicas=2, resources=CPU, batch_timeout=0),
    )
    backend = service.start_service(TITLES, section, pool, judge=make_faulty(orders))
    yield backend, orders
    backend.close()


@pytest.fixture
def misbehave(running):
    orders = running[1]
    yield lambda **faults: orders.write_text(json.dumps(faults))
    orders.write_text("{}")
    held_file(orders).unlink(missing_ok=True)


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
    over_ray, share = retrieval.open_retriever(TITLES, retrieval.RetrievalSection(backend="ray"))
    here, same_share = retrieval.open_retriever(TITLES)
    assert share == same_share > 0.9
    assert over_ray.fingerprint == here.fingerprint
    found, expected = (r.score_ranks(QUERIES, TARGETS, EXCLUDE) for r in (over_ray, here))
    np.testing.assert_array_equal(found.rank, expected.rank)
    np.testing.assert_allclose(found.probability, expected.probability, rtol=1e-6)
    mixtures = [[QUERIES[i], QUERIES[i - 1]] for i in range(len(QUERIES))], [[1.0, 0.5]] * len(QUERIES)
    found, expected = (r.score_mixed_ranks(*mixtures, TARGETS, EXCLUDE) for r in (over_ray, here))
    np.testing.assert_array_equal(found.rank, expected.rank)
    history = retrieval.History(EXCLUDE, 2.0, 0.7)
    found, expected = (r.score_ranks(QUERIES, TARGETS, EXCLUDE, history) for r in (over_ray, here))
    np.testing.assert_array_equal(found.rank, expected.rank)
    assert over_ray.nearest(QUERIES, 5, EXCLUDE, history) == here.nearest(QUERIES, 5, EXCLUDE, history)


def test_a_service_for_another_run_is_refused(running):
    with pytest.raises(UserError, match=r"has the encoder tfidf and 200 titles, .*; this run has tfidf and 200 t"):
        service.connect(TITLES[::-1])
    with pytest.raises(UserError, match=r"has the encoder tfidf and .*; this run has some/model and "):
        service.connect(TITLES, retrieval.RetrievalSection(encoder="some/model"))
    with pytest.raises(UserError, match="runs on this cluster already"):
        service.start_service(TITLES)
    with pytest.raises(UserError, match=r"large\.resources\.num_cpus: 100 actors need 100, the Ray cluster has "):
        service.start_service(
            TITLES, retrieval.RetrievalSection(service="large"), PoolSection(replicas=100, resources={"num_cpus": 1.0})
        )


def test_a_missing_service_says_how_to_start_one(running):
    with pytest.raises(retrieval.ServiceNotFound, match="RetrievalService not found") as error:
        service.connect(TITLES, retrieval.RetrievalSection(service="other"))
    assert isinstance(error.value, UserError)  # a command shows it in one line
    assert "python -m bridges.retrieval serve --catalogue" in str(error.value)


def test_nan_from_an_actor_is_a_failure(running, misbehave):
    misbehave(nan=True)
    retriever = Retriever(running[0], retrieval.RetrievalSection(attempts=2))
    ranks = retriever.score_ranks(["red soap"], [0], [[]])
    assert np.isnan(ranks.rank).all() and np.isnan(ranks.probability).all()
    with pytest.raises(StopRun, match="NonFiniteScores: 1 of 1 scores are not finite"):
        Retriever(running[0], IMPATIENT).score_ranks(["red soap"], [0], [[]])


def test_an_actor_that_raises_is_a_failure(running):
    queries = make_queries([["a"]], [[1.0]], [0], [[]], len(TITLES))
    broken = queries._replace(targets=np.array([9999]))  # the row does not exist: an IndexError over there
    with pytest.raises(retrieval.RetrievalError, match="the service failed: IndexError"):
        running[0].count(broken, retrieval.Scale())


def test_an_answer_that_comes_too_late_is_a_failure(running, misbehave):
    misbehave(sleep=1.5)
    late = service.connect(TITLES, retrieval.RetrievalSection(timeout=0.3))
    with pytest.raises(StopRun, match=r"RetrievalError: retrieval: no answer within 0\.3 s"):
        Retriever(late, IMPATIENT).score_ranks(["red soap"], [0], [[]])
    misbehave()
    patient = Retriever(running[0])
    assert patient.score_ranks(["red soap"], [0], [[]]).rank >= 1  # the actor has come back to itself


def test_an_actor_killed_in_mid_step_is_restarted_and_the_step_repeated(running, misbehave):
    backend = running[0]
    expected = Retriever(backend).score_ranks(QUERIES, TARGETS, EXCLUDE)
    misbehave(hold=True)
    killer = when_held(running, lambda pid: os.kill(pid, signal.SIGKILL))
    retriever = Retriever(backend, IMPATIENT)
    found = retriever.score_ranks(QUERIES, TARGETS, EXCLUDE)
    killer.join()
    np.testing.assert_array_equal(found.rank, expected.rank)
    np.testing.assert_array_equal(found.probability, expected.probability)
    assert retriever.retries == 0


def test_a_service_that_stays_dead_stops_the_run(running, misbehave):
    """The last test of the service: afterwards it is gone."""
    backend = running[0]
    misbehave(hold=True)
    when_held(running, lambda _: backend.close())
    with pytest.raises(retrieval.RetrievalError, match="no actor is left"):
        backend.count(make_queries([["a"]], [[1.0]], [0], [[]], len(TITLES)), retrieval.Scale())
    retriever = Retriever(backend, retrieval.RetrievalSection(attempts=2, budget=1))
    assert np.isnan(retriever.score_ranks(["red soap"], [0], [[]]).rank).all()
    with pytest.raises(StopRun, match="ServiceNotFound: RetrievalService not found"):
        retriever.score_ranks(["red soap"], [0], [[]])
