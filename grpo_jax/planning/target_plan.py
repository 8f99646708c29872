"""A run's programs compiled for a device that is not here, and what their compiler says of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from grpo_jax.config.run import Config
from grpo_jax.models.families import ModelConfig
from grpo_jax.models.joined import apart_and_joined
from grpo_jax.models.policy import configured_functions
from grpo_jax.models.sharding import shardings
from grpo_jax.planning.hlo import Reading, Sizes, read_program
from grpo_jax.planning.policy import sampling_programs, tree_bytes, turn_program
from grpo_jax.planning.targets import Target, compile_for, lowering_for
from grpo_jax.runs.warm_start import make_sft_step
from grpo_jax.sampling.sampler import bucket_size, cache_sizes
from grpo_jax.training.batch import Batch
from grpo_jax.training.memory import Program, Shown, batch_shapes, placed, shown_shapes, state_shapes, update_program
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import needs_reference
from grpo_jax.training.update import make_forward_step, needs_old_logprobs

LAUNCH_SECONDS = 1.3e-6
"""Of a kernel within a CUDA graph."""
_SMALLEST = 2**14  # elements of a matrix whose copies are counted
DECODING = ("sample", "turn")


class Report(NamedTuple):
    """A program on one device of the target.

    Attributes:
        bound_seconds: No run is faster: the larger of FLOPs over the peak and bytes over the bandwidth, and on a GPU
            1.3 µs for each kernel.
    """

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    peak_bytes: int
    reading: Reading
    bound_seconds: float

    @property
    def working_bytes(self) -> int:
        """Bytes beside its arguments."""
        return self.peak_bytes - self.argument_bytes

    def as_dict(self, name: str) -> dict[str, object]:
        """Return the fields of --plan_json."""
        reading = self.reading
        layer = "kernels_per_layer_and_token" if name in DECODING else "kernels_per_layer"
        return {
            "argument_bytes": self.argument_bytes,
            "temporary_bytes": self.temporary_bytes,
            "output_bytes": self.output_bytes,
            "peak_bytes": self.peak_bytes,
            "kernels": reading.kernels,
            layer: reading.layer_kernels,
            "weight_copies_in_loop": reading.weight_copies,
            "cache_copies_in_loop": reading.cache_copies,
            "collectives": [collective._asdict() for collective in reading.collectives],
            "flops": reading.flops,
            "library_flops": reading.library_flops,
            "bytes": reading.bytes,
            "bound_seconds": self.bound_seconds,
        }


def run_programs(
    config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None, shown: Shown | None, platform: str
) -> dict[str, Program]:
    """Return what a run of `config` compiles, by name: vision, sample, turn, logprobs, update, warm_start."""
    programs = sampling_programs(config, model, mesh, shown, platform)
    if config.sampling.turns > 1:
        programs["turn"] = turn_program(config, model, mesh, platform)
    if needs_old_logprobs(config.algorithm, config.training) or needs_reference(config.algorithm, config.ppo):
        programs["logprobs"] = _logprobs_program(config, model, mesh, shown, platform)
    programs["update"] = update_program(config, model, mesh, shown, platform)
    if config.warm_start.steps:
        programs["warm_start"] = _warm_start_program(config, model, mesh, platform)
    return programs


def _logprobs_program(
    config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None, shown: Shown | None, platform: str
) -> Program:
    """Return the old or the reference's log-probabilities of a whole batch."""
    training = config.training
    whole = dataclasses.replace(config, training=dataclasses.replace(training, minibatches=1))
    policy = configured_functions(config.policy, model, mesh, platform)
    forward = make_forward(policy, temperature=config.sampling.temperature)
    state = state_shapes(config, model, mesh, pictures=shown is not None, platform=platform)
    batch = batch_shapes(whole, state, forward, mesh, shown_shapes(config, model, policy, state, shown))
    step = make_forward_step(forward, accumulation=training.minibatches * training.accumulation)
    return Program(jax.jit(step), (state.variables, batch.read_by_policy()))


def _warm_start_program(config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None, platform: str) -> Program:
    """Return a supervised update of texts."""
    section = config.warm_start
    policy = configured_functions(config.policy, model, mesh, platform)
    init, step = make_sft_step(config, policy.replace(mesh=mesh))
    state = jax.eval_shape(init, state_shapes(config, model, None, platform=platform).variables)
    if mesh is not None:
        state = placed(state, shardings(state, mesh))
    prompt = jax.ShapeDtypeStruct((section.batch, config.data.max_prompt_tokens), "int32")
    text = jax.ShapeDtypeStruct((section.batch, 1, config.sampling.stream_tokens), "int32")
    arrays: Any = (prompt, _as_mask(prompt), text, _as_mask(text))
    batch = Batch(*arrays)
    return Program(jax.jit(step, donate_argnums=0), (state, batch))


def _as_mask(tokens: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tokens.shape, "bool")


def plan_programs(
    config: Config,
    model: ModelConfig,
    target: Target,
    device: jax.Device,
    mesh: jax.sharding.Mesh | None,
    shown: Shown | None,
) -> dict[str, Report]:
    """Compile a run's programs for a device of the target, or for a mesh of them."""
    sizes = program_sizes(config, model, mesh)
    programs = run_programs(config, model, mesh, shown, target.platform)
    return {name: report(program, target, device, sizes) for name, program in programs.items()}


def report(program: Program, target: Target, device: jax.Device, sizes: Sizes) -> Report:
    """Compile one program and read it."""
    return read_report(compiled_program(program, target, device), target, sizes._replace(turns=program.turns))


def compiled_program(program: Program, target: Target, device: jax.Device) -> jax.stages.Compiled:
    """Compile one program for a device of the target, or for those of its arguments' shardings."""
    single = SingleDeviceSharding(device)
    spread = any(leaf.sharding is not None for leaf in jax.tree.leaves(program.arguments))

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf if spread else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=single)

    with lowering_for(target):
        lowered = program.function.lower(*jax.tree.map(place, program.arguments))
    return compile_for(target, lowered)


def read_report(compiled: jax.stages.Compiled, target: Target, sizes: Sizes) -> Report:
    """Read a compiled program's memory, and what it does."""
    memory = compiled.memory_analysis()
    assert memory is not None  # these compilers say it
    reading = read_program(compiled, sizes)
    arguments, temporary, output = (
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
    )
    kind = target.kind
    floor = max(reading.flops / kind.flops, reading.bytes / kind.bandwidth)
    launches = reading.kernels * LAUNCH_SECONDS if target.platform == "cuda" else 0.0
    return Report(arguments, temporary, output, arguments + temporary + output, reading, floor + launches)


def program_sizes(config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None) -> Sizes:
    """Return what counts as a copy of weights or of caches on one device."""
    state = state_shapes(config, model, mesh, platform="cpu")  # whose layers are stacked
    layers = state.variables["params"].get("layers", {})
    weights = {tree_bytes(leaf) // leaf.dtype.itemsize // model.num_layers for leaf in jax.tree.leaves(layers)}
    if mesh is None:
        decoded = jax.eval_shape(lambda params: apart_and_joined(params, model), state.variables["params"])
        weights |= {leaf.size for leaf in jax.tree.leaves(decoded.get("layers_0", {}))}
    section = config.sampling
    chunk = bucket_size(config.training.chunk_prompts or config.training.prompts_per_batch)
    per_token = chunk * model.num_kv_heads * model.head_dim
    lengths = {size * section.group_size for size in cache_sizes(section.max_new_tokens)}
    caches = {per_token * length for length in (*lengths, bucket_size(config.data.max_prompt_tokens, smallest=8))}
    split = 1 if mesh is None else mesh.size
    return Sizes(
        frozenset(size for size in weights if size >= _SMALLEST),
        frozenset(size // split for size in caches) | frozenset(caches),
        model.num_layers,
    )
