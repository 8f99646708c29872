"""A judge in a pool of real Ray actors gives the results of one process, also after actors die.

Starting actors is slow: one pool of two serves all tests, in their order; what goes wrong stands in its folder.
"""

import inspect
import sys
import sysconfig
import types
import venv
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ray")

from support.pools import ODD, in_pool, load_in_pool

from bridges import ray_cluster, ray_pool
from bridges.ray_pool import BatchLost, PoolLost, placed
from grpo_jax.config.run import make_config
from grpo_jax.errors import StopRun, UserError
from grpo_jax.rollout.rewards import RewardError, collect_rewards

pytestmark = [pytest.mark.slow, pytest.mark.ray]

TEXTS = ["ab" * (7 * i % 13) for i in range(30)]
LIMIT = 2.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("odd")


@pytest.fixture(scope="module")
def judge(cluster, folder):
    return load_in_pool(f"{ODD}:Odd", folder=str(folder), replicas=2, batch_timeout=LIMIT)


def test_a_timeout_of_the_judge_is_not_the_pools(monkeypatch):
    def load(*_, **__):
        raise TimeoutError("the database does not answer")

    monkeypatch.setattr(ray_pool, "attempt", load)
    with pytest.raises(TimeoutError, match="the database does not answer"):
        ray_pool.described([])


def test_a_batch_that_cannot_be_sent_costs_no_actor(monkeypatch):
    def send(*_):
        raise TypeError("cannot pickle '_thread.lock' object")

    answer = types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=send))
    monkeypatch.setattr(ray_pool, "attempt", lambda call, *arguments: call(*arguments))
    pool = ray_pool.RayPool("judges.odd", [types.SimpleNamespace(answer=answer)], ("odd", {}, ["lengths"], None))
    for _ in range(2):  # as of on_judge_error: missing
        with pytest.raises(TypeError, match="cannot pickle"):
            pool.lengths(["a"])


def test_actors_answer_as_the_judge_does(judge):
    assert judge.lengths(TEXTS) == [len(text) for text in TEXTS]
    assert judge.lengths(TEXTS, times=3) == [3 * len(text) for text in TEXTS]
    np.testing.assert_array_equal(judge.squares(np.arange(30.0)), np.arange(30.0) ** 2)
    assert judge.corners(torch.ones(1, 3, 4, 4)).tolist() == [1.0]
    assert judge.sizes(TEXTS) == [4] * 28 + [2] * 2  # the judge's own batches, in their order
    assert judge.sizes(TEXTS, place_in_group=[0, 1, 2] * 10) == [3] * 30  # whole groups
    assert judge.sizes(TEXTS, place_in_group=[*range(6)] * 5) == [6] * 30
    assert judge.lengths([]) == []
    assert str(judge) == "an odd judge; 2 actors of a Ray cluster, 4 rows at a time"
    assert judge.window == 77 and judge.device == "cpu" and judge.number in (0, 1)
    ray_cluster.leave()  # as at a run's end, which ends no cluster that it found
    assert judge.lengths(TEXTS[:1]) == [0]


def test_equal_texts_of_one_seed_are_drawn_once(judge):
    texts, seeds = ["a", "b", "a", "a", "b", "c", "d"] * 4, [1, 1, 1, 2, 1, 1, 1] * 4
    drawn = judge.draw(texts, seeds)
    assert drawn[:, 0].tolist() == [ord(text) + seed for text, seed in zip(texts, seeds, strict=True)]
    assert set(drawn[:, 1].tolist()) == {4.0, 1.0}  # rows of a batch: five different ones were asked for


def test_a_judge_that_is_a_reward_gets_its_columns_and_what_it_does_is_told_as_in_process(judge):
    assert [*inspect.signature(judge).parameters] == ["prompts", "completions", "wish", "columns"]
    prompts, completions, wish = ["p"] * 8, [f"a{i}aa" for i in range(8)], ["a", None] * 4
    columns = {"wish": wish, "unused": [object] * 8}
    found = collect_rewards({"odd": judge}, prompts, completions, columns, 4)
    np.testing.assert_array_equal(found.ravel(), [3.0, np.nan] * 4)
    with pytest.raises(KeyError, match="no such word") as raised:
        judge.fails(TEXTS)
    assert "odd_judges.py" in raised.value.__notes__[0]

    def asks(completions):
        return judge.fails(completions)

    def stops(completions):
        return judge.stops(completions)

    with pytest.raises(RewardError, match="reward asks: it raised KeyError: 'no such word'"):
        collect_rewards({"asks": asks}, prompts, completions, {}, 4)
    assert np.isnan(collect_rewards({"asks": asks}, prompts, completions, {}, 4, on_error="missing")).all()
    with pytest.raises(StopRun, match="the licence has expired"):  # which is no missing reward
        collect_rewards({"stops": stops}, prompts, completions, {}, 4, on_error="missing")


def test_what_cannot_be_taken_apart_or_is_not_there_is_named(judge):
    with pytest.raises(TypeError, match=r"judges.odd.total did not answer 4 rows with as many values"):
        judge.total(TEXTS)
    assert judge.total(["ab", "c"]) == 3  # a batch of its own
    with pytest.raises(AttributeError, match=r"hidden is in the actors of a pool.*: cards, copies, corners, draw, f"):
        _ = judge.hidden


def test_a_slow_actor_gets_less_to_do(judge, folder):
    (folder / "pause.5").touch()
    done = judge.copies(["x"] * 4 * 12)
    assert len(done) == 48 and 0 < min(done.count(0), done.count(1)) < 20


def test_whatever_ends_an_actor_its_batch_goes_to_another(judge, folder):
    for harm in ("SIGKILL", "exit", "SIGSEGV"):
        (folder / f"harm.{harm}").touch()
        assert judge.harmed(TEXTS) == [len(text) for text in TEXTS]
        assert not list(folder.glob("harm.*"))


def test_a_batch_that_every_actor_hangs_over_is_the_judges_failure(judge):
    """The interpreter's lock is held: in a thread of the run nothing could end it."""
    with pytest.raises(BatchLost, match=r"judges\.odd: 3 actors died or took more than 2\.5 s \(batch_timeout\) over"):
        judge.holds([*TEXTS, "poison"])
    assert judge.holds(TEXTS) == [len(text) for text in TEXTS]  # the actors came back


def test_a_pool_without_actors_stops_the_run_and_what_does_not_start_says_why(judge, folder):
    """The last test of the pool."""
    (folder / "broken").touch()  # its actors are started again, and do not load
    with pytest.raises(PoolLost, match=r"judges\.odd: no actor is left; the last: .*no such weights"):
        judge.holds(["poison"])
    with pytest.raises(StopRun):
        judge.lengths(TEXTS)
    with pytest.raises(ValueError, match="no such weights"):
        load_in_pool(f"{ODD}:Odd", folder=str(folder), replicas=1)
    with pytest.raises(
        UserError, match=r"odd\.resources\.num_gpus: expected at most the 0 of the Ray cluster .*, got 2"
    ):
        load_in_pool(f"{ODD}:Odd", replicas=2, resources={"num_gpus": 1})
    with pytest.raises(UserError, match=r"judges\.odd\.resources, runtime_env: "):
        load_in_pool(f"{ODD}:Odd", runtime_env={"pip": 3})
    with pytest.raises(
        UserError, match=r"^judges\.odd: actors cannot log: take log_metric out of its arguments, or drop"
    ):
        load_in_pool("function", name=f"{ODD}:talkative")


def test_judges_that_need_different_versions_of_a_package_judge_side_by_side(cluster, tmp_path, monkeypatch):
    """One in an environment of this Python with all that this one has, and a package of its own version."""
    venv.create(tmp_path / "other", symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "other")}))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    for folder, version in ((tmp_path, 1), (packages, 2)):
        (folder / "little.py").write_text(f"def score(texts):\n    return [{version} * len(text) for text in texts]\n")
    interpreter = str(tmp_path / "other" / "bin" / Path(sys.executable).name)
    judges = {"one": f"{ODD}:Versioned", "two": in_pool(f"{ODD}:Versioned", runtime_env={"py_executable": interpreter})}
    config = make_config(task="text", judges=judges)
    pooled = placed(config.judges["two"], "two")
    pooled.check()  # which this process could not
    with pytest.raises(ModuleNotFoundError):
        config.judges["one"].load("cpu")
    monkeypatch.syspath_prepend(tmp_path)
    assert [judge.load("cpu").score(["ab", "c"]) for judge in (config.judges["one"], pooled)] == [[2, 1], [4, 2]]
