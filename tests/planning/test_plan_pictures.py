"""Plans of policies with a vision tower: its weights, the pictures' tokens, and its memory."""

import json

import jax
import pytest
from support.tiny_decoders import QWEN2_FIELDS
from support.vision.folders import SETTINGS, picture, write_rows

from grpo_jax.config.command_line import parse
from grpo_jax.models.architectures import read_model_config
from grpo_jax.models.lora import count_weights
from grpo_jax.models.policy import Policy
from grpo_jax.models.vision.tower import init_tower
from grpo_jax.planning.memory import held_memory, read_shape, read_shown
from grpo_jax.planning.programs import Shown, batch_shapes, state_shapes, tree_bytes
from grpo_jax.train import main

TINY = {
    **QWEN2_FIELDS,
    "model_type": "qwen2_5_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "vision_config": {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
    | {"num_heads": 2, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
}
SMALL = (
    *("--training.prompts_per_batch=4", "--sampling.group_size=3", "--sampling.max_new_tokens=6"),
    *("--data.max_prompt_tokens=24", "--training.grad_accumulation_steps=2", "--training.inner_epochs=1"),
)
LORA = ("--policy.lora.rank=2", "--policy.frozen_dtype=bfloat16")
MODEL = read_model_config(TINY)
ONE = Shown(prompt=1, observations=0, patches=64)


def configured(*arguments):
    return parse(["--task=text", *SMALL, *arguments])


def held(config, *, pictures=False):
    return held_memory(config, state_shapes(config, MODEL, None, pictures=pictures))


def update_batch(config, shown=None):
    policy = Policy.from_section(config.policy, MODEL)
    return batch_shapes(config, policy, state_shapes(config, MODEL, None, pictures=shown is not None), shown)


@pytest.fixture(scope="module")
def tower():
    """The shapes of its parameters."""
    return jax.eval_shape(lambda: init_tower(MODEL.vision, jax.random.key(0)))


@pytest.fixture
def folder(tmp_path):
    """A policy's config.json, and how its pictures are prepared."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "policy" / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return tmp_path / "policy"


def test_a_tower_is_counted_where_there_are_pictures(tower):
    text, seen = (held(configured(), pictures=pictures) for pictures in (False, True))
    assert seen.weights - text.weights == tree_bytes(tower)
    assert (seen.trained, seen.optimizer) == (text.trained, text.optimizer)
    narrow = held(configured("--policy.frozen_dtype=bfloat16"), pictures=True)
    assert seen.weights - narrow.weights == tree_bytes(tower) // 2


def test_a_trained_tower_has_moments(tower):
    text, trained = held(configured()), held(configured("--policy.vision=train"))
    assert trained.trained - text.trained == trained.parameters - text.parameters == count_weights(tower)
    assert trained.optimizer - text.optimizer == 2 * tree_bytes(tower)


def test_adapters_on_the_tower_are_trained(tower):
    text = held(configured(*LORA))
    both = held(configured(*LORA, "--policy.lora.vision=true"))
    kernels = {"qkv": (16, 48), "proj": (16, 16), "gate_proj": (16, 24), "up_proj": (16, 24), "down_proj": (24, 16)}
    adapters = sum(2 * 2 * sum(shape) for shape in kernels.values())  # two layers of rank 2
    assert both.trained - text.trained == adapters
    assert both.weights - text.weights == tree_bytes(tower) // 2 + 4 * adapters


def test_an_update_takes_states_or_pictures():
    """States of a frozen tower; pictures where it is trained; both in prompts and among the turns."""
    batches = []
    turns = ("--sampling.turns=2", "--sampling.max_observation_tokens=24", "--task.environment=games.py:say")
    both = Shown(prompt=2, observations=1, patches=64)
    for arguments in (turns, (*turns, "--policy.vision=train"), (*turns, *LORA, "--policy.lora.vision=true")):
        batches.append(update_batch(configured(*arguments), both))
    frozen, trained, adapted = batches
    assert {name: states.states.shape for name, states in frozen.pictures.items()} == {
        "pictures": (4, 2, 16, 32),
        "observations": (4, 3, 1, 16, 32),
    }
    for batch in (trained, adapted):
        pictures, observations = batch.pictures["pictures"], batch.pictures["observations"]
        assert pictures.patches.shape == (4, 2, 64, 96) and observations.patches.shape == (4, 3, 1, 64, 96)
        assert pictures.windows.shape == (4, 2, 4, 4)
    assert not update_batch(configured()).pictures


def test_the_plan_says_what_is_seen(folder, tower, not_compiled, capsys, tmp_path):
    rows = write_rows(tmp_path / "data", [{"prompt": f"say {i}", "image": picture(i)} for i in range(8)])
    arguments = [*SMALL, f"--policy.path={folder}", "--task=text", f"--data.prompts={rows}"]
    assert main([*arguments, "--rewards=[{name: 'judge.py:letters'}]", "--plan", "--device_memory_gib=16"]) == 0
    size = count_weights(tower)
    assert f"vision tower: {size:,} parameters, frozen; pictures of 16 tokens: 1 in a prompt" in capsys.readouterr().out
    config = parse(arguments)
    assert read_shown(config, read_shape(str(folder)))[0] == ONE
    words = parse([*SMALL, f"--policy.path={folder}", "--task=text"])
    line = f"vision tower: {size:,} parameters, not loaded (prompts are text); an export copies them"
    assert read_shown(words, MODEL) == (None, line)
