"""A judge in a pool of real Ray actors answers as in process, whichever actor answered and whichever died over it."""

import inspect
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray")

from bridges.ray_pool.cluster import PoolLost
from bridges.ray_pool.pool import BatchLost
from bridges.ray_pool.section import placed
from grpo_jax.config import make_config
from grpo_jax.errors import StopRun, UserError
from grpo_jax.rollout.rewards import RewardError, collect_rewards

pytestmark = [pytest.mark.slow, pytest.mark.ray]

ODD = Path(__file__).with_name("odd_judges.py")
TEXTS = ["ab" * (7 * i % 13) for i in range(30)]


@pytest.mark.parametrize("replicas", [1, 4])
def test_any_number_of_actors_answers_alike(pool, replicas):
    judge = pool(replicas=replicas)
    assert judge.lengths(TEXTS) == [len(text) for text in TEXTS]
    assert judge.lengths(TEXTS, times=3) == [3 * len(text) for text in TEXTS]
    np.testing.assert_array_equal(judge.squares(np.arange(30.0)), np.arange(30.0) ** 2)
    assert judge.sizes(TEXTS) == [4] * 28 + [2] * 2  # the judge's own batches, in their order
    assert judge.lengths([]) == []
    assert set(judge.copies(["x"] * 4 * 40)) <= set(range(replicas))
    assert str(judge) == f"an odd judge; {replicas} actors of a Ray cluster, 4 rows at a time"
    assert judge.window == 77 and judge.device == "cpu" and judge.number in range(replicas)


def test_a_judge_that_is_a_reward_gets_its_columns_and_what_it_does_is_told_as_in_process(pool):
    judge = pool(batch=3)
    assert [*inspect.signature(judge).parameters] == ["prompts", "completions", "wish", "columns"]
    prompts, completions, wish = ["p"] * 8, [f"a{i}aa" for i in range(8)], ["a", None] * 4
    columns = {"wish": wish, "unused": [object] * 8}
    found = collect_rewards({"odd": judge}, prompts, completions, columns, 4)
    np.testing.assert_array_equal(found.ravel(), [3.0, np.nan] * 4)
    with pytest.raises(KeyError, match="no such word") as raised:
        judge.fails(TEXTS)
    assert "odd_judges.py" in raised.value.__notes__[0]

    with pytest.raises(MemoryError, match="no room for pictures"):
        judge.runs_out(TEXTS)

    def asks(completions):
        return judge.fails(completions)

    with pytest.raises(RewardError, match="reward asks: it raised KeyError: 'no such word'"):
        collect_rewards({"asks": asks}, prompts, completions, {}, 4)
    assert np.isnan(collect_rewards({"asks": asks}, prompts, completions, {}, 4, on_error="missing")).all()


def test_what_cannot_be_taken_apart_or_is_not_there_is_named(pool):
    judge = pool(replicas=1)
    with pytest.raises(TypeError, match=r"judges.odd.total answered a batch of 4 rows with int, .*set its `batch`"):
        judge.total(TEXTS)
    assert judge.total(["ab", "c"]) == 3  # a batch of its own
    with pytest.raises(
        AttributeError, match=r"hidden is in the actors of a pool.*: cards, copies, dies, draw, fails, harmed, l"
    ):
        _ = judge.hidden


def test_a_slow_actor_gets_less_to_do(pool):
    done = pool(slow=1.0).copies(["x"] * 4 * 12)
    assert len(done) == 48 and done.count(1) > done.count(0) > 0


def test_an_actor_that_hangs_is_ended_and_another_gets_its_batch(pool):
    done = pool(slow=600, batch_timeout=4, batch_attempts=9).copies(["x"] * 4 * 6)
    assert len(done) == 24 and 0 not in done  # the first copy never answered


def test_whatever_ends_an_actor_its_batch_goes_to_another(pool, tmp_path):
    judge = pool()
    for harm in ("SIGKILL", "exit", "SIGSEGV"):
        (tmp_path / f"harm.{harm}").touch()
        assert judge.harmed(TEXTS) == [len(text) for text in TEXTS]
        assert not list(tmp_path.glob("harm.*"))


def test_what_stops_a_run_is_no_missing_reward(pool):
    judge = pool(replicas=1)

    def asks(completions):
        return judge.stops(completions)

    with pytest.raises(StopRun, match="the licence has expired"):
        collect_rewards({"asks": asks}, ["p"] * 4, TEXTS[:4], {}, 4, on_error="missing")


def test_equal_texts_of_one_seed_are_drawn_once(pool):
    texts, seeds = ["a", "b", "a", "a", "b"] * 4, [1, 1, 1, 2, 1] * 4
    drawn = pool(batch=2).draw(texts, seeds)
    assert drawn[:, 0].tolist() == [ord(text) + seed for text, seed in zip(texts, seeds, strict=True)]
    assert set(drawn[:, 1].tolist()) == {2.0, 1.0}  # rows of a batch: three different ones were asked for


def test_a_batch_that_every_actor_dies_over_is_the_judges_failure(pool):
    judge = pool(batch_attempts=2)
    with pytest.raises(BatchLost, match=r"judges\.odd: 2 actors died or took more than 600 s \(batch_timeout\) over"):
        judge.dies([*TEXTS, "poison"])
    assert judge.dies(TEXTS) == [len(text) for text in TEXTS]  # the actors came back


def test_a_pool_without_actors_stops_the_run(pool, tmp_path):
    judge = pool(max_restarts=0, batch_attempts=9)
    with pytest.raises(PoolLost, match=r"judges\.odd: no actor is left"):
        judge.dies(["poison"])
    with pytest.raises(StopRun):
        judge.lengths(TEXTS)
    judge = pool(batch_attempts=9)
    (tmp_path / "broken").touch()  # its actors are started again, and do not load
    with pytest.raises(PoolLost, match=r"judges\.odd: no actor is left; the last: .*no such weights"):
        judge.dies(["poison"])


def test_what_does_not_start_says_why(pool, tmp_path):
    with pytest.raises(UserError, match=r"judges\.odd\.resources\.num_gpus: 2 actors need 2, the Ray cluster has 0"):
        pool(resources={"num_gpus": 1})
    with pytest.raises(UserError, match=r"judges\.odd\.resources, runtime_env: "):
        pool(resources={"num_cpus": 0}, runtime_env={"pip": 3})
    (tmp_path / "broken").touch()
    with pytest.raises(ValueError, match="no such weights"):
        pool()


def make_interpreter(folder, version):
    """An environment of this Python with all that this one has, and a package of its own version."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "little.py").write_text(f"def score(texts):\n    return [{version} * len(text) for text in texts]\n")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return str(folder / "bin" / Path(sys.executable).name)


def test_judges_that_need_different_versions_of_a_package_judge_side_by_side(cluster, tmp_path):
    judges = {
        f"judge{version}": {
            "kind": f"{ODD}:Versioned",
            "pool": {"runtime_env": {"py_executable": make_interpreter(tmp_path / version, version)}},
        }
        for version in ("1", "2")
    }
    config = make_config(task="text", judges=judges)
    loaded = {}
    try:
        for name, judge in config.judges.items():
            judge = placed(judge, name)
            judge.check()  # which this process could not
            loaded[name] = judge.load("cpu")
        assert loaded["judge1"].score(["ab", "c"]) == [2, 1] and loaded["judge2"].score(["ab", "c"]) == [4, 2]
        with pytest.raises(ModuleNotFoundError):
            config.judges["judge1"].load("cpu")
    finally:
        for one in loaded.values():
            one.close()
