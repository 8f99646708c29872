"""The programs that a run compiles, for arrays that do not exist: here or for a device that is not here."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from grpo_jax.config.run import Config
from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import gather
from grpo_jax.models.variables import VALUE
from grpo_jax.planning.targets import Target, compile_for, lowering_for
from grpo_jax.planning.work import Work, count_work
from grpo_jax.sampling.episodes import make_episode_sampler
from grpo_jax.sampling.sampler import Samples, make_sampler
from grpo_jax.sampling.samplers import sampling_params
from grpo_jax.sampling.token_choice import SamplingParams
from grpo_jax.training.memory import (
    Program,
    Shown,
    batch_shapes,
    picture_shapes,
    shown_shapes,
    state_shapes,
    update_program,
)
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import needs_reference
from grpo_jax.training.update import make_forward_step, needs_old_logprobs

# The same programs without LLVM's slow passes: buffers are assigned before them.
_FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


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
    programs = _sampling_programs(config, model, mesh, shown, platform)
    if config.sampling.turns > 1:
        programs["turn"] = _turn_program(config, model, mesh, platform)
    if needs_old_logprobs(config.algorithm, config.training) or needs_reference(config.algorithm, config.ppo):
        programs["logprobs"] = _logprobs_program(config, model, mesh, shown, platform)
    return programs | {"update": update_program(config, model, mesh, shown, platform)}


def report(program: Program, target: Target | None, device: jax.Device, devices: int = 1) -> Report:
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
    single = SingleDeviceSharding(device)
    spread = any(leaf.sharding is not None for leaf in jax.tree.leaves(program.arguments))

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf if spread else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=single)

    with lowering_for(target):
        lowered = program.function.lower(*jax.tree.map(place, program.arguments))
    return compile_for(target, lowered)


def _params(config: Config) -> SamplingParams:
    return sampling_params(config.sampling, config.sampling.group_size, config.sampling.temperature)


def _chunk(config: Config) -> int:
    return config.training.chunk_prompts or config.training.prompts_per_batch


def _sampling_programs(
    config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None, shown: Shown | None, platform: str | None
) -> dict[str, Program]:
    """Return the sampling of a chunk of prompts, and the vision tower before it where the prompts hold pictures."""
    policy = Policy.from_section(config.policy, model, mesh, platform)
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
    assert model.vision is not None
    pictures = picture_shapes(model.vision, (len(tokens), shown.prompt), shown.patches)
    states = jax.eval_shape(policy.encode_images, variables, pictures)
    return {
        "vision": Program(jax.jit(policy.encode_images), (variables, pictures)),
        "sample": Program(jax.jit(draw), (variables, states), turns),
    }


def _turn_program(config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None, platform: str | None) -> Program:
    """Return the sampling of an episode's last turn."""
    policy = Policy.from_section(config.policy, model, mesh, platform)
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


def _logprobs_program(
    config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None, shown: Shown | None, platform: str | None
) -> Program:
    """Return the old or the reference's log-probabilities of a whole batch."""
    training = config.training
    whole = config.replace(training=training.replace(minibatches=1))
    policy = Policy.from_section(config.policy, model, mesh, platform)
    forward = make_forward(policy, temperature=config.sampling.temperature)
    state = state_shapes(config, model, mesh, pictures=shown is not None, platform=platform)
    batch = batch_shapes(whole, state, forward, mesh, shown_shapes(config, model, policy, state, shown))
    step = make_forward_step(forward, grad_accumulation_steps=training.minibatches * training.grad_accumulation_steps)
    return Program(jax.jit(step), (state.variables, batch.read_by_policy()))
