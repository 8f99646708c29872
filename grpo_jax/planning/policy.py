"""Memory of a run's policy on each device, before any weight is loaded.

Parameters, optimizer state and reference are counted from shapes (`jax.eval_shape`). For the rest of sampling and
update, both are compiled for arrays that do not exist, and XLA reports the program's temporary memory
(`memory_analysis`).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError, short_repr
from grpo_jax.models import hf
from grpo_jax.models.families import ModelConfig
from grpo_jax.models.hf.image_processor import most_patches
from grpo_jax.models.hf.weights import read_json
from grpo_jax.models.lora import count_weights
from grpo_jax.models.policy import configured_functions, lora_config, needs_tower, weight_dtype
from grpo_jax.models.sharding import gather
from grpo_jax.models.variables import VALUE, VISUAL
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.tower import tower_shapes
from grpo_jax.rollout.rollout import IN_FLIGHT
from grpo_jax.sampling.episodes import make_episode_sampler
from grpo_jax.sampling.sampler import Samples, bucket_size, make_sampler
from grpo_jax.sampling.samplers import sampling_params
from grpo_jax.sampling.token_choice import SamplingParams
from grpo_jax.training.memory import (
    Program,
    Shown,
    picture_shapes,
    state_shapes,
    temporary_bytes,
    tree_bytes,
    update_bytes,
)
from grpo_jax.training.state import TrainState, policy_collection, trained_weights

_QWEN_7B: dict[str, object] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_TOWER_2 = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, "hidden_size": 3584}
_TOWER_2_5 = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584} | {
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
PUBLISHED_POLICIES = {
    "Qwen/Qwen2-VL-7B-Instruct": _QWEN_7B
    | {"model_type": "qwen2_vl", "max_position_embeddings": 32768, "vision_config": _TOWER_2},
    "Qwen/Qwen2.5-VL-7B-Instruct": _QWEN_7B
    | {"model_type": "qwen2_5_vl", "max_position_embeddings": 128000, "vision_config": _TOWER_2_5},
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
        apart: The copy of the layers that decoding reads (`Policy.unstack`).
        cache: Keys and values of one chunk's prompts and completions; of episodes also those that the turn before
            left, and the next chunk's, which waits for its answers.
        sampling: Rest of sampling, or of the vision tower before it.
        gradients: Of the trained ones, float32.
        update: Rest of the update: activations, logits of a chunk of tokens, the optimizer's steps.
        widened: Compiled in float32 because a CPU has no narrower products: sampling and update are upper bounds.
        behind: The copy of the trained ones that samples ahead (training.lag); 0 where the newest sample.
        compiled_for: The target whose compiler said so; "" for this machine. `sampling` and `update` are then whole
            programs, with their caches, log-probabilities and gradients.
    """

    parameters: int
    trained: int
    weights: int
    optimizer: int
    reference: int
    apart: int
    cache: int
    sampling: int
    gradients: int
    update: int
    widened: bool
    behind: int = 0
    compiled_for: str = ""

    @property
    def held(self) -> int:
        """Bytes held all the time."""
        return self.weights + self.optimizer + self.reference + self.behind

    @property
    def peak(self) -> int:
        """Held bytes, and the larger of sampling and update, which take turns; where one is ahead, both."""
        both = (self.to_sample, self.to_update)
        return self.held + (sum(both) if self.behind else max(both))

    @property
    def to_sample(self) -> int:
        """Bytes while completions are drawn."""
        return self.apart + self.cache + self.sampling

    @property
    def to_update(self) -> int:
        """Bytes of an update."""
        return self.gradients + self.update


def policy_memory(
    config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None = None, shown: Shown | None = None
) -> PolicyMemory:
    """Count and compile `config` with a policy of the shape `model`; of a mesh, the bytes of one device.

    Prompts have data.max_prompt_tokens. ValueError for adapters on projections that the architecture lacks, or
    weights that the mesh does not divide.
    """
    narrow = {config.policy.compute_dtype, weight_dtype(config.policy)} - {"float32"}
    widened = bool(narrow) and jax.default_backend() == "cpu"
    state = state_shapes(config, model, mesh, pictures=shown is not None)
    held = held_memory(config, state)
    same = {"compute_dtype": "float32", "frozen_dtype": "float32"}
    wide = dataclasses.replace(config, policy=dataclasses.replace(config.policy, **same)) if widened else config
    apart = _layers_bytes(state_shapes(wide, model, mesh, pictures=shown is not None))
    # Where they differ in type, the head is cast once for a whole program.
    casts = weight_dtype(config.policy) != config.policy.compute_dtype and widened
    cast = model.vocab_size * model.hidden_size * jnp.dtype(config.policy.compute_dtype).itemsize if casts else 0
    return held._replace(
        apart=_layers_bytes(state),
        cache=cache_bytes(config, model),
        sampling=_beside_the_cache(wide, model, mesh, shown, apart) + cast,
        update=max(update_bytes(wide, model, mesh, shown) - held.gradients, 0) + cast,
        widened=widened,
    )


def held_memory(config: Config, state: TrainState) -> PolicyMemory:
    """Count what no compiler is needed for, of `state_shapes`: sampling and the update's temporaries are 0."""
    trained = trained_weights(state.variables)
    return PolicyMemory(
        parameters=count_weights(state.variables["params"]),
        trained=count_weights(trained),
        weights=tree_bytes(state.variables),
        optimizer=tree_bytes(state.opt_state),
        reference=tree_bytes(state.reference),
        apart=0,
        cache=0,
        sampling=0,
        gradients=tree_bytes(trained),
        update=0,
        widened=False,
        behind=tree_bytes(trained[policy_collection(trained)]) if config.training.lag > 0 else 0,
    )


def cache_bytes(config: Config, model: ModelConfig) -> int:
    """Keys and values of a chunk of prompts and of their completions: 2 · layers · K · E · (P · L + P · G · T).

    Of episodes T is that of all turns, and the cache of the turns before the last stays until the last one's is
    filled from it. Chunks on their way at once add another one's.
    """
    section, length = config.sampling, bucket_size(config.data.max_prompt_tokens, smallest=8)
    if section.turns == 1:
        return _cached(config, model, length + section.group_size * section.max_new_tokens)
    waiting = length + section.group_size * _slots(config, section.turns - 1)
    others = min(IN_FLIGHT, config.training.prompts_per_batch // _chunk(config)) - 1
    growing = waiting + section.group_size * _slots(config, section.turns)
    return _cached(config, model, growing + others * waiting)


def _slots(config: Config, turns: int) -> int:
    """Cache slots of an episode of so many turns: of each answer also the token before it."""
    section = config.sampling
    return turns * section.max_new_tokens + (turns - 1) * (bucket_size(section.max_answer_tokens, smallest=8) + 1)


def _cached(config: Config, model: ModelConfig, tokens: int) -> int:
    """Bytes of keys and values of so many tokens for each prompt of a chunk, on one device."""
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    size = per_token * bucket_size(_chunk(config)) * tokens * jnp.dtype(config.policy.compute_dtype).itemsize
    return size // (config.policy.mesh.fsdp * config.policy.mesh.tensor)


def _beside_the_cache(
    config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None, shown: Shown | None, apart: int
) -> int:
    """Rest of sampling a chunk beside its cache and the copy of the layers; of episodes the larger of two turns."""
    section, length = config.sampling, bucket_size(config.data.max_prompt_tokens, smallest=8)
    first = _cached(config, model, length + section.group_size * section.max_new_tokens)
    beside = [_compiled_sampling(config, model, mesh, shown) - apart - first]
    if section.turns > 1:  # the prompts' and what the turns before left come from outside
        last = _cached(config, model, section.group_size * _slots(config, section.turns))
        beside.append(temporary_bytes(turn_program(config, model, mesh)) - apart - last)
    return max(*beside, 0)


def _layers_bytes(state: TrainState) -> int:
    return tree_bytes([tree.get("layers", {}) for name, tree in state.variables.items() if name not in (VALUE, VISUAL)])


def _chunk(config: Config) -> int:
    return config.training.chunk_prompts or config.training.prompts_per_batch


def _params(config: Config) -> SamplingParams:
    return sampling_params(config.sampling, config.sampling.group_size, config.sampling.temperature)


def turn_program(
    config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None, platform: str | None = None
) -> Program:
    """Return the sampling of an episode's last turn."""
    policy = configured_functions(config.policy, model, mesh, platform)
    sampler = make_episode_sampler(policy, _params(config), eos_ids=(0,), pad_id=0)
    prompts, section = _chunk(config), config.sampling
    tokens = np.zeros((prompts, config.data.max_prompt_tokens), np.int32)
    reply = np.zeros((prompts, section.group_size, section.max_answer_tokens), np.int32)
    keys = jax.random.split(jax.random.key(0), prompts)
    replies = reply, np.ones_like(reply, bool), keys, np.ones(reply.shape[:2], bool)
    state = state_shapes(config, model, mesh, platform=platform)
    variables = {name: tree for name, tree in state.variables.items() if name != VALUE}
    carried = jax.eval_shape(lambda v: sampler.begin(v, tokens, np.ones_like(tokens, bool), keys)[1], variables)
    for _ in range(section.turns - 2):
        carried = jax.eval_shape(lambda v, before: sampler.go_on(v, before, *replies)[1], variables, carried)
    go_on = jax.jit(lambda v, before: gather(sampler.go_on(v, before, *replies)[0], mesh))
    return Program(go_on, (variables, carried), section.max_new_tokens)


def _compiled_sampling(config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None, shown: Shown | None) -> int:
    """Temporary bytes of sampling a chunk of prompts; with pictures, also of their states or the tower before."""
    programs = sampling_programs(config, model, mesh, shown)
    sampling = temporary_bytes(programs["sample"])
    if "vision" not in programs:
        return sampling
    _, pictures = programs["vision"].arguments
    _, states = programs["sample"].arguments
    seen = tree_bytes(pictures) + temporary_bytes(programs["vision"])
    return tree_bytes(states) + max(sampling, seen)


def sampling_programs(
    config: Config,
    model: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    shown: Shown | None,
    platform: str | None = None,
) -> dict[str, Program]:
    """Return the sampling of a chunk of prompts, and the vision tower before it where the prompts hold pictures."""
    policy = configured_functions(config.policy, model, mesh, platform)
    sample = make_sampler(policy, _params(config), eos_ids=(0,), pad_id=0)
    tokens = np.zeros((_chunk(config), config.data.max_prompt_tokens), np.int32)
    keys = jax.random.split(jax.random.key(0), len(tokens))

    def draw(variables: dict, states: object) -> Samples:
        return gather(sample(variables, tokens, np.ones_like(tokens, bool), keys, states), mesh)

    variables = state_shapes(config, model, mesh, pictures=shown is not None, platform=platform).variables
    variables = {name: tree for name, tree in variables.items() if name != VALUE}
    turns = config.sampling.max_new_tokens
    if shown is None or not shown.prompt:
        return {"sample": Program(jax.jit(draw), (variables, None), turns)}
    assert model.vision is not None and policy.encode_images is not None
    pictures = picture_shapes(model.vision, (len(tokens), shown.prompt), shown.patches)
    states = jax.eval_shape(policy.encode_images, variables, pictures)
    return {
        "vision": Program(jax.jit(policy.encode_images), (variables, pictures)),
        "sample": Program(jax.jit(draw), (variables, states), turns),
    }


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
