"""Failing calls: attempts, pauses, missing ranks, the budget, and the stop; backends here are plain objects."""

import numpy as np
import pytest

from bridges import retrieval
from bridges.retrieval import Retriever, local_backend
from grpo_jax.errors import StopRun
from grpo_jax.rollout.rewards import collect_rewards

TITLES = ["red nail polish", "rose hand cream", "shaving brush", "night cream"]


class Faulty:
    """A backend that fails as it is told, call by call; None lets a call through, a function changes its counts."""

    def __init__(self, *faults):
        self.inner = local_backend(TITLES)
        self.fingerprint = self.inner.fingerprint
        self.faults = list(faults)
        self.calls = 0

    def count(self, parts):
        self.calls += 1
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        counts = self.inner.count(parts)
        return [fault(one) for one in counts] if fault else counts


def ask(retriever):
    return retriever.score_ranks(["rose cream"], [1], [[]])


def lost():
    return retrieval.RetrievalError("it died")


@pytest.fixture
def limits(monkeypatch):
    def change(**values):
        for name, value in values.items():
            monkeypatch.setattr(retrieval, name.upper(), value)

    return change


def test_a_failure_is_tried_again_after_longer_and_longer_pauses(limits):
    limits(attempts=8)
    backend = Faulty(*[lost() for _ in range(6)], retrieval.NonFiniteScores("nan"))
    pauses = []
    retriever = Retriever(backend, wait=pauses.append)
    assert ask(retriever).rank == [1]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert backend.calls == 8


@pytest.mark.parametrize("column", ["score", "log_sum"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_a_failure(column, value):
    def spoil(counts):
        return counts._replace(**{column: np.full(1, value)})

    retriever = Retriever(Faulty(*[spoil] * retrieval.ATTEMPTS), wait=lambda _: None)
    ranks = ask(retriever)
    assert np.isnan(ranks.rank).all() and np.isnan(ranks.probability).all()
    assert ask(retriever).rank == [1]


def test_the_budget_ends_in_a_stop_that_no_reward_turns_into_a_missing_one(limits):
    limits(attempts=2, budget=2)
    retriever = Retriever(Faulty(*[lost() for _ in range(6)]), wait=lambda _: None)

    def reward(prompts, completions):
        return list(ask(retriever).rank)

    for _ in range(2):
        assert np.isnan(collect_rewards({"r": reward}, ["p"], ["c"], {}, 1, on_error="missing")).all()
    with pytest.raises(StopRun, match=r"failed in 3 of the last 3 calls \(the budget is 2\).*RetrievalError: it died"):
        collect_rewards({"r": reward}, ["p"], ["c"], {}, 1, on_error="missing")


def test_old_failures_are_forgotten(limits):
    limits(attempts=1, budget=1, window=3)
    retriever = Retriever(Faulty(lost(), None, None, lost(), None, lost()))
    found = [bool(np.isnan(ask(retriever).rank[0])) for _ in range(5)]
    assert found == [True, False, False, True, False]
    with pytest.raises(StopRun, match="2 of the last 3"):
        ask(retriever)


def test_other_errors_pass_at_once():
    backend = Faulty(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        ask(Retriever(backend))
    assert backend.calls == 1
