"""Memory of each device of a run: bytes by part, whether they fit, and what to change if not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from grpo_jax.config.build import flat, to_dict
from grpo_jax.config.fields import require
from grpo_jax.config.judge import Judge
from grpo_jax.config.named import own_package
from grpo_jax.config.run import POLICY, Config
from grpo_jax.errors import UserError
from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.sharding import make_mesh
from grpo_jax.planning import MEMORY
from grpo_jax.planning.policy import PolicyMemory, policy_memory
from grpo_jax.planning.programs import Report
from grpo_jax.planning.targets import Target, open_devices
from grpo_jax.training.memory import GIB, Shown

RUNTIME = GIB // 2
"""A CUDA context and its libraries, for JAX and for torch each."""
FREE = 0.05
"""Share of a device left for fragmentation."""
_RUNTIME = "runtime"


class Line(NamedTuple):
    """A line of a plan: name, bytes, reason, and whether the bytes count (of two that take turns one does)."""

    name: str
    bytes: int
    note: str = ""
    counted: bool = True


class Card(NamedTuple):
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


def plan_cards(
    config: Config, memory: PolicyMemory, gib: tuple[float, ...], target: Target | None = None
) -> list[Card]:
    """Return all devices with their lines; `gib` is the memory of each, () for this machine's."""
    on_tpu = target is not None and target.platform == "tpu"
    kind = "tpu" if on_tpu else "gpu"
    if on_tpu:  # torch runs the judges, on the host
        policy = tuple(f"tpu:{chip}" for chip in range(config.policy.mesh.size))
        places = {POLICY: policy} | {name: ("cpu",) for name in config.judges}
    else:
        places = places_of(config, len(gib))
    names = list(dict.fromkeys([*(f"{kind}:{i}" for i in range(len(gib))), *sum(places.values(), ())]))
    cards = {name: Card(name, _capacity(name, gib), {}) for name in names}
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
        if index >= len(gib):
            raise UserError(f"{MEMORY}: {name} is asked for, but there are {len(gib)} devices in the list")
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


def list_savings(config: Config, cards: Sequence[Card]) -> dict[str, object]:
    """Return fields that take less memory of devices that are full; those that change no result come first."""
    full = {part for card in cards if card.excess for part in card.parts}
    section, prompts = config.policy, config.training.prompts_per_batch // config.training.minibatches
    policy: dict[str, object] = {
        "policy.remat": "layer",
        "training.grad_accumulation_steps": max(prompts // section.mesh.fsdp, 1),
        "training.chunk_prompts": 1,
    }
    policy |= {"policy.frozen_dtype": "bfloat16"} if section.lora.used else {"policy.lora.rank": 16}
    policy["policy.compute_dtype"] = "bfloat16"
    others = len(cards) - 1
    if section.mesh.size == 1 and section.quantised == "none" and others > 1 and prompts % others == 0:
        policy["policy.mesh.fsdp"] = others
    policy["sampling.group_size"] = max(config.sampling.group_size // 2, 2)
    changes = policy if POLICY in full else {}
    for name in full & config.judges.keys():
        changes |= {f"judges.{name}.{field}": value for field, value in judge_savings(config.judges[name]).items()}
    now = flat(to_dict(config))
    return {name: value for name, value in changes.items() if now[name] != value}
