"""What a run will need on each device, before any weight is loaded.

Parameters, optimizer state and reference are counted from shapes (`jax.eval_shape`). What sampling and the update take
beside them is asked of the compiler: both are compiled for arrays that do not exist, and XLA says how much temporary
memory the program allocates (`memory_analysis`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.config import Config
from grpo_jax.models.adapters import lora_config
from grpo_jax.models.decoder import init_variables, make_policy
from grpo_jax.models.quantised import count_weights, quantise
from grpo_jax.models.sharding import FSDP, gather, over_prompts, shard_optimizer, shard_policy, shardings
from grpo_jax.models.value_head import VALUE, init_value_head
from grpo_jax.sampling.sampler import SamplingParams, bucket_size, make_sampler
from grpo_jax.training import trainer
from grpo_jax.training.loss_scale import make_loss_scale
from grpo_jax.training.objectives import Batch, make_forward
from grpo_jax.training.optimizer import make_optimizer, make_schedule

GIB = 2**30
# The same programs without LLVM's slow passes: buffers are assigned before them.
_FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class PolicyMemory(NamedTuple):
    """Bytes that the policy takes on each of its devices.

    Attributes:
        parameters: Of the whole policy, their number.
        trained: How many of them gradients are taken for.
        weights: Parameters and adapters.
        optimizer: Moments of the trained ones.
        reference: A copy for the KL; 0 where the base itself or nothing is the reference.
        apart: The copy of the layers that decoding reads (`Policy.unstack`).
        cache: Keys and values of one chunk's prompts, and of their completions.
        sampling: What sampling takes beside these.
        gradients: Of the trained ones, float32.
        update: What the update takes beside them: activations, logits of a chunk of tokens, the optimizer's steps.
        widened: Compiled in float32 because a CPU has no narrower products: sampling and update are upper bounds.
    """

    parameters: int
    trained: int
    weights: int
    optimizer: int
    reference: int
    apart: int
    cache: int
    sampling: int
    gradients: int
    update: int
    widened: bool

    @property
    def held(self) -> int:
        """What is there all the time."""
        return self.weights + self.optimizer + self.reference

    @property
    def peak(self) -> int:
        """What is held, and the larger of sampling and update, which take turns."""
        return self.held + max(self.to_sample, self.to_update)

    @property
    def to_sample(self) -> int:
        """What is there while completions are drawn."""
        return self.apart + self.cache + self.sampling

    @property
    def to_update(self) -> int:
        """What is there while the policy learns."""
        return self.gradients + self.update


def policy_memory(config: Config, model: Any, mesh: jax.sharding.Mesh | None = None) -> PolicyMemory:
    """Counts and compiles what `config` does with a policy of the shape `model`.

    Prompts are taken to be as long as data.max_prompt_tokens allows.

    Args:
        config: The run.
        model: The decoder's config (`hf.model_config`).
        mesh: The policy's devices where they are several; figures are those of one of them.

    Raises:
        ValueError: Adapters on projections that the architecture lacks, or weights that the mesh does not divide.
    """
    narrow = {config.policy.compute_dtype, _param_dtype(config)} - {"float32"}
    widened = bool(narrow) and jax.default_backend() == "cpu"
    state = _state_shapes(config, model, mesh)
    trained = {name: state.variables[name] for name in trainer.trained_collections(state.variables)}
    same = {"compute_dtype": "float32", "frozen_dtype": "float32"}
    wide = dataclasses.replace(config, policy=dataclasses.replace(config.policy, **same)) if widened else config
    gradients = tree_bytes(trained)
    apart = _layers_bytes(_state_shapes(wide, model, mesh))
    # Where they differ in type, the head is cast once for a whole program.
    casts = _param_dtype(config) != config.policy.compute_dtype and widened
    cast = model.vocab_size * model.hidden_size * jnp.dtype(config.policy.compute_dtype).itemsize if casts else 0
    return PolicyMemory(
        parameters=count_weights(state.variables["params"]),
        trained=tree_size(trained),
        weights=tree_bytes(state.variables),
        optimizer=tree_bytes(state.opt_state),
        reference=tree_bytes(state.reference),
        apart=_layers_bytes(state),
        cache=cache_bytes(config, model),
        sampling=max(_compiled_sampling(wide, model, mesh) - apart - cache_bytes(wide, model), 0) + cast,
        gradients=gradients,
        update=max(update_bytes(wide, model, mesh) - gradients, 0) + cast,
        widened=widened,
    )


def cache_bytes(config: Config, model: Any) -> int:
    """Keys and values of a chunk of prompts and of their completions: 2 · layers · K · E · (P · L + P · G · T)."""
    prompts, length = bucket_size(_chunk(config)), bucket_size(config.data.max_prompt_tokens, smallest=8)
    tokens = prompts * (length + config.sampling.group_size * config.sampling.max_new_tokens)
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    size = per_token * tokens * jnp.dtype(config.policy.compute_dtype).itemsize
    return size // (config.policy.mesh.fsdp * config.policy.mesh.tensor)


def _layers_bytes(state: trainer.TrainState) -> int:
    return tree_bytes([tree.get("layers", {}) for name, tree in state.variables.items() if name != VALUE])


def tree_size(tree: Any) -> int:
    """Number of elements of a tree of arrays or shapes."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def tree_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes on one device: of a leaf that is spread over several, one part."""
    return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _leaf_bytes(leaf: Any) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return int(np.prod(shape)) * leaf.dtype.itemsize


def _param_dtype(config: Config) -> str:
    return config.policy.frozen_dtype if config.policy.lora.used else "float32"


def _chunk(config: Config) -> int:
    """Prompts that are sampled together."""
    return config.training.chunk_prompts or config.training.prompts_per_batch


def _on(mesh: jax.sharding.Mesh | None, tree: Any) -> Any:
    """Shapes with the places that `TABLE` gives them."""
    if mesh is None:
        return tree
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, shardings(tree, mesh)
    )


def _policy(config: Config, model: Any, mesh: jax.sharding.Mesh | None) -> Any:
    section = config.policy
    policy = make_policy(
        model,
        compute_dtype=section.compute_dtype,
        remat=section.remat,
        lora=lora_config(section.lora, model),
        spread=over_prompts(mesh),
    )
    return shard_policy(policy, mesh)


def _optimizer(config: Config) -> Any:
    schedule = make_schedule(config.optimizer, max(config.training.max_steps, 1))
    return make_optimizer(config.optimizer, schedule, value_rate=config.ppo.value_rate)


def _state_shapes(config: Config, model: Any, mesh: jax.sharding.Mesh | None) -> trainer.TrainState:
    """The shapes of the state that training begins with."""
    section, learns_values = config.policy, config.algorithm.advantage == "gae"

    def start() -> trainer.TrainState:
        variables = init_variables(
            model, jax.random.key(0), param_dtype=_param_dtype(config), lora=lora_config(section.lora, model)
        )
        if learns_values:
            variables[VALUE] = init_value_head(model.hidden_size)
        if section.quantised != "none":
            variables["params"] = quantise(variables["params"], section.quantised)
        return trainer.init_state(
            variables,
            _optimizer(config),
            keep_reference=trainer.needs_reference(config.algorithm, config.ppo),
            kl_coef=config.ppo.kl_coef if learns_values and config.ppo.kl_coef > 0 else None,
            loss_scale=make_loss_scale(section.compute_dtype),
        )

    return _on(mesh, jax.eval_shape(start))


def _batch_shapes(config: Config, mesh: jax.sharding.Mesh | None) -> Batch:
    """One update's batch."""
    training, algorithm, sampling = config.training, config.algorithm, config.sampling
    prompts, length = training.prompts_per_batch // training.minibatches, config.data.max_prompt_tokens
    group, steps = sampling.group_size, sampling.max_new_tokens
    place = None if mesh is None else NamedSharding(mesh, PartitionSpec(FSDP))

    def shape(*axes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((prompts, *axes), dtype, sharding=place)

    learns_values = algorithm.advantage == "gae"
    weighted = algorithm.importance_cap > 0 or algorithm.entropy_share < 1
    several = training.inner_epochs * training.minibatches > 1
    tokens = shape(group, steps)
    return Batch(
        shape(length, dtype=jnp.int32),
        shape(length, dtype=bool),
        shape(group, steps, dtype=jnp.int32),
        shape(group, steps, dtype=bool),
        advantages=tokens if learns_values else shape(group),
        scores=shape(group) if learns_values else None,
        old_logprobs=tokens if several or weighted or learns_values else None,
        ref_logprobs=tokens if trainer.needs_reference(algorithm, config.ppo) else None,
        rollout_logprobs=tokens,
        token_weights=tokens if weighted else None,
        old_values=tokens if learns_values else None,
        returns=tokens if learns_values else None,
    )


def update_bytes(config: Config, model: Any, mesh: jax.sharding.Mesh | None) -> int:
    """Temporary bytes of one optimizer update."""
    forward = make_forward(_policy(config, model, mesh), temperature=config.sampling.temperature)
    optimizer = shard_optimizer(_optimizer(config), mesh)
    step = trainer.make_configured_step(
        forward,
        optimizer,
        config.algorithm,
        config.training,
        config.ppo,
        max_new_tokens=config.sampling.max_new_tokens,
    )
    state, batch = _state_shapes(config, model, mesh), _batch_shapes(config, mesh)
    return temporary_bytes(jax.jit(step, donate_argnums=0), state, batch)


def _compiled_sampling(config: Config, model: Any, mesh: jax.sharding.Mesh | None) -> int:
    """Temporary bytes of sampling one chunk of prompts: caches, logits, and the layers' insides."""
    section = config.sampling
    params = SamplingParams(
        section.group_size, section.max_new_tokens, section.temperature, section.top_k, section.top_p, section.min_p
    )
    sample = make_sampler(_policy(config, model, mesh), params, eos_ids=(0,), pad_id=0)
    tokens = np.zeros((_chunk(config), config.data.max_prompt_tokens), np.int32)
    keys = jax.random.split(jax.random.key(0), len(tokens))

    def draw(variables: Any) -> Any:
        return gather(sample(variables, tokens, np.ones_like(tokens, bool), keys), mesh)

    variables = _state_shapes(config, model, mesh).variables
    return temporary_bytes(jax.jit(draw), {name: tree for name, tree in variables.items() if name != VALUE})


def temporary_bytes(compiled: Any, *shapes: Any) -> int:
    """Temporary memory of a jitted function for arguments of these shapes, without running it."""
    options = _FAST_COMPILE if jax.default_backend() == "cpu" else None
    return int(compiled.lower(*shapes).compile(compiler_options=options).memory_analysis().temp_size_in_bytes)
