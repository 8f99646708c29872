"""Shapes of state and batch by the constructors of training, without arrays, and the update as a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.config.run import Config
from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.decoder import apart_and_joined, init_variables
from grpo_jax.models.hf.peft import lora_config
from grpo_jax.models.lora import init_adapters, quantise
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import FSDP, shard_optimizer, shardings
from grpo_jax.models.variables import (
    VALUE,
    VISUAL,
    PyTree,
    init_value_head,
    keeps_layers_apart,
    make_loss_scale,
    needs_tower,
    tower_dtype,
    weight_dtype,
    with_tower,
)
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Pictures, pack_windows
from grpo_jax.models.vision.tower import init_tower
from grpo_jax.sampling.sampler import Samples
from grpo_jax.training.batch import Batch, make_batch
from grpo_jax.training.estimators import make_turn_objectives
from grpo_jax.training.objectives import ForwardPass, make_forward
from grpo_jax.training.state import TrainState, init_state, make_optimizer, make_schedule, needs_reference
from grpo_jax.training.update import make_configured_step, make_preparation


class Shown(NamedTuple):
    """The most pictures in a prompt and among an episode's observations, and the patches of one picture."""

    prompt: int
    observations: int
    patches: int


GIB = 2**30


def picture_shapes(vision: VisionConfig, lead: tuple[int, ...], patches: int) -> Pictures:
    """Return the shapes of pictures [*lead, S, C] as a tower takes them."""
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
            variables["params"] = apart_and_joined(variables["params"], model)
        if section.quantised != "none":
            variables["params"] = quantise(variables["params"], section.quantised)  # the tower stands beside them
        return init_state(
            variables,
            _optimizer(config),
            keep_reference=needs_reference(config.algorithm, config.ppo),
            loss_scale=make_loss_scale(section.compute_dtype),
        )

    shapes = jax.eval_shape(start)
    return shapes if mesh is None else placed(shapes, shardings(shapes, mesh))


def batch_shapes(
    config: Config,
    state: TrainState,
    forward: ForwardPass,
    mesh: jax.sharding.Mesh | None,
    shown: Callable[[tuple[int, ...]], Mapping[str, PyTree]] | None = None,
) -> Batch:
    """Return the shapes of one update's batch at maximum lengths; packing shorter completions takes less."""
    training, sampling = config.training, config.sampling
    prompts = training.prompts_per_batch // training.minibatches
    shape = (prompts, sampling.group_size, sampling.stream_tokens)
    written, zeros = np.ones(shape, bool), np.zeros(shape, np.float32)
    samples = Samples(zeros.astype(np.int32), written, zeros, zeros, np.zeros(shape[:2], bool))
    options = {"weights": {"": 1.0}, "max_new_tokens": sampling.max_new_tokens}
    turns = (*shape[:2], sampling.turns)
    if sampling.turns > 1:
        samples = samples._replace(present=written, turn=zeros.astype(np.int32))
    objectives = make_turn_objectives(jnp.zeros((*turns, 1)), jnp.ones(turns, jnp.int32), config.algorithm, **options)
    prompt = np.ones((prompts, config.data.max_prompt_tokens), bool)
    batch = make_batch((prompt.astype(np.int32), prompt), samples, objectives, np.ones(prompts, bool), config.algorithm)
    if shown is not None:
        batch = batch._replace(pictures=shown(shape[:2]))
        batch = batch._replace(packing=None) if "observations" in batch.pictures else batch  # as `make_batch`
    whole = training.replace(minibatches=1, inner_epochs=training.inner_epochs * training.minibatches)
    prepare = make_preparation(forward, config.algorithm, config.ppo, whole)
    shapes = jax.eval_shape(lambda state, batch: prepare(state, batch)[0], state, batch)
    if mesh is None:
        return shapes
    return placed(shapes, jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(FSDP)), shapes))


def tree_bytes(tree: PyTree) -> int:
    """Bytes of a tree of arrays or shapes on one device: of a leaf that is spread over several, one part."""

    def leaf_bytes(leaf: jax.ShapeDtypeStruct) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(leaf_bytes, jax.tree.leaves(tree)))


class Program(NamedTuple):
    """A compiled part of a run, not compiled yet.

    Attributes:
        function: The jitted function that a run calls.
        arguments: Shapes of its arguments, with their shardings over a mesh.
        turns: Tokens that its loops of unknown length write; 0 where there are none.
    """

    function: jax.stages.Wrapped
    arguments: tuple[PyTree, ...]
    turns: int = 0


def update_program(
    config: Config,
    model: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    shown: Shown | None = None,
    platform: str | None = None,
) -> Program:
    """Return one optimizer update at maximum lengths."""
    policy = Policy.from_section(config.policy, model, mesh, platform)
    forward = make_forward(policy, temperature=config.sampling.temperature)
    step = make_configured_step(
        forward,
        shard_optimizer(_optimizer(config), mesh),
        config.algorithm,
        config.training,
        config.ppo,
        max_new_tokens=config.sampling.written_tokens,
    )
    state = state_shapes(config, model, mesh, pictures=shown is not None, platform=platform)
    pictures = shown_shapes(config, model, policy, state, shown)
    batch = batch_shapes(config, state, forward, mesh, pictures)
    return Program(jax.jit(step, donate_argnums=0), (state, batch))


def shown_shapes(
    config: Config, model: ModelConfig, policy: Policy, state: TrainState, shown: Shown | None
) -> Callable[[tuple[int, ...]], dict[str, PyTree]] | None:
    """Return the function (P, G) → shapes of a batch's pictures as the update takes them; None where there are none."""
    if shown is None:
        return None
    assert model.vision is not None
    vision, encode = model.vision, policy.encode_images
    again = config.policy.vision == "train" or VISUAL in state.variables.get("lora", {})

    def of_rows(rows: tuple[int, ...]) -> dict[str, PyTree]:
        counts = {"pictures": (rows[:1], shown.prompt), "observations": (rows, shown.observations)}
        pictures = {
            name: picture_shapes(vision, (*lead, count), shown.patches)
            for name, (lead, count) in counts.items()
            if count
        }
        if again:
            return pictures
        encoded = partial(jax.eval_shape, encode, state.variables)
        return {name: encoded(part) for name, part in pictures.items()}

    return of_rows


def _optimizer(config: Config) -> optax.GradientTransformation:
    section = config.optimizer.replace(learning_rate=config.learning_rate)
    schedule = make_schedule(section, max(config.training.max_steps, 1))
    return make_optimizer(section, schedule)


def placed(shapes: PyTree, places: PyTree) -> PyTree:
    """Return shapes with a sharding each."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )
