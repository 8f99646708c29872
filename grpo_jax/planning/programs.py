"""A run's programs for abstract arrays, compiled for this machine or for another device.

Shapes of state and batch come from training's own constructors. The compiler reports a program's memory. FLOPs and
bytes are counted from the jaxpr, with the iterations of loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from grpo_jax.config.run import Config
from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.decoder import init_variables, unstack_and_fuse
from grpo_jax.models.hf.peft import lora_config
from grpo_jax.models.lora import init_adapters, needs_tower, quantise
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import FSDP, gather, shardings
from grpo_jax.models.variables import (
    VALUE,
    VISUAL,
    PyTree,
    init_value_head,
    keeps_layers_apart,
    tower_dtype,
    weight_dtype,
    with_tower,
)
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Pictures, pack_windows
from grpo_jax.models.vision.tower import init_tower
from grpo_jax.planning.targets import Target, compile_for, lowering_for
from grpo_jax.sampling.episodes import make_episode_sampler
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.samplers import sampling_params
from grpo_jax.training import update
from grpo_jax.training.batch import Batch, full_batch
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import TrainState, needs_reference

_CUDNN = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
_ATTENTION = {"mha_forward": 2, "mha_backward": 7, "mha_preprocess_backward": 0} | _CUDNN
"""Products of queries and keys in attention for GPUs, by name of cuDNN's or of a Pallas kernel; those for TPUs have
none."""

# Skip LLVM's slow passes: XLA assigns buffers before them.
_FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Shown(NamedTuple):
    """Maximum pictures in a prompt and in an episode's observations, and the patches of one picture."""

    prompt: int
    observations: int
    patches: int


def picture_shapes(vision: VisionConfig, lead: tuple[int, ...], patches: int) -> Pictures:
    """Return the shapes of a tower's pictures [*lead, S, C]."""
    side = math.isqrt(patches // vision.merged) * vision.merge
    windows = pack_windows(np.array([side, side]), patches, vision)

    def shape(*axes: int, dtype: type = np.int32) -> PyTree:
        return jax.ShapeDtypeStruct((*lead, *axes), dtype)

    return Pictures(
        shape(patches, vision.pixels, dtype=np.float32), shape(2), None if windows is None else shape(*windows.shape)
    )


def state_shapes(
    config: Config,
    model: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    *,
    pictures: bool = False,
    platform: str | None = None,
) -> TrainState:
    """Return the shapes, dtypes and shardings of the initial state, on this platform (None: JAX's first device's)."""
    section, lora = config.policy, lora_config(config.policy.lora, model)

    def start() -> TrainState:
        key = jax.random.key(0)
        variables = init_variables(model, key, param_dtype=weight_dtype(section), lora=lora)
        if pictures or needs_tower(section, lora):
            assert model.vision is not None
            visual = init_tower(model.vision, key, tower_dtype(section))
            variables = with_tower(variables, visual, trained=section.vision == "train")
            if lora is not None:
                variables["lora"] = init_adapters(variables["params"], key, lora, visual)
        if config.algorithm.learns_values:
            variables[VALUE] = init_value_head(model.hidden_size)
        if keeps_layers_apart(section, platform):
            variables["params"] = unstack_and_fuse(variables["params"], model)
        if section.quantised != "none":
            variables["params"] = quantise(variables["params"], section.quantised)  # the tower is not quantised
        return update.make_learner(config, Policy(model), 1).fresh(variables)

    shapes = jax.eval_shape(start)
    return shapes if mesh is None else jax.tree.map(placed, shapes, shardings(shapes, mesh))


def batch_shapes(config: Config, policy: Policy, state: TrainState, shown: Shown | None = None) -> Batch:
    """Return the shapes of one update's batch at maximum lengths; packed shorter completions need less."""
    training, sampling = config.training, config.sampling
    prompts = training.prompts_per_batch // training.minibatches
    batch = full_batch(config, (prompts, config.data.max_prompt_tokens))
    if shown is not None:
        batch = batch._replace(pictures=_shown_pictures(config, policy, state, shown, batch.tokens.shape[:2]))
    whole = training.replace(minibatches=1, inner_epochs=training.inner_epochs * training.minibatches)
    forward = make_forward(policy, temperature=sampling.temperature)
    prepare = update.make_preparation(forward, config.resolved_algorithm, config.ppo, whole)
    shapes = jax.eval_shape(lambda state, batch: prepare(state, batch)[0], state, batch)
    if policy.mesh is None:
        return shapes
    return jax.tree.map(placed, shapes, jax.tree.map(lambda _: NamedSharding(policy.mesh, PartitionSpec(FSDP)), shapes))


def placed(leaf: jax.ShapeDtypeStruct, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Return an array's shape with a sharding."""
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=weak)


def _shown_pictures(
    config: Config, policy: Policy, state: TrainState, shown: Shown, rows: tuple[int, int]
) -> dict[str, PyTree]:
    """Return the update's picture shapes for rows (P, G): states of a frozen tower, else patches."""
    counts = {"pictures": (rows[:1], shown.prompt), "observations": (rows, shown.observations)}
    pictures = {
        name: picture_shapes(policy.config.vision, (*lead, count), shown.patches)
        for name, (lead, count) in counts.items()
        if count
    }
    if config.policy.vision == "train" or VISUAL in state.variables.get("lora", {}):
        return pictures
    return {name: jax.eval_shape(policy.encode_images, state.variables, part) for name, part in pictures.items()}


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of a tree of arrays or shapes on one device; a sharded leaf counts one shard."""
    leaves = jax.tree.leaves(tree)
    shapes = [leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
    return sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves, strict=True))


class Program(NamedTuple):
    """A jitted function of a run, before compilation."""

    function: jax.stages.Wrapped  # the jitted function that a run calls
    arguments: tuple[PyTree, ...]  # shapes of its arguments, with their shardings over a mesh
    turns: int = 0  # tokens decoded by its loops of unknown length; 0 if there are none


class Work(NamedTuple):
    """FLOPs of matrix products, and their bytes read and written."""

    flops: float = 0.0
    bytes: float = 0.0


class Report(NamedTuple):
    """A program on one device: the compiler's memory, and the work of its matrix products."""

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    work: Work

    @property
    def working_bytes(self) -> int:
        """Return the bytes besides its arguments; a donated state counts once."""
        return self.temporary_bytes + self.output_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the total bytes."""
        return self.argument_bytes + self.working_bytes

    def bound_seconds(self, target: Target) -> float:
        """Return the larger of FLOPs over the peak and bytes over the bandwidth."""
        return max(self.work.flops / target.kind.flops, self.work.bytes / target.kind.bandwidth)


def run_programs(
    config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None, shown: Shown | None, platform: str | None = None
) -> dict[str, Program]:
    """Return a run's programs at maximum lengths, by name: vision, sample, turn, logprobs, update.

    "logprobs" computes old or reference log-probabilities of a whole batch, "update" is one optimizer update.
    """
    policy, algorithm = Policy.from_section(config.policy, model, mesh, platform), config.resolved_algorithm
    state = state_shapes(config, model, mesh, pictures=shown is not None, platform=platform)
    programs, training = _sampling_programs(config, policy, state, shown), config.training
    forward = make_forward(policy, temperature=config.sampling.temperature)
    if update.needs_old_logprobs(algorithm, training) or needs_reference(config.algorithm, config.ppo):
        whole = config.replace(training=training.replace(minibatches=1))
        step = update.make_old_policy_step(forward, algorithm, training)
        batch = batch_shapes(whole, policy, state, shown).read_by_policy()
        programs["logprobs"] = Program(jax.jit(step), (state.variables, batch))
    optimizer, longest = update.make_learner(config, policy, 1).optimizer, config.sampling.max_policy_tokens
    step = update.make_configured_step(forward, optimizer, algorithm, training, config.ppo, max_new_tokens=longest)
    arguments = state, batch_shapes(config, policy, state, shown)
    return programs | {"update": Program(jax.jit(step, donate_argnums=0), arguments)}


def _sampling_programs(config: Config, policy: Policy, state: TrainState, shown: Shown | None) -> dict[str, Program]:
    """Return the vision tower (if prompts have pictures), sampling of a chunk of prompts, and of a last turn."""
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


def report_program(program: Program, target: Target | None, device: jax.Device, devices: int = 1) -> Report:
    """Compile a program and return its memory and its work on one of the devices."""
    return read_memory(compile_program(program, target, device), count_work(program, devices))


def read_memory(compiled: jax.stages.Compiled, work: Work) -> Report:
    """Return the memory that the compiler reports."""
    memory = compiled.memory_analysis()
    assert memory is not None  # these compilers report it
    output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Report(memory.argument_size_in_bytes, memory.temp_size_in_bytes, output, work)


def compile_program(program: Program, target: Target | None, device: jax.Device) -> jax.stages.Compiled:
    """Compile a program for a device of the target or of this machine, or for its arguments' shardings."""
    if target is None:
        fast = _FAST_COMPILE if device.platform == "cpu" else None
        return program.function.lower(*program.arguments).compile(compiler_options=fast)
    arguments, single = program.arguments, SingleDeviceSharding(device)
    if not any(leaf.sharding is not None for leaf in jax.tree.leaves(arguments)):
        arguments = jax.tree.map(lambda leaf: placed(leaf, single), arguments)
    with lowering_for(target):
        lowered = program.function.lower(*arguments)
    return compile_for(target, lowered)


def count_work(program: Program, devices: int = 1) -> Work:
    """Return a device's share of a program's work; its bytes are at least those of its arguments.

    Loops of unknown length decode tokens: those over the most rows have `program.turns` iterations in total. Loops over
    fewer rows run only after other completions have ended, and count 0.
    """
    traced = program.function.trace(*program.arguments).jaxpr.jaxpr
    jaxpr, _ = dce_jaxpr(traced, [True] * len(traced.outvars))  # without unused products
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
    """Return the number of rows whose flags a loop carries."""
    return max((_size(var) for var in loop.outvars if var.aval.dtype == bool), default=0)


def _work(jaxpr: Jaxpr, turns: Mapping[int, float]) -> np.ndarray:
    """Return FLOPs and bytes, f64 [2]."""
    total = np.zeros(2)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("dot_general", "pallas_call", *_CUDNN):
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
    name = eqn.params.get("name", eqn.primitive.name)
    if name == "decode_attention":  # only written slots are read: on average half of the cache
        keys, caches = given[1].aval.shape[-1], given[-2:]
        unread = sum(_size(var) * var.aval.dtype.itemsize for var in caches) * 1.5  # half as input, all as result
        return (4.0 * _size(made[0]) * (keys + caches[0].aval.shape[-1] / 2), traffic - unread)
    backward = {1: 3, 2: 4}.get(len(made), 0) if len(given) > 5 else 2  # TPU: dq; dk and dv
    products = _ATTENTION.get(name, backward)
    keys = max(given[1].aval.shape[1:3])
    return (products * float(_size(given[0])) * keys, traffic)  # each query's product with half of the keys


def _size(var: Var) -> int:
    return math.prod(var.aval.shape)
