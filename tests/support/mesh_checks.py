"""Measurements for tests/models/test_sharding.py on eight simulated devices, as JSON on standard output."""

import dataclasses
import json
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support import tiny_update

from grpo_jax.config.sections import AlgorithmSection, OptimizerSection, TrainingSection
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import OverPrompts, make_mesh, shard, shard_batch, shard_optimizer
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Picture, pack_rows
from grpo_jax.models.vision.tower import Tower, encode_pictures, init_tower
from grpo_jax.runs.policy import make_see
from grpo_jax.sampling.sampler import SamplingParams, make_sampler
from grpo_jax.training.state import init_state, make_optimizer, make_schedule
from grpo_jax.training.update import make_update

MESHES = ((8, 1), (2, 4))
GEMMA = dataclasses.replace(
    tiny_update.CONFIG,
    **dict(model_type="gemma2", qkv_bias=False, initializer_range=0.2, unit_offset=True, norms="both"),
    logit_softcap=3.0,
)
PROMPTS = 2 * tiny_update.PROMPTS


def make_batch():
    half = tiny_update.make_batch()
    return jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]]), half)


def updated(mesh):
    """The state after an update by plain gradient descent at rate 1 (its step is the gradient), and the report."""
    policy = Policy(tiny_update.CONFIG, mesh=mesh, remat="none")
    optimizer = shard_optimizer(optax.sgd(1.0), mesh)
    section = AlgorithmSection(kl_coef=0.1, entropy_coef=0.05)
    training = TrainingSection(prompts_per_batch=PROMPTS)
    options = {"temperature": tiny_update.TEMPERATURE, "max_new_tokens": tiny_update.STEPS}
    update = make_update(policy, optimizer, section, training, **options)
    start = init_state(shard(tiny_update.make_variables(), mesh), optimizer, keep_reference=True)
    start = shard(start, mesh)
    batch = shard_batch(make_batch(), mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, start)
    state, report = update(start, batch, jax.random.key(2))
    kept = places == jax.tree.map(lambda leaf: leaf.sharding, state)
    return state, report, kept


def bytes_by_device(tree):
    total = np.zeros(8, int)
    for leaf in jax.tree.leaves(tree):
        for part in leaf.addressable_shards:
            total[part.device.id] += part.data.nbytes
    return total.tolist()


def compare():
    state, report, _ = updated(None)
    assert report["grad_norm"] > 0.01
    other, other_report, kept = updated(make_mesh(2, 4, jax.devices()))
    pairs = zip(jax.tree.leaves(state.variables), jax.tree.leaves(other.variables), strict=True)
    return {
        "gradient": max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs),
        "loss": abs(report["loss"] - other_report["loss"]),
        "kept": kept,
    }


def memory():
    """Bytes of weights and AdamW's state on one device, and on each of eight."""
    section = OptimizerSection(learning_rate=1e-3)
    optimizer = make_optimizer(section, make_schedule(section, 10))
    variables = tiny_update.make_variables()
    state = init_state(variables, optimizer, keep_reference=False)
    found = {"whole": sum(leaf.nbytes for leaf in jax.tree.leaves(state))}
    for sizes in MESHES:
        mesh = make_mesh(*sizes, jax.devices())
        sharded = shard_optimizer(optimizer, mesh)
        state = shard(init_state(shard(variables, mesh), sharded, keep_reference=False), mesh)
        found[f"{sizes[0]}x{sizes[1]}"] = bytes_by_device(state)
    return found


def gemma():
    """How far the gradient of a model with norms of 1 + weight on both sides over a mesh is from that of one device."""
    variables, batch = jax.jit(lambda key: init_variables(GEMMA, key))(jax.random.key(0)), make_batch()[:4]

    def gradient(mesh):
        policy = Policy(GEMMA, mesh=mesh)

        def loss(variables, batch):
            return jnp.sum(jnp.sin(policy.forward_group(variables, *batch)) * batch[3][..., None])

        return jax.jit(jax.grad(loss))(shard(variables, mesh), shard_batch(batch, mesh))

    pairs = zip(*(jax.tree.leaves(gradient(mesh)) for mesh in (None, make_mesh(4, 2, jax.devices()))), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max()) for a, b in pairs)


def rows_of_products():
    """Rows of the left side of each product in a layer of `forward_group` on a device, as compiled."""
    mesh = make_mesh(4, 2, jax.devices())
    policy = Policy(tiny_update.CONFIG, mesh=mesh, remat="none")
    variables, batch = shard(tiny_update.make_variables(), mesh), shard_batch(make_batch(), mesh)
    text = jax.jit(policy.forward_group).lower(variables, *batch[:4]).compile().as_text()
    lines = [line for line in text.splitlines() if " dot(" in line and "_proj/" in line]
    return sorted({int(line.split("f32[")[1].split(",")[0]) for line in lines})


def gathered_tables():
    """Collectives of the update's forward pass and gradient that bring the embedding's columns together."""
    mesh, config = make_mesh(4, 2, jax.devices()), dataclasses.replace(tiny_update.CONFIG, vocab_size=640)
    policy = Policy(config, mesh=mesh)
    variables = shard(jax.jit(lambda key: init_variables(config, key))(jax.random.key(0)), mesh)

    def loss(variables, batch):
        return jnp.sum(jnp.sin(policy.forward_group(variables, *batch)))

    text = jax.jit(jax.grad(loss)).lower(variables, shard_batch(make_batch(), mesh)[:4]).compile().as_text()
    table = f"[{640 // 2},{config.hidden_size}]"
    return [line.strip() for line in text.splitlines() if "all-gather" in line.split("metadata")[0] and table in line]


def uneven():
    """Tokens of 12 prompts, which 8 devices do not divide, over a mesh and on one device."""
    prompts = np.random.default_rng(0).integers(3, 20, (12, 5))

    def written(mesh):
        policy = Policy(tiny_update.CONFIG, mesh=mesh)
        sample = make_sampler(policy, SamplingParams(2, 3, temperature=0.0), eos_ids=(2,), pad_id=0)
        variables = shard(tiny_update.make_variables(), mesh)
        return np.asarray(sample(variables, prompts, prompts > 0, jax.random.split(jax.random.key(0), 12)).tokens)

    return [written(mesh).tolist() for mesh in (None, make_mesh(8, 1, jax.devices()))]


def tower():
    """How far states and gradients of a tower over a mesh are from those of one device; how its states lie."""
    tokens = dict(image_token=1, video_token=2, vision_start_token=3, vision_end_token=4)
    shape = dict(depth=3, width=32, inner=40, heads=4, out=32, patch=2, activation="silu", initializer_range=0.2)
    config = VisionConfig("qwen2_5_vl", window=2, full_attention_layers=(1,), **shape, **tokens)
    rng = np.random.default_rng(0)
    grids = [[(4, 6)], [(2, 10), (4, 4)], [], [(6, 4)]] * 2
    rows = [[Picture(rng.normal(size=(h * w, config.pixels)), (h, w)) for h, w in row] for row in grids]
    pictures, params = pack_rows(rows, config), init_tower(config, jax.random.key(0))

    def over(mesh):
        return partial(encode_pictures, Tower(config, spread=mesh and OverPrompts(mesh)))

    def seen(mesh):
        tower = over(mesh)

        def total(params, pictures):
            states = tower(params, pictures).states
            return jnp.sum(states**2), states

        whole, shown = shard({"visual": params}, mesh), shard_batch(pictures, mesh)
        (_, states), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(whole, shown)
        return states, grads

    def apart(one, other):
        return float(np.abs(np.asarray(one) - np.asarray(other)).max() / np.abs(np.asarray(one)).max())

    mesh = make_mesh(2, 4, jax.devices())
    expected, (states, grads) = seen(None), seen(mesh)
    see = make_see(SimpleNamespace(encode_images=over(mesh), mesh=mesh))
    drawn, _ = see(shard({"visual": params}, mesh), jax.device_put(pictures, jax.devices()[1]))
    return {
        "drawn": apart(expected[0], drawn.states),
        "apart": max(jax.tree.leaves(jax.tree.map(apart, expected, (states, grads)))),
        "rows": states.addressable_shards[0].data.shape[0],
    }


if __name__ == "__main__":
    json.dump({name: globals()[name]() for name in sys.argv[1:]}, sys.stdout)
