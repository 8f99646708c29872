"""The plan of a run, from config.json alone: whether each device's memory suffices, and the work of each program.

Parameters, optimizer state and reference are counted from shapes. Sampling and update are compiled for abstract arrays,
and the compiler reports their memory. Judges report their own.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax

from grpo_jax.config.fields import require
from grpo_jax.config.files import load_json
from grpo_jax.config.named import own_package
from grpo_jax.config.run import POLICY, Config
from grpo_jax.config.sections import LoraSection
from grpo_jax.errors import UserError, one_line, short_repr
from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.hf import folder as hf
from grpo_jax.models.hf.image_processor import most_patches
from grpo_jax.models.hf.peft import lora_config
from grpo_jax.models.hf.weights import read_json_file
from grpo_jax.models.lora import count_weights, needs_tower
from grpo_jax.models.sharding import make_mesh
from grpo_jax.models.variables import precision_of, weight_dtype
from grpo_jax.models.vision.tower import tower_shapes
from grpo_jax.planning import GIB, MEMORY, PLAN, TARGET
from grpo_jax.planning.programs import (
    Program,
    Report,
    Shown,
    count_work,
    report_program,
    run_programs,
    state_shapes,
    tree_bytes,
)
from grpo_jax.planning.targets import Target, has_compiler, nearest_gpu, open_devices, parse_target, prepare
from grpo_jax.rollout.data import all_rows, row_facts
from grpo_jax.rollout.prompts import prompts_of
from grpo_jax.runs.policy import NEW, bundled_policy
from grpo_jax.training.state import TrainState, policy_collection, trained_weights

RUNTIME = GIB // 2
"""A CUDA context and its libraries, for JAX and for torch each."""
CONTAINER = Path("/sys/fs/cgroup/memory.max")
"""Limit of a container's memory."""
FREE = 0.05
"""Share of a device left for fragmentation."""


@functools.cache
def published_policies() -> Mapping[str, Mapping[str, Any]]:
    """Read the shapes in some config.json of the hub, for planning without a connection."""
    return load_json(Path(__file__).with_name("published.json"))


def show_plan(config: Config, request: Namespace) -> int:
    """Print the plan of a config, with the options of `take_request`; return 0 if it fits, 1 if not."""
    target = parse_target(request.target) if request.target else None
    if config.policy.path == NEW:
        raise UserError(f"{PLAN}: a small policy, made when the run begins, takes little; there is nothing to plan")
    size, gib = config.policy.mesh.size, request.gib
    if target is not None:
        require(size <= target.devices, "policy.mesh", f"at most {target.devices} devices for {TARGET} {target}", size)
        gib = (target.kind.memory / GIB,) * target.devices
    elif gib and has_compiler("cuda"):
        target = nearest_gpu(gib[0], max(len(gib), size))
    if target is not None:
        prepare()
    if gib:
        with suppress(RuntimeError):  # JAX has already started and keeps its devices
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", max(len(gib), size))
    if target is None or target.platform != "tpu":
        places_of(config, len(gib))  # its mistakes come before the minutes of compilation
    model = read_shape(config.policy.path)
    shown, note = read_shown(config, model)
    memory, programs = plan_policy(config, model, shown, target, absent=bool(gib))
    cards = plan_devices(config, memory, gib, target)
    _print_cards(config, memory, cards, note)
    _print_programs(programs, target, memory.estimate)
    if target is not None and config.policy.attn_implementation == "cudnn":
        print("cuDNN's workspace is not counted.")
    if memory.estimate:
        print(f"Sampling and update are estimates: {memory.estimate}. With grpo_jax[targets], XLA compiles for a GPU.")
    full = [card for card in cards if card.excess]
    for card in full:
        placement = own_package("bridges", "placement")
        share = math.floor(100 * (placement.ALLOCATED - card.judges / card.capacity)) / 100
        if card.needed <= card.room and card.bytes_of(POLICY) <= share * card.capacity:
            print(f"{card.name} suffices with the environment variable {placement.FRACTION}={share}.")
        print(f"{card.name} needs less memory with {_remedies(config, card)} (docs/planning.md).")
    print(f"It does not fit: {', '.join(card.name for card in full)}." if full else "It fits.")
    return 1 if full else 0


class PolicyMemory(NamedTuple):
    """The policy's bytes on each of its devices."""

    parameters: int  # number of parameters of the whole policy, without a frozen vision tower
    trained: int  # number of trained parameters
    weights: int  # parameters and adapters
    optimizer: int  # moments of the trained parameters
    reference: int  # a copy for the KL; 0 without a reference, or if the base is the reference
    # the copy of the trained parameters that samples ahead (training.async_level), or 0
    rollout_weights: int
    sampling: int = 0  # of the sampling programs, including KV caches
    update: int = 0  # of the update and of log-probabilities, including gradients
    estimate: str = ""  # how sampling and update were estimated; empty if compiled in their own dtype
    teacher: int = 0  # weights of algorithm.teacher

    @property
    def held(self) -> int:
        """Return the bytes held all the time."""
        return self.weights + self.optimizer + self.reference + self.rollout_weights + self.teacher


def plan_policy(
    config: Config,
    model: ModelConfig,
    shown: Shown | None = None,
    target: Target | None = None,
    *,
    absent: bool = False,
) -> tuple[PolicyMemory, Mapping[str, Report]]:
    """Count and compile a run's policy of this shape; returns its memory on one device, and its programs.

    Prompts have data.max_prompt_tokens. With `absent`, a CPU compiles in place of GPUs, and estimates a narrow dtype.
    UserError for adapters on unknown projections, a weight that the mesh does not divide, or too few devices.
    """
    section = config.policy
    try:
        devices = jax.devices() if target is None else open_devices(target)
        mesh = make_mesh(section.mesh.fsdp, section.mesh.tensor, devices) if section.mesh.size > 1 else None
        programs = run_programs(config, model, mesh, shown, None if target is None else target.platform)
        state = state_shapes(config, model, mesh, pictures=shown is not None)
        narrow = {section.compute_dtype, weight_dtype(section)} - {"float32"}
        note, compiled = "", programs
        if absent and narrow and target is None and devices[0].platform == "cpu":
            note = f"compiled in float32, activations scaled to {section.compute_dtype}"
            same = {"compute_dtype": "float32", "frozen_dtype": "float32"}
            compiled = run_programs(config.replace(policy=section.replace(**same)), model, mesh, shown)
        reports = {}
        for name, program in compiled.items():
            print(f"compiling {name} for {target or devices[0].platform} …", file=sys.stderr, flush=True)
            reports[name] = report_program(program, target, devices[0], section.mesh.size)
            if note:
                reports[name] = _estimate(config, state, name, programs[name], reports[name])
    except ValueError as error:
        raise UserError(f"policy: {error}") from error
    except RuntimeError as error:
        installed = "cuDNN is not detected" not in str(error)
        require(installed, "policy.attn_implementation", "auto; or run pip install nvidia-cudnn-cu13", "cudnn")
        raise
    # Besides weights, pictures, their states and a batch are arguments.
    working = {
        name: reports[name].working_bytes + tree_bytes(program.arguments[1:]) for name, program in programs.items()
    }
    sampling = max(working.pop(name, 0) for name in ("vision", "sample", "turn"))
    memory, teacher = held_memory(config, state), 0
    if path := config.algorithm.teacher:  # see `runs.policy.load_teacher`
        section = section.replace(path=path, lora=LoraSection(), quantised="none")
        teacher = tree_bytes(state_shapes(config.replace(policy=section), read_shape(path), mesh).variables)
    memory = memory._replace(sampling=sampling, update=max(working.values()), estimate=note, teacher=teacher)
    return memory, reports


def _estimate(config: Config, state: TrainState, name: str, program: Program, wide: Report) -> Report:
    """Estimate a program's memory from that of its float32 version, since a CPU computes bfloat16 in float32.

    Activations take half in bfloat16. Gradients stay float32; sampling's copy of float32 weights takes the other half.
    """
    wide_bytes = 0
    if config.policy.compute_dtype == "float32" or (name != "update" and weight_dtype(config.policy) == "float32"):
        wide_bytes = wide.temporary_bytes
    elif name == "update" and config.training.grad_dtype == "float32":
        wide_bytes = min(tree_bytes(trained_weights(state.variables)), wide.temporary_bytes)
    temporary = wide_bytes + (wide.temporary_bytes - wide_bytes) // 2
    work = count_work(program, config.policy.mesh.size)
    return Report(tree_bytes(program.arguments), temporary, wide.output_bytes, work)


def held_memory(config: Config, state: TrainState) -> PolicyMemory:
    """Count the memory of `state_shapes`, without compiling."""
    trained = trained_weights(state.variables)
    return PolicyMemory(
        parameters=count_weights(state.variables["params"]),
        trained=count_weights(trained),
        weights=tree_bytes(state.variables),
        optimizer=tree_bytes(state.opt_state),
        reference=tree_bytes(state.reference),
        rollout_weights=tree_bytes(trained[policy_collection(trained)]) if config.training.async_level > 0 else 0,
    )


def read_shape(path: str) -> ModelConfig:
    """Return the decoder's config of a folder or hub id."""
    folder, published = Path(bundled_policy(path)), published_policies()
    file = folder / "config.json"
    if not os.path.isfile(file) and path not in published:
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(path, "config.json"))
        except Exception as error:  # unknown id, offline, gated: hub and transport raise many types
            expected = f"expected a folder with config.json or a hub id, got {short_repr(path, 120)}"
            raise UserError(f"policy.path: {expected} ({one_line(error)})") from error
    return hf.model_config(folder, read_json_file(file) if os.path.isfile(file) else published[path])


def read_shown(config: Config, model: ModelConfig) -> tuple[Shown | None, str]:
    """Return the policy's pictures, or None, and the plan's line about its vision tower, if any.

    Pictures of prompts are counted if their file is available. With a renderer, each observation has a picture.
    """
    prompt, observations = 0, (config.sampling.turns - 1) * ("renderer" in config.judges)
    if os.path.exists(os.path.expanduser(config.data.prompts)):
        prompt = int(row_facts(all_rows(prompts_of(config)))["pictures"].max())
    vision = model.vision
    if vision is None:
        return None, ""
    tower = f"vision tower: {count_weights(tower_shapes(vision)):,} parameters"
    if not prompt and not observations and not needs_tower(config.policy, lora_config(config.policy.lora, model)):
        return None, f"{tower}, not loaded (prompts are text); an export copies them"
    patches = most_patches(Path(bundled_policy(config.policy.path)), vision, config.data.picture_size)
    tokens = patches // vision.merged
    trained = "trained" if config.policy.vision == "train" else "frozen"
    places = f"{prompt} in a prompt" + (f", {observations} among the turns" if observations else "")
    return Shown(prompt, observations, patches), f"{tower}, {trained}; pictures of {tokens} tokens: {places}"


class Line(NamedTuple):
    """A line of a plan: name, bytes, reason, and whether the bytes count (only one of two alternating parts does)."""

    name: str
    bytes: int
    note: str = ""
    counted: bool = True


class DeviceMemory(NamedTuple):
    """A device in a plan: its name, bytes, lines by part, and the bytes that JAX and torch may take."""

    name: str
    capacity: int
    parts: dict[str, list[Line]]
    limits: tuple[float, float] = (math.inf, math.inf)

    def bytes_of(self, *parts: str) -> int:
        """Return the bytes of the parts' lines that count."""
        return sum(line.bytes for part in parts for line in self.parts.get(part, ()) if line.counted)

    @property
    def needed(self) -> int:
        """Return the bytes of all parts."""
        return self.bytes_of(*self.parts)

    @property
    def judges(self) -> int:
        """Return the bytes of the judges."""
        return self.bytes_of(*self.parts.keys() - {POLICY, "runtime"})

    @property
    def room(self) -> int:
        """Return the available bytes."""
        return int((1 - FREE) * self.capacity)

    @property
    def excess(self) -> int:
        """Return the excess bytes, of all parts, the policy or the judges; 0 if it fits."""
        over = self.needed - self.room, self.bytes_of(POLICY) - self.limits[0], self.judges - self.limits[1]
        return int(max(*over, 0))


def plan_devices(
    config: Config, memory: PolicyMemory, gib: tuple[float, ...], target: Target | None = None
) -> list[DeviceMemory]:
    """Return all devices with their lines; `gib` is the memory of each, () for this machine's."""
    kind = "tpu" if target is not None and target.platform == "tpu" else "gpu"
    if kind == "tpu":  # judges run in torch on the host
        policy = tuple(f"tpu:{chip}" for chip in range(config.policy.mesh.size))
        places = {POLICY: policy} | {name: ("cpu",) for name in config.judges}
    else:
        places = places_of(config, len(gib))
    names = list(dict.fromkeys([*(f"{kind}:{i}" for i in range(len(gib))), *sum(places.values(), ())]))
    cards = {name: DeviceMemory(name, _capacity(name, gib), {}) for name in names}
    placed = own_package("bridges", "ray_pool").placed
    lines = {POLICY: policy_lines(config, memory, target)}
    lines |= {name: [Line(*row) for row in placed(judge, name).memory()] for name, judge in config.judges.items()}
    for part, where in places.items():
        for name in where:
            cards[name].parts[part] = lines[part]
    ours = [cards[name] for name in places[POLICY] if name.startswith("gpu:")]
    shared = [card for card in ours if len(card.parts) > 1]
    if ours:
        needed, total = sum(card.judges for card in shared), min(card.capacity for card in shared or ours)
        shares = own_package("bridges", "placement").memory_shares(needed, total, shared=bool(shared))
        cards |= {card.name: card._replace(limits=tuple(share * card.capacity for share in shares)) for card in ours}
    for card in cards.values():
        runtimes = (POLICY in card.parts) + bool(card.parts.keys() - {POLICY})
        if card.name != "cpu" and runtimes:
            card.parts["runtime"] = [Line("contexts and libraries", runtimes * RUNTIME, "allowance")]
    return list(cards.values())


def places_of(config: Config, count: int) -> dict[str, tuple[str, ...]]:
    """Return each part's devices, by a run's rules, on `count` GPUs or on this machine; without remote judges."""
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
        limit = CONTAINER.read_text().strip() if CONTAINER.is_file() else ""
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(whole, int(limit)) if limit.isdecimal() else whole  # "max" is no limit
    index = int(name.partition(":")[2])
    if gib:
        require(index < len(gib), MEMORY, f"the memory of {name} too", list(gib))
        return int(gib[index] * GIB)
    import torch

    return torch.cuda.get_device_properties(index).total_memory


def policy_lines(config: Config, memory: PolicyMemory, target: Target | None = None) -> list[Line]:
    """Return the policy's lines of a device; the larger of sampling and update counts, or both if sampled ahead."""
    section, lora, ahead = config.policy, config.policy.lora, memory.rollout_weights > 0
    rank = f" of rank {lora.rank}" if lora.rank else ""
    stored = section.frozen_dtype if section.quantised == "none" else section.quantised
    dtype = f"{stored}, adapters{rank} float32" if lora.used else "float32"
    no_copy = "the base without its adapters" if lora.used else "none: no KL"
    compiled = "compiled" if target is None else f"compiled for {target}"
    note = "estimate" if memory.estimate else compiled
    larger = memory.sampling > memory.update
    return [
        Line("parameters", memory.weights, dtype),
        Line("optimizer state", memory.optimizer, "float32"),
        Line("reference", memory.reference, "float32" if memory.reference else no_copy),
        *([Line("policy that samples ahead", memory.rollout_weights, "float32")] if ahead else []),
        *([Line("teacher", memory.teacher, "float32, without its activations")] if memory.teacher else []),
        Line("sampling", memory.sampling, f"{note}, with its caches", larger or ahead),
        Line("update", memory.update, f"{note}, with its gradients; remat: {section.remat}", not larger or ahead),
    ]


def _remedies(config: Config, card: DeviceMemory) -> str:
    """Name the options that need less memory for the largest part of a device, as docs/planning.md does."""
    training, section = config.training, config.policy
    prompts = training.prompts_per_batch // training.minibatches
    steps = [n for n in range(training.grad_accumulation_steps + 1, prompts + 1) if prompts % n == 0]
    options = {
        "update": [f"--training.grad_accumulation_steps {n}" for n in steps[:1]] + ["--policy.remat layer"],
        "sampling": ["--training.chunk_prompts"],
        "optimizer state": ["--policy.lora.rank 16"],
    }
    lines = sorted(card.parts.get(POLICY, []), key=lambda line: -line.bytes)
    named = next((options[line.name] for line in lines if line.counted and line.name in options), [])
    named += ["--policy.compute_dtype bfloat16", *(["a smaller batch_size of judges"] if config.judges else [])]
    present = f"--policy.remat {section.remat}", f"--policy.compute_dtype {section.compute_dtype}"
    return ", ".join(option for option in named if option not in present) or "a smaller sampling.group_size"


def _print_cards(config: Config, memory: PolicyMemory, cards: Sequence[DeviceMemory], note: str) -> None:
    task = config.model_dump()["task"]["kind"]
    print(f"Plan of {task}: {config.policy.path}, {memory.parameters:,} parameters, {memory.trained:,} trained")
    dtype, precision = config.policy.compute_dtype, config.policy.matmul_precision
    print(f"  computed in {dtype}, matmul_precision {precision_of(dtype, precision) or 'default'}")
    if note:
        print(f"  {note}")
    for card in cards:
        print(f"{card.name}, {_gib(card.capacity)} GiB")
        for part, lines in card.parts.items():
            print(f"  {part}")
            for line in lines:
                size = _gib(line.bytes) if line.counted else f"({_gib(line.bytes)})"
                print(f"    {line.name:<26}{size:>9}  {line.note}".rstrip())
        verdict = f"{_gib(card.excess)} GiB too much" if card.excess else "fits"
        mine, others = map(_gib, card.limits)
        limits = f"; JAX takes at most {mine}, torch {others}" if card.limits[0] < card.capacity else ""
        print(f"  needed {_gib(card.needed)} of {_gib(card.room)} GiB ({FREE:.0%} left free{limits}): {verdict}")


def _print_programs(programs: Mapping[str, Report], target: Target | None, estimate: str) -> None:
    """Print memory and work per call of each program, on one device; for a target also the time bound."""
    where = (estimate or "compiled here") if target is None else f"compiled for {target.kind.title}"
    print(f"Programs, {where} and not run, without the judges, which run in torch:")
    bound = "" if target is None else "  bound"
    print(f"  {'':<10}{'arguments':>12}{'temporary':>11}{'peak, GiB':>11}{'TFLOP':>9}{'GB moved':>10}{bound}")
    for name, program in programs.items():
        memory = f"{_gib(program.argument_bytes):>12}{_gib(program.temporary_bytes):>11}{_gib(program.peak_bytes):>11}"
        work = f"{program.work.flops / 1e12:>9.3g}{program.work.bytes / 1e9:>10.3g}"
        bound = "" if target is None else f"  {program.bound_seconds(target):.3g} s"
        print(f"  {name:<10}{memory}{work}{bound}")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
