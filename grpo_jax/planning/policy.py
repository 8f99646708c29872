"""Memory of a run's policy on each of its devices, before any weight is loaded.

Parameters, optimizer state and reference are counted from shapes. Sampling and update are compiled for arrays that do
not exist, and the compiler reports their memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError, short_repr
from grpo_jax.models import hf
from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.hf.image_processor import most_patches
from grpo_jax.models.hf.weights import read_json
from grpo_jax.models.lora import count_weights
from grpo_jax.models.policy import lora_config, needs_tower, weight_dtype
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.tower import tower_shapes
from grpo_jax.planning.programs import Report, report, run_programs
from grpo_jax.planning.targets import Target
from grpo_jax.training.memory import Shown, state_shapes, tree_bytes
from grpo_jax.training.state import TrainState, policy_collection, trained_weights

_QWEN_7B = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
_QWEN_7B |= {"num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_TOWER_2 = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, "hidden_size": 3584}
_TOWER_2_5 = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "patch_size": 14}
_TOWER_2_5 |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
PUBLISHED_POLICIES: dict[str, dict[str, object]] = {
    name: _QWEN_7B | {"tie_word_embeddings": False, "model_type": kind, "vision_config": tower} | length
    for name, kind, tower, length in (
        ("Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl", _TOWER_2, {"max_position_embeddings": 32768}),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", _TOWER_2_5, {"max_position_embeddings": 128000}),
    )
}
"""Shapes from their config.json, for planning without a connection."""


class PolicyMemory(NamedTuple):
    """Bytes that the policy takes on each of its devices.

    Attributes:
        parameters: Number of parameters of the whole policy, without a frozen vision tower.
        trained: Number of those that gradients are taken for.
        weights: Parameters and adapters.
        optimizer: Moments of the trained ones.
        reference: A copy for the KL; 0 where the base itself or nothing is the reference.
        behind: The copy of the trained ones that samples ahead (training.async_level); 0 where the newest sample.
        sampling: Of the sampling programs, their caches included.
        update: Of the update and of log-probabilities, gradients included.
        widened: Compiled in float32 because a CPU has no narrower products: sampling and update are upper bounds.
    """

    parameters: int
    trained: int
    weights: int
    optimizer: int
    reference: int
    behind: int
    sampling: int = 0
    update: int = 0
    widened: bool = False

    @property
    def held(self) -> int:
        """Bytes held all the time."""
        return self.weights + self.optimizer + self.reference + self.behind

    @property
    def peak(self) -> int:
        """Held bytes, and the larger of sampling and update, which take turns; where one is ahead, both."""
        return self.held + (self.sampling + self.update if self.behind else max(self.sampling, self.update))


def held_memory(config: Config, state: TrainState) -> PolicyMemory:
    """Count what no compiler is needed for, of `state_shapes`."""
    trained = trained_weights(state.variables)
    return PolicyMemory(
        parameters=count_weights(state.variables["params"]),
        trained=count_weights(trained),
        weights=tree_bytes(state.variables),
        optimizer=tree_bytes(state.opt_state),
        reference=tree_bytes(state.reference),
        behind=tree_bytes(trained[policy_collection(trained)]) if config.training.async_level > 0 else 0,
    )


def policy_memory(
    config: Config,
    model: ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    shown: Shown | None = None,
    *,
    target: Target | None = None,
    device: jax.Device | None = None,
) -> tuple[PolicyMemory, Mapping[str, Report]]:
    """Count and compile a run's policy of this shape, and return its programs; of a mesh, for one device.

    Prompts have data.max_prompt_tokens. ValueError for adapters on projections that the architecture lacks, or
    weights that the mesh does not divide.
    """
    device = device or jax.devices()[0]
    platform = None if target is None else target.platform
    narrow = {config.policy.compute_dtype, weight_dtype(config.policy)} - {"float32"}
    widened = bool(narrow) and target is None and device.platform == "cpu"
    same = {"compute_dtype": "float32", "frozen_dtype": "float32"}
    wide = config.replace(policy=config.policy.replace(**same)) if widened else config
    programs = run_programs(wide, model, mesh, shown, platform)
    reports = {
        name: report(program, target, device, 1 if mesh is None else mesh.size) for name, program in programs.items()
    }
    # Pictures, their states and a batch are arguments beside the weights.
    working = {
        name: reports[name].working_bytes + tree_bytes(program.arguments[1:]) for name, program in programs.items()
    }
    sampling = max(working.pop(name, 0) for name in ("vision", "sample", "turn"))
    held = held_memory(config, state_shapes(config, model, mesh, pictures=shown is not None))
    return held._replace(sampling=sampling, update=max(working.values()), widened=widened), reports


def read_shape(path: str) -> ModelConfig:
    """Return the decoder's config of a folder or hub id."""
    folder = policy_folder(path)
    if os.path.isfile(folder / "config.json"):
        raw = read_json(folder / "config.json")
    elif path in PUBLISHED_POLICIES:
        raw = PUBLISHED_POLICIES[path]
    elif os.path.isdir(folder) or path.count("/") != 1:
        raise UserError(f"policy.path: expected a folder with config.json or a hub id, got {short_repr(path, 120)}")
    else:
        raw = read_json(_download_config(path))
    return hf.model_config(folder, raw)


def policy_folder(path: str) -> Path:
    """Return a policy's would-be folder, by the config's path or name."""
    return Path(os.path.expanduser(str(own_package("bridges").bundled(path, "policy") or path)))


def read_shown(config: Config, model: ModelConfig) -> tuple[Shown | None, list[str]]:
    """Return the pictures that the policy is shown, or None, and the plan's notes about its vision tower."""
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
    """Return the number of weights of a vision tower."""
    return count_weights(tower_shapes(vision))
