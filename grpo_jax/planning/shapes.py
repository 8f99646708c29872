"""The shape of a policy from its config.json, or from what is published of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from grpo_jax.config.named import own_package
from grpo_jax.errors import UserError, shown
from grpo_jax.models import hf
from grpo_jax.models.families.fields import POSITIVE, WIDTH, check_kinds
from grpo_jax.models.hf.weights import read_json

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
}
"""What their config.json says, for planning where there is no connection."""


def read_shape(path: str) -> tuple[Any, list[str]]:
    """The decoder's config of a folder or hub id, and what to say about the rest of the model."""
    folder = Path(os.path.expanduser(str(own_package("bridges").bundled(path, "policy") or path)))
    if os.path.isfile(folder / "config.json"):
        raw = read_json(folder / "config.json")
    elif path in PUBLISHED_POLICIES:
        raw = PUBLISHED_POLICIES[path]
    elif os.path.isdir(folder) or path.count("/") != 1:
        raise UserError(f"policy.path: expected a folder with config.json or a hub id, got {shown(path, 120)}")
    else:
        raw = read_json(_download_config(path))
    notes, model = [], hf.model_config(folder, raw)
    vision = raw.get("vision_config") or {}
    if model.model_type == "qwen2_vl" and vision:
        try:
            size = vision_size(vision)
        except (TypeError, LookupError, ValueError) as error:
            raise UserError(
                f"{folder / 'config.json'}: vision_config lacks a size or has a wrong one ({error})"
            ) from error
        notes.append(f"vision tower: {size:,} parameters, not loaded (prompts are text); an export copies them")
    return model, notes


def _download_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # offline, gated, no such id: hub and transport raise many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"policy.path: {name!r} is no folder here, and the hub did not give its config.json ({reason})"
        ) from error


def vision_size(vision: dict[str, Any]) -> int:
    """Numbers in Qwen2-VL's vision tower: patches, blocks of two norms, attention and MLP, and the merger."""
    check_kinds(vision, dict.fromkeys(("embed_dim", "patch_size", "depth", "hidden_size"), WIDTH))
    check_kinds(vision, {"mlp_ratio": POSITIVE})
    width, patch = vision["embed_dim"], vision["patch_size"]
    inner, merged = int(width * vision["mlp_ratio"]), 4 * width
    block = 4 * width + (4 * width * width + 4 * width) + (2 * width * inner + inner + width)
    merger = 2 * width + merged * merged + merged + merged * vision["hidden_size"] + vision["hidden_size"]
    return 3 * 2 * patch * patch * width + vision["depth"] * block + merger
