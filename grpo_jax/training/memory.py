"""What training holds in memory, asked of the compiler: shapes of its state and of a batch, bytes of an update.

Everything here is made by the constructors that training calls, for arrays that do not exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.config.run import Config
from grpo_jax.models.adapters import lora_config
from grpo_jax.models.decoder import init_variables, make_policy
from grpo_jax.models.loss_scale import make_loss_scale
from grpo_jax.models.quantised import quantise
from grpo_jax.models.sharding import FSDP, over_prompts, shard_optimizer, shard_policy, shardings
from grpo_jax.models.value_head import VALUE, init_value_head
from grpo_jax.sampling.sampler import Samples
from grpo_jax.training.batch import Batch, make_batch
from grpo_jax.training.estimators import make_objectives
from grpo_jax.training.objectives import ForwardPass, make_forward
from grpo_jax.training.optimizer import make_optimizer, make_schedule
from grpo_jax.training.state import TrainState, init_state, needs_reference
from grpo_jax.training.update import make_configured_step, make_preparation

# The same programs without LLVM's slow passes: buffers are assigned before them.
_FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def weight_dtype(config: Config) -> str:
    """Type of the policy's weights: trained ones are float32."""
    return config.policy.frozen_dtype if config.policy.lora.used else "float32"


def policy_functions(config: Config, model: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """The policy's functions for a decoder's config, over the mesh if there is one."""
    section = config.policy
    policy = make_policy(
        model,
        compute_dtype=section.compute_dtype,
        remat=section.remat,
        lora=lora_config(section.lora, model),
        spread=over_prompts(mesh),
    )
    return shard_policy(policy, mesh)


def state_shapes(config: Config, model: Any, mesh: jax.sharding.Mesh | None) -> TrainState:
    """The shapes, types and places of the state that training begins with."""
    section = config.policy

    def start() -> TrainState:
        variables = init_variables(
            model, jax.random.key(0), param_dtype=weight_dtype(config), lora=lora_config(section.lora, model)
        )
        if config.algorithm.learns_values:
            variables[VALUE] = init_value_head(model.hidden_size)
        if section.quantised != "none":
            variables["params"] = quantise(variables["params"], section.quantised)
        return init_state(
            variables,
            _optimizer(config),
            keep_reference=needs_reference(config.algorithm, config.ppo),
            kl_coef=config.ppo.kl_coef if config.algorithm.learns_values and config.ppo.kl_coef > 0 else None,
            loss_scale=make_loss_scale(section.compute_dtype),
        )

    shapes = jax.eval_shape(start)
    return shapes if mesh is None else _placed(shapes, shardings(shapes, mesh))


def batch_shapes(config: Config, state: TrainState, forward: ForwardPass, mesh: jax.sharding.Mesh | None) -> Batch:
    """The shapes of one update's batch, where all prompts and completions are as long as they may be.

    Shorter completions are packed into fewer rows, which takes less.
    """
    training, sampling = config.training, config.sampling
    prompts = training.prompts_per_batch // training.minibatches
    shape = (prompts, sampling.group_size, sampling.max_new_tokens)
    written, zeros = np.ones(shape, bool), np.zeros(shape, np.float32)
    samples = Samples(zeros.astype(np.int32), written, zeros, zeros, np.zeros(shape[:2], bool))
    objectives = make_objectives(
        jnp.zeros((*shape[:2], 1)), jnp.full(shape[:2], shape[2]), weights={"": 1.0}, max_new_tokens=shape[2]
    )
    prompt = np.ones((prompts, config.data.max_prompt_tokens), bool)
    batch = make_batch((prompt.astype(np.int32), prompt), samples, objectives, np.ones(prompts, bool), config.algorithm)
    whole = dataclasses.replace(training, minibatches=1, inner_epochs=training.inner_epochs * training.minibatches)
    prepare = make_preparation(forward, config.algorithm, config.ppo, whole)
    shapes = jax.eval_shape(lambda state, batch: prepare(state, batch)[0], state, batch)
    if mesh is None:
        return shapes
    return _placed(shapes, jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(FSDP)), shapes))


def update_bytes(config: Config, model: Any, mesh: jax.sharding.Mesh | None) -> int:
    """Temporary bytes of one optimizer update: activations, gradients, logits of a chunk of tokens."""
    forward = make_forward(policy_functions(config, model, mesh), temperature=config.sampling.temperature)
    step = make_configured_step(
        forward,
        shard_optimizer(_optimizer(config), mesh),
        config.algorithm,
        config.training,
        config.ppo,
        max_new_tokens=config.sampling.max_new_tokens,
    )
    state = state_shapes(config, model, mesh)
    return temporary_bytes(jax.jit(step, donate_argnums=0), state, batch_shapes(config, state, forward, mesh))


def temporary_bytes(compiled: Any, *shapes: Any) -> int:
    """Temporary memory of a jitted function for arguments of these shapes, without running it."""
    options = _FAST_COMPILE if jax.default_backend() == "cpu" else None
    return int(compiled.lower(*shapes).compile(compiler_options=options).memory_analysis().temp_size_in_bytes)


def fewest_parts(measure: Callable[[int], int], rows: int, *, budget: int, least: int = 1) -> tuple[int, int]:
    """The smallest divisor of `rows`, `least` or more, whose measured bytes are within the budget, and those bytes.

    Where none is, the largest. A part's memory falls at most in proportion, so that divisors which cannot fit are
    passed over without being measured (each measurement compiles the update).
    """
    choices = [count for count in range(least, rows + 1) if rows % count == 0]
    while True:
        count, choices = choices[0], choices[1:]
        used = measure(count)
        if used <= budget or not choices:
            return count, used
        choices = [more for more in choices if used * count <= budget * more] or choices[-1:]


def _optimizer(config: Config) -> Any:
    section = dataclasses.replace(config.optimizer, learning_rate=config.learning_rate)
    schedule = make_schedule(section, max(config.training.max_steps, 1))
    return make_optimizer(section, schedule, value_rate=config.ppo.value_rate)


def _placed(shapes: Any, places: Any) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )
