"""Values that cannot be, of each section and between sections: refused by the field's name, with what came."""

import pytest

from grpo_jax.config import make_config
from grpo_jax.errors import UserError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, r"seed: expected a number in \[0, 2\^63\), got -1"),
        ({"data": {"held_out": 0.7}}, r"data.held_out: expected a number < 0.5, got 0.7"),
        # policy
        ({"policy": {"lora": {"rank": -1}}}, "policy.lora.rank: expected a number >= 0, got -1"),
        (
            {"policy": {"lora": {"path": "a", "rank": 2}}},
            "policy.lora.path: expected no rank, alpha or targets beside it",
        ),
        ({"policy": {"new": {"width": 20, "heads": 8}}}, "policy.new.heads: expected a number that divides width = 20"),
        ({"policy": {"mesh": {"fsdp": 0}}}, "policy.mesh.fsdp: expected a number >= 1, got 0"),
        (
            {"policy": {"mesh": {"fsdp": 5}}},
            "policy.mesh.fsdp: expected a divisor of 12, the prompts of one micro-batch",
        ),
        ({"policy": {"quantised": "int8"}}, "policy.quantised: expected none without policy.lora"),
        # sampling
        ({"sampling": {"top_p": 0.0}}, r"sampling.top_p: expected a number > 0, got 0.0"),
        ({"sampling": {"group_size": 1}}, r"sampling.group_size: expected at least 2 \(a group is compared\), got 1"),
        (
            {"sampling": {"group_size": 0}, "algorithm": {"advantage": "gae"}},
            "sampling.group_size: expected a number >=",
        ),
        ({"sampling": {"turns": 0}}, "sampling.turns: expected a number >= 1, got 0"),
        ({"sampling": {"max_answer_tokens": 0}}, "sampling.max_answer_tokens: expected a number >= 1, got 0"),
        (
            {"sampling": {"turns": 2}, "data": {"form": "append"}},
            "sampling.turns: expected 1 with data.form append, which continues the prompt, got 2",
        ),
        # algorithm
        ({"algorithm": {"turn_discount": 1.5}}, r"algorithm.turn_discount: expected a number <= 1, got 1.5"),
        (
            {"algorithm": {"turn_advantage": "return", "advantage": "gae"}},
            "algorithm.turn_advantage: expected 'last' with advantage 'gae', got 'return'",
        ),
        ({"algorithm": {"scale": "batch"}}, "algorithm.scale: expected null with advantage 'gdpo'"),
        (
            {"algorithm": {"advantage": "gae", "dead_groups": "drop"}},
            "algorithm.dead_groups: expected 'keep' with advantage 'gae'",
        ),
        ({"algorithm": {"advantage": "batch", "dead_groups": "resample"}}, "algorithm.dead_groups: expected 'keep'"),
        ({"algorithm": {"entropy_share": 0.0}}, r"algorithm.entropy_share: expected a number > 0, got 0.0"),
        (
            {"algorithm": {"importance_cap": 0.5}},
            "algorithm.importance_cap: expected null, 0 or a number >= 1, got 0.5",
        ),
        ({"algorithm": {"resample_rounds": 0}}, "algorithm.resample_rounds: expected a number >= 1"),
        ({"algorithm": {"kl_corrected": True, "kl_straight_through": True}}, "kl_straight_through: expected false"),
        ({"algorithm": {"clip_low": 2.0}}, "algorithm.clip_low: expected a number <= 1, got 2.0"),
        ({"algorithm": {"preset": "cispo", "clip_low": 0.1}}, "algorithm.clip_low: expected null with preset 'cispo'"),
        ({"algorithm": {"overlong_buffer": 129}}, "overlong_buffer: expected at most sampling.max_new_tokens = 128"),
        # ppo
        ({"ppo": {"discount": 1.1}}, r"ppo.discount: expected a number <= 1, got 1.1"),
        ({"ppo": {"trace": float("nan")}}, "ppo.trace: expected a finite number"),
        ({"ppo": {"value_coef": -1.0}}, "ppo.value_coef: expected a number >= 0"),
        ({"ppo": {"value_rate": 0.0}}, "ppo.value_rate: expected a number > 0"),
        ({"ppo": {"value_clip": 0.0}}, "ppo.value_clip: expected a number > 0"),
        ({"ppo": {"kl_coef": float("inf")}}, "ppo.kl_coef: expected a finite number"),
        ({"ppo": {"kl_target": 1.0}}, "ppo.kl_coef: expected a number > 0 to start from"),
        (
            {"ppo": {"kl_target": 1.0, "kl_coef": 0.1, "kl_horizon": 10}},
            "ppo.kl_horizon: expected at least one batch of 96",
        ),
        # optimizer and training
        ({"optimizer": {"learning_rate": 0.0}}, "optimizer.learning_rate: expected a number > 0, got 0.0"),
        ({"optimizer": {"beta2": 1.0}}, r"optimizer.beta2: expected a number < 1, got 1.0"),
        ({"training": {"minibatches": 5}}, "training.prompts_per_batch: expected a multiple of .* = 5, got 12"),
        ({"training": {"chunk_prompts": 5}}, "training.chunk_prompts: expected a divisor of prompts_per_batch = 12"),
        ({"warm_start": {"batch": 0}}, "warm_start.batch: expected a number >= 1, got 0"),
        ({"evaluation": {"every": -1}}, "evaluation.every: expected a number >= 0, got -1"),
        # rewards
        ({"rewards": [{"name": ""}]}, "rewards.name: expected a name"),
        (
            {"rewards": [{"name": "m:a"}, {"name": "n:a"}]},
            "rewards: .* under another name .*give one a label",
        ),
        (
            {"rewards": [{"name": "m:a", "weight": 1e308}]},
            r"rewards\[0\].weight: expected a number <= 1e\+12, got 1e\+308",
        ),
        (
            {"rewards": [{"name": "m:a", "weight": -1e13}]},
            r"rewards\[0\].weight: expected a number >= -1e\+12, got -1000",
        ),
        ({"algorithm": {"kl_coef": 1e308}}, "algorithm.kl_coef: expected a number <= 1e.12"),
        ({"ppo": {"value_rate": 1e308}}, "ppo.value_rate: expected a number <= 1e.12"),
        ({"optimizer": {"weight_decay": 1e308}}, "optimizer.weight_decay: expected a number <= 1e.12"),
        ({"rewards": [{"name": "m:a", "condition_on": "b"}]}, r"rewards.a.condition_on: expected one of \[\], got 'b'"),
        ({"rewards": [{"name": "m:a", "condition_on": "a"}]}, "rewards.a.condition_on: expected one of"),
        ({"devices": {"scorer": "cpu"}}, "devices.scorer: no such field; there are: policy"),
    ],
)
def test_values_that_cannot_be(values, message):
    with pytest.raises(UserError, match=message):
        make_config(values, task="text")


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
