"""Policy folders that drop prompts, or lack positions for them, are refused before their weights load."""

import json
import shutil

import pytest
from support.encoded_prompts import plain_rows
from support.marked_tokenizers import words
from support.text_task import train_here

from grpo_jax.config.sections import DataSection
from grpo_jax.models.architectures import read_model_config
from grpo_jax.rollout.encoding import make_encode

IGNORES = "{% for m in messages %}<|im_start|>user\nHello<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
LLAMA = dict(
    model_type="llama", vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
)


def few_positions(policy):
    fields = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 30}))


@pytest.mark.parametrize(
    ("damage", "words", "messages"),
    [
        (lambda policy: (policy / "tokenizer.json").unlink(), (), ["makes the same", "tree'"]),
        (lambda policy: (policy / "chat_template.jinja").write_text(IGNORES), (), ["leaves out a message"]),
        (lambda _: None, ["--data.max_prompt_tokens=3"], ["data.max_prompt_tokens is 3: shorten it or raise the"]),
        (few_positions, (), ["the policy has 30 (max_position_embeddings in its config.json)", "tree'"]),
    ],
)
def test_a_run_with_such_a_folder_is_refused_in_one_line(place, tmp_path, capsys, damage, words, messages):
    policy = shutil.copytree(place.policy, tmp_path / "policy")
    damage(policy)
    for weights in policy.glob("*.safetensors"):
        weights.unlink()  # it is told before they are looked for
    assert train_here(place.config, tmp_path / "run", f"--policy.path={policy}", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(message in error for message in messages)


@pytest.mark.parametrize("prompts", [["a fox"] * 3, ["a fox", "red"], [""]])
def test_prompts_that_are_the_same_may_become_the_same(prompts):
    make_encode(words(), DataSection(), pad_id=0, rows=plain_rows(prompts))


def scaled(positions, kind="rope_type", **scaling):
    return {"max_position_embeddings": positions, "rope_scaling": {kind: scaling.pop("name"), **scaling}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({}, None),
        (scaled(512, name="linear", factor=4.0), 2048),
        (scaled(32768, "type", name="yarn", factor=4.0, original_max_position_embeddings=32768), 131072),
        (scaled(131072, name="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192), 131072),
    ],
)  # fmt: skip
def test_positions_are_those_that_the_config_scales_to(fields, expected):
    assert read_model_config(LLAMA | fields).context_length == expected
