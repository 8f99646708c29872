"""`python -m grpo_jax.train … --plan [--device_memory_gib 16,16,16]`: what a run needs on each device, and does it fit.

No weight is read: a folder with config.json is enough. The exit code is 0 if it fits, 1 if not, 2 for a user's mistake.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from grpo_jax.config import Config
from grpo_jax.config.command_line import MEMORY, PLAN
from grpo_jax.errors import UserError
from grpo_jax.models import hf
from grpo_jax.models.sharding import make_mesh
from grpo_jax.models.weights import read_json
from grpo_jax.planning import judges as plan_judges
from grpo_jax.planning.advice import Excess, changes_that_fit
from grpo_jax.planning.judges import Row, renderer_rows, scorer_rows
from grpo_jax.planning.policy import GIB, PolicyMemory, policy_memory
from grpo_jax.runs.parts import own_bridges

RUNTIME = GIB // 2
"""A CUDA context and its libraries, for JAX and for torch each."""
FREE = 0.05
"""Of a device, left for what does not fit between other things."""
_PREALLOCATED = 0.75  # JAX's default share of a card


class Card(NamedTuple):
    """A device in a plan: its name, bytes, and rows by part."""

    name: str
    capacity: int
    parts: dict[str, list[Row]]

    @property
    def needed(self) -> int:
        """Bytes of all rows that count."""
        return sum(row.bytes for rows in self.parts.values() for row in rows if row.counted)

    @property
    def excess(self) -> int:
        """Bytes too much; 0 if it fits."""
        return max(self.needed - int((1 - FREE) * self.capacity), 0)


def show_plan(config: Any, gib: tuple[float, ...]) -> int:
    """Prints the plan of a config; returns the exit code: 0 if it fits, 1 if not.

    Args:
        config: The run.
        gib: Memory of each device, or () for those of this machine.

    Raises:
        UserError: There is nothing to plan, or a shape cannot be read.
    """
    if not isinstance(config, Config):
        raise UserError(f"{PLAN}: a CartPole run takes some megabytes; there is nothing to plan")
    if config.policy.path == "new":
        raise UserError(f"{PLAN}: policy.path new is made from the catalogue's words when the run begins; it is small")
    model, notes = read_shape(config.policy.path)
    _show_devices(gib, config)
    planner = Planner(model, gib)
    memory, cards = planner.policy(config), planner.cards(config)
    _tell(config, memory, cards, notes)
    full = [card for card in cards if card.excess]
    if not full:
        print("It fits.")
        return 0
    print(f"It does not fit: {', '.join(card.name for card in full)}. Looking for what would …", flush=True)
    # A mesh is compiled for devices that JAX has, or simulates.
    words, left = changes_that_fit(config, min(len(cards), len(jax.devices()) + 1), planner.excess)
    print("It would fit with:" if not left.bytes else f"Still {_gib(left.bytes)} GiB too much with:")
    print("\n".join(f"  {word}" for word in words) or "  (nothing that is known here)")
    if left.bytes:
        print("Take larger devices, a smaller model, or a mesh over more of them (policy.mesh).")
    return 1


def read_shape(path: str) -> tuple[Any, list[str]]:
    """The decoder's config of a folder or hub id, and what to say about the rest of the model."""
    folder = Path(own_bridges()("miniature").path("policy") if path == "miniature" else path).expanduser()
    if (folder / "config.json").is_file():
        raw = read_json(folder / "config.json")
    elif path in plan_judges.PUBLISHED_POLICIES:
        raw = plan_judges.PUBLISHED_POLICIES[path]
    elif folder.is_dir() or path.count("/") != 1:
        raise UserError(f"policy.path: expected a folder with config.json or a hub id, got {path!r}")
    else:
        raw = read_json(_download_config(path))
    notes = []
    vision = raw.get("vision_config") or {}
    if raw.get("model_type") == "qwen2_vl" and vision:
        size = plan_judges.vision_size(vision)
        notes.append(f"vision tower: {size:,} parameters, not loaded (prompts are text); an export copies them")
    return hf.model_config(folder, raw), notes


def _download_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # offline, gated, no such id: hub and transport raise many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"policy.path: {name!r} is no folder here, and the hub did not give its config.json ({reason})"
        ) from error


def _show_devices(gib: tuple[float, ...], config: Config) -> None:
    """Devices that are only planned for are simulated on the CPU, as many as a mesh may want."""
    if not gib:
        return
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", max(len(gib), config.policy.mesh.size))
    except RuntimeError:  # JAX has started already: it keeps the devices that it has
        pass


class Planner:
    """Plans of configs with one policy's shape on the same devices; each shape is compiled once."""

    def __init__(self, model: Any, gib: tuple[float, ...]):
        """Takes the decoder's config and the devices' memory."""
        self._model, self._gib = model, gib
        self._known: dict[str, PolicyMemory] = {}

    def policy(self, config: Config) -> PolicyMemory:
        """The policy's memory, by device."""
        relevant = (config.policy, config.training, config.sampling, config.data, config.algorithm, config.ppo)
        if (key := repr(relevant)) not in self._known:
            section = config.policy.mesh
            try:
                mesh = make_mesh(section.fsdp, section.tensor, jax.devices()) if section.size > 1 else None
                self._known[key] = policy_memory(config, self._model, mesh)
            except ValueError as error:  # no such projection, a weight that does not divide, too few devices
                raise UserError(f"policy: {error}") from error
        return self._known[key]

    def cards(self, config: Config) -> list[Card]:
        """All devices with what would lie on them."""
        places = _places(config, len(self._gib))
        names = list(dict.fromkeys([*(f"gpu:{i}" for i in range(len(self._gib))), *sum(places.values(), ())]))
        cards = {name: Card(name, _capacity(name, self._gib), {}) for name in names}
        rows = {"policy": policy_rows(config, self.policy(config))}
        if "renderer" in places:
            rows |= _judge_rows(config)
        for part, where in places.items():
            for name in where:
                cards[name].parts[part] = rows[part]
        for card in cards.values():
            runtimes = ("policy" in card.parts) + bool({"renderer", "scorer"} & set(card.parts))
            if card.name != "cpu" and runtimes:
                card.parts["runtime"] = [Row("contexts and libraries", runtimes * RUNTIME, "allowance")]
        return list(cards.values())

    def excess(self, config: Config) -> Excess:
        """What a config takes too much."""
        cards = self.cards(config)
        full = [card for card in cards if card.excess]
        parts = frozenset(part for card in full for part in card.parts)
        held = self.policy(config).held
        hopeless = any("policy" in card.parts and held > card.capacity for card in full)
        return Excess(sum(card.excess for card in full), parts, hopeless)


def _places(config: Config, count: int) -> dict[str, tuple[str, ...]]:
    """Devices of each part, by the rules that a run follows, on `count` cards or on this machine."""
    asked, size = config.devices, config.policy.mesh.size
    if config.task != "prompt_enhancement":
        if count:
            return {"policy": tuple(f"gpu:{i}" for i in range(size))}
        return {"policy": tuple("cpu" if d.platform == "cpu" else f"gpu:{d.id}" for d in jax.devices()[:size])}
    placement = own_bridges()("placement")
    if count:
        policy = ",".join(f"gpu:{i}" for i in range(size)) if asked.policy == "auto" and size > 1 else asked.policy
        request = placement.Placement(policy, asked.renderer, asked.scorer)
        found, _ = placement.resolve(request, count)
    else:
        found, _ = placement.place(asked.policy, asked.renderer, asked.scorer, policy_count=size)
    return {"policy": tuple(found.policy.split(",")), "renderer": (found.renderer,), "scorer": (found.scorer,)}


def _capacity(name: str, gib: tuple[float, ...]) -> int:
    if name == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    index = int(name.removeprefix("gpu:"))
    if gib:
        if index >= len(gib):
            raise UserError(f"{MEMORY}: {name} is asked for, but there are {len(gib)} devices in the list")
        return int(gib[index] * GIB)
    import torch

    return torch.cuda.get_device_properties(index).total_memory


def policy_rows(config: Config, memory: PolicyMemory) -> list[Row]:
    """The policy's part of a device; sampling and update take turns, and the larger counts."""
    lora, section = config.policy.lora.rank, config.policy
    sampling = memory.to_sample > memory.to_update
    limit = "at most: compiled in float32" if memory.widened else "compiled"
    no_copy = "the base without its adapters" if lora else "none: no KL"
    dtype = f"{section.frozen_dtype}, adapters of rank {lora} float32" if lora else "float32"
    chunk = config.training.chunk_prompts or config.training.prompts_per_batch
    tokens = (
        f"{chunk} x ({config.data.max_prompt_tokens} + {config.sampling.group_size} x {config.sampling.max_new_tokens})"
    )
    return [
        Row("parameters", memory.weights, dtype),
        Row("optimizer state", memory.optimizer, "float32"),
        Row("reference", memory.reference, "float32" if memory.reference else no_copy),
        Row("sampling: layers apart", memory.apart, "a copy in the order of decoding", sampling),
        Row("sampling: decode cache", memory.cache, f"{tokens} tokens", sampling),
        Row("sampling: the rest", memory.sampling, limit, sampling),
        Row("update: gradients", memory.gradients, "float32", not sampling),
        Row("update: activations", memory.update, f"{limit}; remat: {section.remat}", not sampling),
    ]


def _judge_rows(config: Config) -> dict[str, list[Row]]:
    renderer, scorer = config.renderer, config.scorer
    load = own_bridges()

    def clip(name: str) -> int:
        if name == "miniature":
            name = f"local-dir:{load('miniature').path('scorer')}"
        published = plan_judges.PUBLISHED_CLIPS.get(name.replace("/", "-"))
        return published or load("shapes").clip_size(name)

    path = str(load("miniature").path("renderer")) if renderer.path == "miniature" else renderer.path
    known = plan_judges.PUBLISHED_PIPELINES.get(path)
    sizes, widths, edge = known or load("shapes").pipeline_sizes(path)
    return {
        "renderer": renderer_rows(renderer, sizes, widths, renderer.size or edge),
        "scorer": scorer_rows(scorer, clip),
    }


def _tell(config: Config, memory: PolicyMemory, cards: Sequence[Card], notes: Sequence[str]) -> None:
    print(f"Plan of {config.task}: {config.policy.path}, {memory.parameters:,} parameters, {memory.trained:,} trained")
    for note in notes:
        print(f"  {note}")
    if config.task == "recommendation":
        print("  not counted: what ranks the catalogue")
    for card in cards:
        print(f"{card.name}, {_gib(card.capacity)} GiB")
        for part, rows in card.parts.items():
            print(f"  {part}")
            for row in rows:
                size = _gib(row.bytes) if row.counted else f"({_gib(row.bytes)})"
                print(f"    {row.name:<26}{size:>9}  {row.note}".rstrip())
        verdict = f"{_gib(card.excess)} GiB too much" if card.excess else "fits"
        print(
            f"  needed {_gib(card.needed)} of {_gib((1 - FREE) * card.capacity)} GiB ({FREE:.0%} left free): {verdict}"
        )
        tight = not card.excess and card.needed > _PREALLOCATED * card.capacity
        if tight and "policy" in card.parts and card.name != "cpu":
            print("  JAX takes 75 % of a card by itself: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
