"""Memory of a run on each device before any weight is loaded: the policy's and its judges', and whether it fits.

Parameters, optimizer state and reference are counted from shapes. Sampling and update are compiled for arrays that do
not exist, and the compiler reports their memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from grpo_jax.config.fields import flat, require
from grpo_jax.config.judge import Judge
from grpo_jax.config.named import own_package
from grpo_jax.config.run import POLICY, Config
from grpo_jax.errors import UserError, one_line, short_repr
from grpo_jax.models import hf
from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.hf.image_processor import most_patches
from grpo_jax.models.hf.weights import read_json
from grpo_jax.models.lora import count_weights
from grpo_jax.models.policy import lora_config, needs_tower, weight_dtype
from grpo_jax.models.sharding import make_mesh
from grpo_jax.models.vision.tower import tower_shapes
from grpo_jax.planning import MEMORY
from grpo_jax.planning.programs import Report, report, run_programs
from grpo_jax.planning.targets import Target, open_devices
from grpo_jax.training.memory import GIB, Shown, state_shapes, tree_bytes
from grpo_jax.training.state import TrainState, policy_collection, trained_weights

RUNTIME = GIB // 2
"""A CUDA context and its libraries, for JAX and for torch each."""
FREE = 0.05
"""Share of a device left for fragmentation."""
_RUNTIME = "runtime"


_QWEN_7B = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
_QWEN_7B |= {"num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_TOWER_2 = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, "hidden_size": 3584}
_TOWER_2_5 = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "patch_size": 14}
_TOWER_2_5 |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
PUBLISHED_POLICIES: Mapping[str, Mapping[str, object]] = {
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
    prompt, observation = config.task.count_pictures(config)
    observations = observation * (config.sampling.turns - 1)
    vision = getattr(model, "vision", None)
    if vision is None:
        require(
            not prompt and not observations,
            "policy.path",
            "a model that has a vision tower: there are pictures",
            config.policy.path,
        )
        return None, []
    tower = f"vision tower: {count_weights(tower_shapes(vision)):,} parameters"
    if not prompt and not observations and not needs_tower(config.policy, lora_config(config.policy.lora, model)):
        return None, [f"{tower}, not loaded (prompts are text); an export copies them"]
    patches = most_patches(policy_folder(config.policy.path), vision, config.data.picture_size)
    tokens = patches // vision.merged
    room = config.data.max_prompt_tokens
    expected = f"at least {prompt * tokens} for {prompt} pictures of {tokens} tokens, or a smaller data.picture_size"
    require(prompt * tokens <= room, "data.max_prompt_tokens", expected, room)
    trained = "trained" if config.policy.vision == "train" else "frozen"
    places = f"{prompt} in a prompt" + (f", {observations} among the turns" if observations else "")
    return Shown(prompt, observations, patches), [f"{tower}, {trained}; pictures of {tokens} tokens: {places}"]


def _download_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # offline, gated, no such id: hub and transport raise many kinds
        reason = f"is no folder, and the hub gave no config.json ({one_line(error)})"
        raise UserError(f"policy.path: {name!r} {reason}") from error


class Line(NamedTuple):
    """A line of a plan: name, bytes, reason, and whether the bytes count (of two that take turns one does)."""

    name: str
    bytes: int
    note: str = ""
    counted: bool = True


class DeviceMemory(NamedTuple):
    """A device in a plan: its name, bytes, and lines by part."""

    name: str
    capacity: int
    parts: dict[str, list[Line]]

    @property
    def needed(self) -> int:
        """Bytes of all lines that count."""
        return sum(line.bytes for lines in self.parts.values() for line in lines if line.counted)

    @property
    def room(self) -> int:
        """Bytes that may be taken."""
        return int((1 - FREE) * self.capacity)

    @property
    def excess(self) -> int:
        """Bytes too much; 0 if it fits."""
        return max(self.needed - self.room, 0)


def plan_policy(
    config: Config, model: ModelConfig, shown: Shown | None, target: Target | None
) -> tuple[PolicyMemory, Mapping[str, Report]]:
    """Return the policy's memory on each of its devices, and its programs; UserError if it cannot be made so."""
    section = config.policy.mesh
    try:
        devices = jax.devices() if target is None else open_devices(target)
        mesh = make_mesh(section.fsdp, section.tensor, devices) if section.size > 1 else None
        return policy_memory(config, model, mesh, shown, target=target, device=devices[0])
    except ValueError as error:  # no such projection, a weight that does not divide, too few devices
        raise UserError(f"policy: {error}") from error


def plan_devices(
    config: Config, memory: PolicyMemory, gib: tuple[float, ...], target: Target | None = None
) -> list[DeviceMemory]:
    """Return all devices with their lines; `gib` is the memory of each, () for this machine's."""
    on_tpu = target is not None and target.platform == "tpu"
    kind = "tpu" if on_tpu else "gpu"
    if on_tpu:  # torch runs the judges, on the host
        policy = tuple(f"tpu:{chip}" for chip in range(config.policy.mesh.size))
        places = {POLICY: policy} | {name: ("cpu",) for name in config.judges}
    else:
        places = places_of(config, len(gib))
    names = list(dict.fromkeys([*(f"{kind}:{i}" for i in range(len(gib))), *sum(places.values(), ())]))
    cards = {name: DeviceMemory(name, _capacity(name, gib), {}) for name in names}
    lines = {POLICY: policy_lines(config, memory, target)}
    placed = own_package("bridges", "ray_pool").placed
    lines |= {name: judge_lines(placed(judge, name)) for name, judge in config.judges.items()}
    for part, where in places.items():
        for name in where:
            cards[name].parts[part] = lines[part]
    for card in cards.values():
        runtimes = (POLICY in card.parts) + bool(card.parts.keys() - {POLICY})
        if card.name != "cpu" and runtimes:
            card.parts[_RUNTIME] = [Line("contexts and libraries", runtimes * RUNTIME, "allowance")]
    return list(cards.values())


def places_of(config: Config, count: int) -> dict[str, tuple[str, ...]]:
    """Devices of each part, by a run's rules, on `count` cards or on this machine; remote judges are left out."""
    size, placement = config.policy.mesh.size, own_package("bridges", "placement")
    requests = config.requests
    away = {name: requests.pop(name) for name in config.elsewhere}
    for name, where in away.items():
        require(where == "cpu", f"devices.{name}", "none for a judge in a pool, which has its resources", where)
    if not count:
        places, _ = placement.place(requests, policy_count=size)
    else:
        if requests[POLICY] == "auto" and size > 1:
            requests[POLICY] = ",".join(f"gpu:{card}" for card in range(size))
        places, _ = placement.resolve(requests, count)
    return {name: tuple(where.split(",")) for name, where in {**places, **away}.items()}


def _capacity(name: str, gib: tuple[float, ...]) -> int:
    if name == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    index = int(name.partition(":")[2])
    if gib:
        require(index < len(gib), MEMORY, f"the memory of {name} too", list(gib))
        return int(gib[index] * GIB)
    import torch

    return torch.cuda.get_device_properties(index).total_memory


def policy_lines(config: Config, memory: PolicyMemory, target: Target | None = None) -> list[Line]:
    """The policy's lines of a device; of sampling and update the larger counts, or both where one is ahead."""
    section, lora, ahead = config.policy, config.policy.lora, memory.behind > 0
    rank = f" of rank {lora.rank}" if lora.rank else ""
    dtype = f"{section.frozen_dtype}, adapters{rank} float32" if lora.used else "float32"
    no_copy = "the base without its adapters" if lora.used else "none: no KL"
    compiled = "compiled" if target is None else f"compiled for {target}"
    note = "at most: compiled in float32" if memory.widened else compiled
    larger = memory.sampling > memory.update
    return [
        Line("parameters", memory.weights, dtype),
        Line("optimizer state", memory.optimizer, "float32"),
        Line("reference", memory.reference, "float32" if memory.reference else no_copy),
        *([Line("policy that samples ahead", memory.behind, "float32")] if ahead else []),
        Line("sampling", memory.sampling, f"{note}, with its caches", larger or ahead),
        Line("update", memory.update, f"{note}, with its gradients; remat: {section.remat}", not larger or ahead),
    ]


def judge_lines(judge: Judge) -> list[Line]:
    """The lines that a judge reports (`memory`)."""
    return [Line(*row) for row in judge.memory()]


def judge_savings(judge: Judge) -> dict[str, object]:
    """Return the fields of a judge by which its memory becomes less; none for a pool's."""
    smaller = {"batch_size": 1, "dtype": "bfloat16", "use_t5": False}
    fields = type(judge).model_fields.keys() & smaller if judge.pool is None else ()
    size = {name: sum(line.bytes for line in judge_lines(judge.replace(**{name: smaller[name]}))) for name in fields}
    whole = sum(line.bytes for line in judge_lines(judge))
    return {name: value for name, value in smaller.items() if size.get(name, whole) < whole}


def list_savings(config: Config, devices: Sequence[DeviceMemory]) -> dict[str, object]:
    """Return fields that take less memory of devices that are full; those that change no result come first."""
    full = {part for device in devices if device.excess for part in device.parts}
    section, prompts = config.policy, config.training.prompts_per_batch // config.training.minibatches
    policy: dict[str, object] = {
        "policy.remat": "layer",
        "training.grad_accumulation_steps": max(prompts // section.mesh.fsdp, 1),
        "training.chunk_prompts": 1,
    }
    policy |= {"policy.frozen_dtype": "bfloat16"} if section.lora.used else {"policy.lora.rank": 16}
    policy["policy.compute_dtype"] = "bfloat16"
    others = len(devices) - 1
    if section.mesh.size == 1 and section.quantised == "none" and others > 1 and prompts % others == 0:
        policy["policy.mesh.fsdp"] = others
    policy["sampling.group_size"] = max(config.sampling.group_size // 2, 2)
    changes = policy if POLICY in full else {}
    for name in full & config.judges.keys():
        changes |= {f"judges.{name}.{field}": value for field, value in judge_savings(config.judges[name]).items()}
    now = flat(config.model_dump())
    return {name: value for name, value in changes.items() if now[name] != value}
