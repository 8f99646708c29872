"""Values that cannot be, of each section and between sections: refused by the field's name, with what came."""

import pytest

from grpo_jax.config.run import make_config
from grpo_jax.config.sections import LoraSection, SamplingSection
from grpo_jax.errors import UserError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        # each kind of bound, at the top, in a section, inside one and in a list
        ({"seed": -1}, r"seed: expected a number in \[0, 2\^63\), got -1"),
        ({"data": {"held_out": 0.7}}, "data.held_out: expected a number < 0.5, got 0.7"),
        ({"policy": {"lora": {"rank": -1}}}, "policy.lora.rank: expected a number >= 0, got -1"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p: expected a number > 0, got 0.0"),
        ({"algorithm": {"clip_low": 2.0}}, "algorithm.clip_low: expected a number <= 1, got 2.0"),
        ({"ppo": {"gae_lambda": float("nan")}}, "ppo.gae_lambda: expected a finite number"),
        ({"ppo": {"value_coef": 1e308}}, "ppo.value_coef: expected a number <= 1000000000000"),
        (
            {"rewards": [{"name": "m:a", "weight": -1e13}]},
            r"rewards\[0\].weight: expected a number >= -1000000000000, got -1000",
        ),
        # policy
        ({"policy": {"lora": {"path": "a", "rank": 2}}}, "policy.lora.path: expected no rank, alpha or targets beside"),
        ({"policy": {"new": {"width": 20, "heads": 8}}}, "policy.new.heads: expected a number that divides width = 20"),
        ({"policy": {"mesh": {"fsdp": 5}}}, "policy.mesh.fsdp: expected a divisor of 12, the prompts of one micro-"),
        ({"policy": {"quantised": "int8"}}, "policy.quantised: expected none without policy.lora"),
        # sampling
        ({"sampling": {"group_size": 1}}, r"sampling.group_size: expected at least 2 \(a group is compared\), got 1"),
        (
            {"sampling": {"turns": 2}, "data": {"form": "append"}},
            "sampling.turns: expected 1 with data.form append, which continues the prompt, got 2",
        ),
        # algorithm
        (
            {"algorithm": {"turn_advantage": "return", "advantage": "gae"}},
            "algorithm.turn_advantage: expected 'last' with advantage 'gae', got 'return'",
        ),
        ({"algorithm": {"scale": "batch"}}, "algorithm.scale: expected null with advantage 'gdpo'"),
        (
            {"algorithm": {"advantage": "gae", "zero_variance_groups": "drop"}},
            "algorithm.zero_variance_groups: expected 'keep' with",
        ),
        (
            {"algorithm": {"advantage": "batch", "zero_variance_groups": "resample"}},
            "algorithm.zero_variance_groups: expected 'keep'",
        ),
        ({"algorithm": {"importance_cap": 0.5}}, "algorithm.importance_cap: expected null, 0 or a number >= 1, got 0."),
        ({"algorithm": {"preset": "cispo", "clip_low": 0.1}}, "algorithm.clip_low: expected null with preset 'cispo'"),
        ({"algorithm": {"overlong_buffer": 129}}, "overlong_buffer: expected at most sampling.max_new_tokens = 128"),
        # training
        ({"training": {"minibatches": 5}}, "training.prompts_per_batch: expected a multiple of .* = 5, got 12"),
        ({"training": {"chunk_prompts": 5}}, "training.chunk_prompts: expected a divisor of prompts_per_batch = 12"),
        # rewards
        ({"rewards": [{"name": ""}]}, "rewards.name: expected a name"),
        ({"rewards": [{"name": "m:a"}, {"name": "n:a"}]}, "rewards: .* under another name .*give one a label"),
        ({"rewards": [{"name": "m:a", "condition_on": "b"}]}, r"rewards.a.condition_on: expected one of \[\], got 'b'"),
        ({"rewards": [{"name": "m:a", "condition_on": "a"}]}, "rewards.a.condition_on: expected one of"),
        (
            {"rewards": [{"name": f"m:{a}", "condition_on": b} for a, b in ("ab", "bc", "ca")]},
            "rewards.a.condition_on: expected a chain that ends, got 'a → b → c → a'",
        ),
        (
            {"rewards": [{"name": "m:a", "threshold": float("nan")}]},
            r"rewards\[0\].threshold: expected a finite number, got nan",
        ),
        ({"devices": {"scorer": "cpu"}}, "devices.scorer: no such field; there are: policy"),
    ],
)
def test_values_that_cannot_be(values, message):
    with pytest.raises(UserError, match=message):
        make_config(values, task="text")


def test_ranges_hold_in_python_too():
    with pytest.raises(UserError, match=r"SamplingSection.top_p: expected a number <= 1, got 2"):
        SamplingSection(top_p=2.0)
    with pytest.raises(UserError, match=r"LoraSection.rank: expected a whole number, got 2.5"):
        LoraSection(rank=2.5)


@pytest.mark.parametrize("advantage", ["gae", "batch"])
def test_a_group_of_one_will_do_without_group_statistics(advantage):
    config = make_config(task="text", sampling={"group_size": 1}, algorithm={"advantage": advantage})
    assert config.sampling.group_size == 1


@pytest.mark.parametrize(
    ("lora", "given", "expected"),
    [({}, None, 1e-6), ({"rank": 2}, None, 1e-4), ({"path": "a"}, None, 1e-4), ({}, 0.5, 0.5)],
)
def test_the_learning_rate_is_safe_for_what_is_trained_unless_it_is_given(lora, given, expected):
    assert make_config(task="text", policy={"lora": lora}, optimizer={"learning_rate": given}).learning_rate == expected
