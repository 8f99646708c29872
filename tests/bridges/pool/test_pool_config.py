"""The fields of a pool beside a judge's own: reading, refusals, help and saving, without Ray."""

import asyncio
import copy
import pickle
import types

import pytest
from support.imports import ROOT

from bridges import ray_cluster
from bridges.judges.open_clip import OpenClip
from bridges.ray_pool import JudgeActor, Pooled, placed
from grpo_jax.config.fields import identity
from grpo_jax.config.judge import Judge, PoolSection
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.reward_registry import JUDGE_AS_REWARD, ResolvedReward, bind
from grpo_jax.rollout.rewards import collect_rewards


class Sized(Judge):
    """A judge that says what it takes."""

    def memory(self):
        return [("weights", 10, "float32")]


POOL = {"replicas": 2, "resources": {"num_gpus": 1}, "runtime_env": {"a": 1}}


def pooled(**fields):
    return placed(make_config(task="text", judges={"a": {"kind": "open_clip", "pool": fields}}).judges["a"], "judges.a")


def test_fields_of_a_pool_make_a_pooled_judge_and_come_back_from_a_file():
    values = {"kind": "open_clip", "model": "ViT", "pool": POOL}
    config = make_config(task="text", judges={"a": values, "b": "open_clip"})
    pool = PoolSection(replicas=2, resources={"num_gpus": 1.0}, runtime_env={"a": 1})
    assert config.judges == {"a": OpenClip(model="ViT", pool=pool), "b": OpenClip()}
    saved = config.model_dump()["judges"]
    assert saved["a"] == {"kind": "open_clip", **OpenClip(model="ViT").model_dump(), "pool": pool.model_dump()}
    assert make_config(config.model_dump()) == config == make_config(task="text", judges=config.judges)
    assert config.judges["a"].model == "ViT" and copy.deepcopy(config.judges["a"]) == config.judges["a"]
    assert pickle.loads(pickle.dumps(config.judges["a"])) == config.judges["a"]
    assert identity(config) == identity(make_config(task="text", judges={"a": OpenClip(model="ViT"), "b": "open_clip"}))


def test_where_a_pool_is_and_what_it_takes():
    config = make_config(task="text", judges={"a": {"kind": "open_clip", "pool": {"replicas": 2}}, "b": "open_clip"})
    assert config.requests == {"policy": "auto", "a": "cpu", "b": "auto"}
    (copies,) = Pooled(Sized(), PoolSection(replicas=3), "judges.a").memory()
    assert copies[:3] == ("weights", 30, "float32, in 3 actors")
    (elsewhere,) = pooled(replicas=2, resources={"num_gpus": 1}).memory()
    assert elsewhere[1] == 0 and "2 actors of a Ray cluster, each with 1 of its cards" in elsewhere[2]
    with pytest.raises(UserError, match="devices: expected none for a judge in a pool"):
        pooled(replicas=2).load("gpu:1")


def test_a_function_is_a_judge_by_its_path():
    file = ROOT / "tests" / "bridges" / "pool" / "odd_judges.py"
    judge = make_config(task="text", judges={"a": {"kind": "function", "name": f"{file}:letters"}}).judges["a"]
    judge.check()
    assert judge.load("cpu")(["p"], ["abca"], wish=["a"], other=[1]) == [4 / 8 + 2]
    with_options = judge.replace(name=f"{file}:deadly", options={"folder": "/nowhere"})
    assert with_options.load("cpu")(["p"], ["abca"], ["a"]) == [4 / 8 + 2]
    resolved, messages = (
        ResolvedReward("a", JUDGE_AS_REWARD, "a", messages=None),
        [[{"role": "user", "content": "abc"}]],
    )
    reward = bind(resolved, {"a": judge.replace(name=f"{file}:talkative").load("cpu")})  # like any reward of the user
    given = {"prompt_messages": messages, "completion_messages": messages, "is_conversation": [True]}
    given["log_metric"] = lambda *_: None
    assert collect_rewards({"a": reward}, ["p"], ["c"], given, 1) == [[[3]]]
    with pytest.raises(UserError, match="has no nothing"):
        judge.replace(name=f"{file}:nothing").check()
    with pytest.raises(UserError, match=r"judges.a.name: expected a value"):
        make_config(task="text", judges={"a": "function"})


def test_a_functions_options_shadow_columns_and_each_call_has_its_own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("""
def used(completions, *, words, most=1, **columns):
    words.append("more")
    return [float(len(words) * most)] * len(completions)
""")
    options = {"words": ["one"], "most": 3}
    judge = make_config(task="text", judges={"a": {"kind": "function", "name": f"{file}:used", "options": options}})
    reward = bind(ResolvedReward("a", JUDGE_AS_REWARD, "a", messages=None), {"a": judge.judges["a"].load("cpu")})
    for _ in range(2):
        assert collect_rewards({"a": reward}, ["p"], ["c"], {"most": [5], "words": [["x"]]}, 1) == [[[6]]]
    with pytest.raises(UserError, match=r"^options: expected arguments of .*own.py:used, got \['mots'\]"):
        judge.judges["a"].replace(options={"words": [], "mots": 3}).check()


def test_no_column_is_an_option_of_a_shipped_reward():
    judge = make_config(task="text", judges={"a": {"kind": "function", "name": "grpo_jax.rewards:think_format"}})
    reward = bind(ResolvedReward("a", JUDGE_AS_REWARD, "a", messages=None), {"a": judge.judges["a"].load()})
    columns = {"tag": ["algebra"], "opened": [True]}  # such as the kind of a problem
    assert collect_rewards({"a": reward}, ["p"], ["<think>a</think> b"], columns, 1) == [[[1]]]


class Rounding:
    """A judge that says how torch rounds where it is loaded."""

    def load(self, device):
        import torch

        return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("tf32", [False, True])
def test_an_actor_rounds_as_the_runs_process_does(tf32, rounding):
    for part in rounding:  # torch's own default allows TF32 in convolutions alone
        part.allow_tf32 = not tf32
    assert JudgeActor(Rounding(), "gpu:0", "", 0.0, (False, tf32))._loaded == (tf32, tf32)


def test_the_cluster_that_a_process_is_on_is_known_by_its_address(monkeypatch):
    """It may be one that Python joined before, or between two runs."""
    ray = types.SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(ray_cluster, "_joined", {"address": "10.0.0.6:6379", "for_run": True})
    monkeypatch.setattr(ray_cluster, "_shut_down", lambda: None)
    monkeypatch.setattr(ray_cluster, "import_ray", lambda **_: ray)
    monkeypatch.setattr(ray_cluster, "is_gone", lambda: False)
    monkeypatch.setattr(ray_cluster, "cluster_address", lambda: "10.0.0.5:6379")
    ray_cluster.leave()
    ray_cluster.join("10.0.0.5:6379")
    with pytest.raises(UserError, match=r"expected the cluster that this process is on already, 10\.0\.0\.5:6379"):
        ray_cluster.join("10.0.0.6:6379")


class Connected(Judge):
    """A judge whose client is bound to the event loop of its first call."""

    def load(self, device):
        loops = []

        async def score(texts):
            loops.append(asyncio.get_running_loop())
            return [float(loop is loops[0]) for loop in loops]

        return score


def test_an_actor_keeps_one_event_loop_for_all_batches():
    actor = JudgeActor(Connected(), "cpu", "", 0.0, (False, False))
    with actor._runner:
        assert [actor.answer("", (["a"],), {}) for _ in range(3)] == [[1.0], [1.0, 1.0], [1.0, 1.0, 1.0]]
