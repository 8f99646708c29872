"""Memory of each device of a run: bytes by part, whether they fit, and what to change if not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from grpo_jax.config.build import flat, merged, to_dict
from grpo_jax.config.fields import require
from grpo_jax.config.help import spelled
from grpo_jax.config.named import own_package
from grpo_jax.config.run import POLICY, Config, make_config
from grpo_jax.errors import UserError
from grpo_jax.models.families import ModelConfig
from grpo_jax.models.sharding import make_mesh
from grpo_jax.planning import MEMORY
from grpo_jax.planning.policy import PolicyMemory, held_memory, policy_memory
from grpo_jax.planning.target_plan import Report, plan_programs
from grpo_jax.planning.targets import Target, open_devices
from grpo_jax.training.memory import GIB, Shown, state_shapes

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
    def excess(self) -> int:
        """Bytes too much; 0 if it fits."""
        return max(self.needed - self.room, 0)

    @property
    def room(self) -> int:
        """Bytes that may be taken."""
        return int((1 - FREE) * self.capacity)

    @property
    def runtime(self) -> int:
        """Bytes of contexts and libraries, which no change saves."""
        return sum(line.bytes for line in self.parts.get(_RUNTIME, ()))


class Planner:
    """Plans of configs with one policy's shape on the same devices; each shape is compiled once."""

    def __init__(
        self, model: ModelConfig, gib: tuple[float, ...], shown: Shown | None = None, target: Target | None = None
    ):
        """Take the decoder's config, the devices' memory in GiB, the pictures shown to the policy, and the target."""
        self._model = model
        self._target = target
        self.programs: dict[str, Report] = {}
        self._gib = gib
        self._shown = shown
        self._planned: dict[str, PolicyMemory] = {}

    def policy(self, config: Config) -> PolicyMemory:
        """The policy's memory on each of its devices."""
        relevant = (config.policy, config.training, config.sampling, config.data, config.algorithm, config.ppo)
        if (key := repr(relevant)) not in self._planned:
            section = config.policy.mesh
            try:
                devices = jax.devices() if self._target is None else open_devices(self._target)
                mesh = make_mesh(section.fsdp, section.tensor, devices) if section.size > 1 else None
                if self._target is None:
                    self._planned[key] = policy_memory(config, self._model, mesh, self._shown)
                else:
                    self._planned[key] = self._on_target(config, self._target, devices, mesh)
            except ValueError as error:  # no such projection, a weight that does not divide, too few devices
                raise UserError(f"policy: {error}") from error
        return self._planned[key]

    def _on_target(
        self, config: Config, target: Target, devices: Sequence[jax.Device], mesh: jax.sharding.Mesh | None
    ) -> PolicyMemory:
        programs = plan_programs(config, self._model, target, devices[0], mesh, self._shown)
        self.programs = self.programs or programs
        working = {name: report.working_bytes for name, report in programs.items()}
        sampling = [working.pop(name) for name in ("vision", "sample", "turn") if name in working]
        held = held_memory(config, state_shapes(config, self._model, mesh, pictures=self._shown is not None))
        return held._replace(
            sampling=max(sampling), update=max(working.values()), gradients=0, compiled_for=str(target)
        )

    def cards(self, config: Config) -> list[Card]:
        """All devices with their lines."""
        on_tpu = self._target is not None and self._target.platform == "tpu"
        places = places_on_tpu(config) if on_tpu else places_of(config, len(self._gib))
        kind = "tpu" if on_tpu else "gpu"
        names = list(dict.fromkeys([*(f"{kind}:{i}" for i in range(len(self._gib))), *sum(places.values(), ())]))
        cards = {name: Card(name, _capacity(name, self._gib), {}) for name in names}
        lines = {POLICY: policy_lines(config, self.policy(config))}
        lines |= {name: judge_lines(judge) for name, judge in config.judges.items()}
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


def places_on_tpu(config: Config) -> dict[str, tuple[str, ...]]:
    """Devices of each part where the policy is on TPUs: judges, which torch runs, are on the host."""
    policy = tuple(f"tpu:{chip}" for chip in range(config.policy.mesh.size))
    return {POLICY: policy} | {name: ("cpu",) for name in config.judges}


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


def policy_lines(config: Config, memory: PolicyMemory) -> list[Line]:
    """The policy's lines of a device; of sampling and update the larger counts, or both where one is ahead."""
    section, lora = config.policy, config.policy.lora
    larger = memory.to_sample > memory.to_update
    sampling, update = larger or memory.behind > 0, not larger or memory.behind > 0
    limit = _limit(memory)
    behind = [Line("policy that samples ahead", memory.behind, "float32")] if memory.behind else []
    no_copy = "the base without its adapters" if lora.used else "none: no KL"
    rank = f" of rank {lora.rank}" if lora.rank else ""
    dtype = f"{section.frozen_dtype}, adapters{rank} float32" if lora.used else "float32"
    held = [
        Line("parameters", memory.weights, dtype),
        Line("optimizer state", memory.optimizer, "float32"),
        Line("reference", memory.reference, "float32" if memory.reference else no_copy),
        *behind,
    ]
    if memory.compiled_for:
        note = f"compiled for {memory.compiled_for}, with its"
        return [
            *held,
            Line("sampling", memory.sampling, f"{note} caches", sampling),
            Line("update", memory.update, f"{note} gradients; remat: {section.remat}", update),
        ]
    return [
        *held,
        *_sampling_lines(config, memory, sampling),
        Line("update: gradients", memory.gradients, "float32", update),
        Line("update: activations", memory.update, f"{limit}; remat: {section.remat}", update),
    ]


def _sampling_lines(config: Config, memory: PolicyMemory, counted: bool) -> list[Line]:
    sampling, turns = config.sampling, config.sampling.turns
    chunk = config.training.chunk_prompts or config.training.prompts_per_batch
    written = f"{sampling.group_size} x {sampling.stream_tokens}"
    tokens = f"{chunk} x ({config.data.max_prompt_tokens} + {written})"
    held = "tokens" if turns == 1 else f"tokens, and what {turns - 1} turns before held"
    return [
        Line("sampling: layers apart", memory.apart, "a copy in the order of decoding", counted),
        Line("sampling: decode cache", memory.cache, f"{tokens} {held}", counted),
        Line("sampling: the rest", memory.sampling, _limit(memory), counted),
    ]


def _limit(memory: PolicyMemory) -> str:
    return "at most: compiled in float32" if memory.widened else "compiled"


def judge_lines(judge: object) -> list[Line]:
    """The lines that a judge reports (`memory`)."""
    count = getattr(judge, "memory", None)
    return [Line(type(judge).__name__, 0, "it does not say")] if count is None else [Line(*row) for row in count()]


def list_savings(config: Config, cards: Sequence[Card], target: Target | None = None) -> dict[str, object]:
    """Return fields that take less memory of devices that are full; those that change no result come first."""
    full = {part for card in cards if card.excess for part in card.parts}
    section, prompts = config.policy, config.training.prompts_per_batch // config.training.minibatches
    policy: dict[str, object] = {
        "policy.remat": "layer",
        "training.accumulation": max(prompts // section.mesh.fsdp, 1),
        "training.chunk_prompts": 1,
    }
    if section.lora.used:
        policy["policy.frozen_dtype"] = "bfloat16"
    else:
        policy["policy.lora.rank"] = 16
    policy["policy.compute_dtype"] = "bfloat16"
    parts = len(cards) - 1
    if target is not None and config.training.lag:  # which several processes refuse
        parts = min(parts, target.devices)
    if section.mesh.size == 1 and section.quantised == "none" and parts > 1 and prompts % parts == 0:
        policy["policy.mesh.fsdp"] = parts
    policy["sampling.group_size"] = max(config.sampling.group_size // 2, 2)
    changes = policy if POLICY in full else {}
    for name in full & config.judges.keys():
        for fields in getattr(config.judges[name], "savings", list)():
            changes |= {f"judges.{name}.{field}": value for field, value in fields.items()}
    now = flat(to_dict(config))
    return {name: value for name, value in changes.items() if now[name] != value}


def first_that_fits(planner: Planner, config: Config, savings: Mapping[str, object]) -> str | None:
    """Return the first change that makes the run fit by itself, as an option; None if none does."""
    for name, value in savings.items():
        *sections, field = name.split(".")
        values: dict[str, object] = {field: value}
        for section in reversed(sections):
            values = {section: values}
        try:
            cards = planner.cards(make_config(merged(to_dict(config), values)))
        except UserError:  # a change that this run does not take
            continue
        if not any(card.excess for card in cards):
            return option(name, value)
    return None


def option(name: str, value: object) -> str:
    """Spell a field as the command line does."""
    return f"--{name} {spelled(value)}"
