"""The shape of a policy from its config.json, or from what is published of it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import jax

from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError, shown
from grpo_jax.models import hf
from grpo_jax.models.hf.image_processor import most_patches
from grpo_jax.models.hf.weights import read_json
from grpo_jax.models.policy import lora_config, needs_tower
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.tower import tower_shapes
from grpo_jax.training.memory import Shown

PUBLISHED_POLICIES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2-VL-7B-Instruct": {
        "model_type": "qwen2_vl",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, "hidden_size": 3584},
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        "model_type": "qwen2_5_vl",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
        | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    },
}
"""What their config.json says, for planning where there is no connection."""


def read_shape(path: str) -> Any:
    """The decoder's config of a folder or hub id."""
    folder = policy_folder(path)
    if os.path.isfile(folder / "config.json"):
        raw = read_json(folder / "config.json")
    elif path in PUBLISHED_POLICIES:
        raw = PUBLISHED_POLICIES[path]
    elif os.path.isdir(folder) or path.count("/") != 1:
        raise UserError(f"policy.path: expected a folder with config.json or a hub id, got {shown(path, 120)}")
    else:
        raw = read_json(_download_config(path))
    return hf.model_config(folder, raw)


def policy_folder(path: str) -> Path:
    """Where a policy's folder would be, by the path or name that a config has."""
    return Path(os.path.expanduser(str(own_package("bridges").bundled(path, "policy") or path)))


def read_shown(config: Config, model: Any) -> tuple[Shown | None, list[str]]:
    """The pictures that the policy is shown, or None; and what to say about its vision tower."""
    prompt, answer = config.task.count_pictures(config)
    answers = answer * (config.sampling.turns - 1)
    vision = getattr(model, "vision", None)
    if vision is None:
        if prompt or answers:
            raise UserError(f"policy.path: {config.policy.path} has no vision tower, and there are pictures to see")
        return None, []
    tower = f"vision tower: {tower_size(vision):,} parameters"
    if not prompt and not answers and not needs_tower(config.policy, lora_config(config.policy.lora, model)):
        return None, [f"{tower}, not loaded (prompts are text); an export copies them"]
    patches = most_patches(policy_folder(config.policy.path), vision, config.data.picture_size)
    tokens = patches // vision.merged
    room = config.data.max_prompt_tokens
    if prompt * tokens > room:
        raise UserError(
            f"data.max_prompt_tokens: {prompt} pictures of {tokens} tokens do not fit into {room}; allow longer ones, "
            "or choose a smaller data.picture_size"
        )
    trained = "trained" if config.policy.vision == "train" else "frozen"
    places = f"{prompt} in a prompt" + (f", {answers} among the turns" if answers else "")
    return Shown(prompt, answers, patches), [f"{tower}, {trained}; pictures of {tokens} tokens: {places}"]


def _download_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # offline, gated, no such id: hub and transport raise many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"policy.path: {name!r} is no folder here, and the hub did not give its config.json ({reason})"
        ) from error


def tower_size(vision: VisionConfig) -> int:
    """Numbers in a vision tower."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tower_shapes(vision)))
