"""The programs that a run compiles, for arrays that do not exist: here or for a device that is not here.

Their memory is the compiler's; FLOPs and bytes are counted from the jaxpr, loops as often as they turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import SingleDeviceSharding

from grpo_jax.config.run import Config
from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import gather
from grpo_jax.models.variables import VALUE
from grpo_jax.planning.shapes import (
    Program,
    Shown,
    batch_shapes,
    picture_shapes,
    shown_shapes,
    state_shapes,
    tree_bytes,
    update_program,
)
from grpo_jax.planning.targets import Target, compile_for, lowering_for
from grpo_jax.sampling.episodes import make_episode_sampler
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.samplers import sampling_params
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import TrainState, needs_reference
from grpo_jax.training.update import make_forward_step, needs_old_logprobs

_ATTENTION = {"mha_forward": 2, "mha_backward": 7, "mha_preprocess_backward": 0}
"""Products of queries and keys in the Pallas kernels for GPUs, by name; those for TPUs have none."""


# The same programs without LLVM's slow passes: buffers are assigned before them.
_FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Work(NamedTuple):
    """FLOPs of products, and the bytes that they read and write."""

    flops: float = 0.0
    bytes: float = 0.0


class Report(NamedTuple):
    """A program on one device: the compiler's memory, and the work of its products."""

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    work: Work

    @property
    def working_bytes(self) -> int:
        """Bytes beside its arguments; a donated state counts once."""
        return self.temporary_bytes + self.output_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of all."""
        return self.argument_bytes + self.working_bytes

    def bound_seconds(self, target: Target) -> float:
        """Return the larger of FLOPs over the peak and bytes over the bandwidth."""
        return max(self.work.flops / target.kind.flops, self.work.bytes / target.kind.bandwidth)


def run_programs(
    config: Config,
    model: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    shown: Shown | None,
    platform: str | None = None,
) -> dict[str, Program]:
    """Return what a run compiles, by name: vision, sample, turn, logprobs, update."""
    policy = Policy.from_section(config.policy, model, mesh, platform)
    state = state_shapes(config, model, mesh, pictures=shown is not None, platform=platform)
    programs = _sampling_programs(config, policy, state, shown)
    if needs_old_logprobs(config.algorithm, config.training) or needs_reference(config.algorithm, config.ppo):
        programs["logprobs"] = _logprobs_program(config, policy, state, shown)
    return programs | {"update": update_program(config, model, mesh, shown, platform)}


def _sampling_programs(config: Config, policy: Policy, state: TrainState, shown: Shown | None) -> dict[str, Program]:
    """Return the vision tower where prompts hold pictures, the sampling of a chunk of prompts, and of a last turn."""
    section, prompts = config.sampling, config.training.chunk_prompts or config.training.prompts_per_batch
    params = sampling_params(section, section.group_size, section.temperature)
    variables = {name: tree for name, tree in state.variables.items() if name != VALUE}
    tokens = np.zeros((prompts, config.data.max_prompt_tokens), np.int32)
    keys = jax.random.split(jax.random.key(0), prompts)
    given = tokens, np.ones_like(tokens, bool), keys
    programs, states = {}, None
    if shown is not None and shown.prompt:
        pictures = picture_shapes(policy.config.vision, (prompts, shown.prompt), shown.patches)
        states = jax.eval_shape(policy.encode_images, variables, pictures)
        programs["vision"] = Program(jax.jit(policy.encode_images), (variables, pictures))
    sample = make_sampler(policy, params, eos_ids=(0,), pad_id=0)
    draw = jax.jit(lambda variables, states: gather(sample(variables, *given, states), policy.mesh))
    programs["sample"] = Program(draw, (variables, states), section.max_new_tokens)
    if section.turns == 1:
        return programs
    sampler = make_episode_sampler(policy, params, eos_ids=(0,), pad_id=0)
    observation = np.zeros((prompts, section.group_size, section.max_observation_tokens), np.int32)
    observations = observation, np.ones_like(observation, bool), keys, np.ones(observation.shape[:2], bool)
    carried = jax.eval_shape(lambda v: sampler.begin(v, *given)[1], variables)
    for _ in range(section.turns - 2):
        carried = jax.eval_shape(lambda v, before: sampler.go_on(v, before, *observations)[1], variables, carried)
    go_on = jax.jit(lambda v, before: gather(sampler.go_on(v, before, *observations)[0], policy.mesh))
    return programs | {"turn": Program(go_on, (variables, carried), section.max_new_tokens)}


def _logprobs_program(config: Config, policy: Policy, state: TrainState, shown: Shown | None) -> Program:
    """Return the old or the reference's log-probabilities of a whole batch."""
    training = config.training
    whole = config.replace(training=training.replace(minibatches=1))
    forward = make_forward(policy, temperature=config.sampling.temperature)
    pictures = shown_shapes(config, policy.config, policy, state, shown)
    batch = batch_shapes(whole, state, forward, policy.mesh, pictures)
    step = make_forward_step(forward, grad_accumulation_steps=training.minibatches * training.grad_accumulation_steps)
    return Program(jax.jit(step), (state.variables, batch.read_by_policy()))


def report_program(program: Program, target: Target | None, device: jax.Device, devices: int = 1) -> Report:
    """Compile a program and return its memory and its work on one of the devices."""
    return read_memory(compile_program(program, target, device), count_work(program, devices))


def read_memory(compiled: jax.stages.Compiled, work: Work) -> Report:
    """Return the memory that the compiler reports."""
    memory = compiled.memory_analysis()
    assert memory is not None  # these compilers say it
    output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Report(memory.argument_size_in_bytes, memory.temp_size_in_bytes, output, work)


def compile_program(program: Program, target: Target | None, device: jax.Device) -> jax.stages.Compiled:
    """Compile a program for a device of the target, for this machine's, or for those of its arguments' shardings."""
    if target is None:
        fast = _FAST_COMPILE if device.platform == "cpu" else None
        return program.function.lower(*program.arguments).compile(compiler_options=fast)
    arguments, single = program.arguments, SingleDeviceSharding(device)
    if not any(leaf.sharding is not None for leaf in jax.tree.leaves(arguments)):
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=single), arguments)
    with lowering_for(target):
        lowered = program.function.lower(*arguments)
    return compile_for(target, lowered)


def count_work(program: Program, devices: int = 1) -> Work:
    """Return a device's share of a program's work; its bytes are at least those of its arguments.

    A loop of unknown length writes tokens: `program.turns` in all, over the loops of most rows. Those over fewer rows
    go on where half of the prompts are done, and do not turn.
    """
    traced = program.function.trace(*program.arguments).jaxpr.jaxpr
    jaxpr, _ = dce_jaxpr(traced, [True] * len(traced.outvars))  # without products that nothing reads
    loops = list(_token_loops(jaxpr))
    most = max(map(_rows, loops), default=0)
    full = sum(_rows(loop) == most for loop in loops)
    turns = {id(loop): (program.turns / full if program.turns else 1) * (_rows(loop) == most) for loop in loops}
    flops, moved = _work(jaxpr, turns) / devices
    return Work(float(flops), max(float(moved), tree_bytes(program.arguments)))


def _inner(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs of an equation's parameters."""
    for value in eqn.params.values():
        for entry in value if isinstance(value, tuple | list) else (value,):
            if isinstance(entry, ClosedJaxpr | Jaxpr):
                yield entry.jaxpr if isinstance(entry, ClosedJaxpr) else entry


def _token_loops(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            yield eqn
        elif eqn.primitive.name != "pallas_call":
            for inner in _inner(eqn):
                yield from _token_loops(inner)


def _rows(loop: JaxprEqn) -> int:
    """Return the number of rows that a loop carries flags of."""
    return max((_size(var) for var in loop.outvars if var.aval.dtype == bool), default=0)


def _work(jaxpr: Jaxpr, turns: Mapping[int, float]) -> np.ndarray:
    """Return FLOPs and bytes, f64 [2]."""
    total = np.zeros(2)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("dot_general", "conv_general_dilated", "pallas_call"):
            total += _kernel(eqn)
        elif name == "cond":
            total += max((_work(inner, turns) for inner in _inner(eqn)), key=tuple, default=0)
        else:
            count = eqn.params["length"] if name == "scan" else turns.get(id(eqn), 1)
            total += count * sum(_work(inner, turns) for inner in _inner(eqn))
    return total


def _kernel(eqn: JaxprEqn) -> tuple[float, float]:
    """Return FLOPs and bytes of a product, or of one of the attention kernels."""
    given, made = eqn.invars, eqn.outvars
    traffic = sum(_size(var) * var.aval.dtype.itemsize for var in (*given, *made))
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return (2.0 * _size(made[0]) * math.prod(given[0].aval.shape[axis] for axis in contracted), traffic)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = given[1].aval.shape
        outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return (2.0 * _size(made[0]) * math.prod(kernel) / outputs, traffic)
    if eqn.params["name"] == "decode_attention":  # caches are read as far as they are written: half of one that fills
        keys, caches = given[1].aval.shape[-1], given[-2:]
        unread = sum(_size(var) * var.aval.dtype.itemsize for var in caches) * 1.5  # half of it, and all as a result
        return (4.0 * _size(made[0]) * (keys + caches[0].aval.shape[-1] / 2), traffic - unread)
    backward = {1: 3, 2: 4}.get(len(made), 0) if len(given) > 5 else 2  # TPU: dq; dk and dv
    products = _ATTENTION.get(eqn.params["name"], backward)
    keys = max(given[1].aval.shape[1:3])
    return (products * float(_size(given[0])) * keys, traffic)  # each query's product with half of the keys


def _size(var: Var) -> int:
    return math.prod(var.aval.shape)
