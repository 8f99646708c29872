"""The vision towers against transformers: states and gradients, and invariances."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from flax.traverse_util import flatten_dict  # noqa: E402
from support.vision import tiny_pictures as tiny  # noqa: E402

from grpo_jax.models.hf import folder as hf  # noqa: E402
from grpo_jax.models.hf.weights import tower_table  # noqa: E402
from grpo_jax.models.variables import with_tower  # noqa: E402
from grpo_jax.models.vision import tower as tower_module  # noqa: E402
from grpo_jax.models.vision.pictures import (  # noqa: E402
    Pictures,
    pack_windows,
    same_size,
    windows_of,
)
from grpo_jax.models.vision.tower import Tower, encode_pictures  # noqa: E402

REMAT = {"qwen2_vl": "none", "qwen2_5_vl": "products", "qwen3_vl": "layer"}


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def world(request, tmp_path_factory):
    return tiny.seeing(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def see(world):
    program = jax.jit(partial(encode_pictures, Tower(world.config)))
    return lambda *given: jax.device_get(program(*given))


def test_states_are_those_of_transformers(world, see):
    rows = tiny.draw(world.config)
    seen = see(world.variables, tiny.packed(rows, world.config))
    with torch.no_grad():
        expected, deepstack = tiny.torch_states(world.torch, rows)
    assert len(seen.deepstack) == len(deepstack) == len(world.config.deepstack_layers)
    for ours, theirs in zip((seen.states, *seen.deepstack), (expected, *deepstack), strict=True):
        for got, wanted in zip(tiny.flat_states(ours, rows), theirs, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-4)
            assert wanted.abs().max() > 1
    np.testing.assert_array_equal(seen.grid[0], [[3, 5], [2, 2], [0, 0]])


@pytest.mark.parametrize(
    "world",  # the gradients of the others are part of test_seeing.py's
    ["qwen2_vl", *(pytest.param(name, marks=pytest.mark.wide) for name in ("qwen2_5_vl", "qwen3_vl"))],
    indirect=True,
)
def test_gradients_are_those_of_torch(world):
    rows = tiny.draw(world.config, seed=1)
    pictures = tiny.packed(rows, world.config)
    tower = partial(encode_pictures, Tower(world.config, remat=REMAT[world.config.model_type]))
    rng = np.random.default_rng(2)
    weights = [rng.normal(size=(len(picture.patches) // 4, 32)).astype(np.float32) for row in rows for picture in row]

    def ours(visual):
        seen = tower(with_tower({"params": {}}, visual, trained=True), pictures)
        states = (flat for layer in (seen.states, *seen.deepstack) for flat in tiny.flat_states(jnp.tanh(layer), rows))
        return sum(jnp.sum(flat * weights[i % len(weights)]) for i, flat in enumerate(states))

    grads = flatten_dict({"visual": jax.jit(jax.grad(ours))(world.loaded.visual)})
    world.torch.zero_grad()
    expected, deepstack = tiny.torch_states(world.torch, rows)
    for layer in (expected, *deepstack):
        for state, weight in zip(layer, weights, strict=True):
            (state.tanh() * torch.tensor(weight)).sum().backward(retain_graph=True)
    state = {name: w for name, w in world.torch.named_parameters() if "visual" in name}
    table = tower_table(world.loaded.config, state)
    assert table.keys() == state.keys()
    for name, place in table.items():
        got = grads[place.path][place.index]
        got = np.asarray(got.T if place.transpose else got).reshape(place.shape)
        wanted = state[name].grad.numpy()
        own = np.abs(wanted).max()
        assert own > 0 and np.abs(got - wanted).max() <= 1e-3 * own + 1e-6, name


@pytest.mark.parametrize("world", ["qwen2_5_vl"], indirect=True)
def test_room_in_the_bucket_changes_nothing(world, see):
    rows = tiny.draw(world.config)
    tight = see(world.variables, tiny.packed(rows, world.config))
    wide = see(world.variables, tiny.packed([*rows, []], world.config, slots=4, patches=96))
    for ours, wider in zip((tight.states, *tight.deepstack), (wide.states, *wide.deepstack), strict=True):
        for one, other in zip(tiny.flat_states(ours, rows), tiny.flat_states(wider, rows), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    # What lies behind a picture has no influence, whatever it is.
    pictures = tiny.packed(rows, world.config)
    behind = np.arange(pictures.patches.shape[2]) >= np.prod(pictures.grid, axis=-1)[..., None]
    noisy = pictures._replace(patches=np.where(behind[..., None], 1e3, pictures.patches))
    jax.tree.map(np.testing.assert_array_equal, see(world.variables, noisy), tight)


@pytest.mark.parametrize("world", ["qwen3_vl"], indirect=True)
def test_where_there_is_no_picture_there_is_nothing(world):
    config = world.config
    patches = np.zeros((2, 1, 16, config.pixels), np.float32)
    grid = np.zeros((2, 1, 2), np.int32)
    pictures = Pictures(patches, grid, pack_windows(grid, 16, config))
    tower = partial(encode_pictures, Tower(config))

    def total(visual, patches):
        seen = tower({"visual": visual}, pictures._replace(patches=patches))
        return sum(jnp.sum(jnp.exp(layer)) for layer in (seen.states, *seen.deepstack)), seen

    (_, seen), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(world.loaded.visual, patches)
    assert all(not np.any(layer) for layer in (seen.states, *seen.deepstack))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("world", ["qwen2_5_vl"], indirect=True)
def test_heads_that_take_turns_see_the_same(world, see, monkeypatch):
    rows = tiny.draw(world.config)
    pictures = tiny.packed(rows, world.config)

    def total(tower, visual):
        seen = tower({"visual": visual}, pictures)
        return jnp.sum(seen.states**2), seen

    def run():
        tower = partial(encode_pictures, Tower(world.config))
        return jax.jit(jax.value_and_grad(partial(total, tower), has_aux=True))(world.loaded.visual)

    together = run()
    monkeypatch.setattr(tower_module, "_MOST_SCORES", 1)
    for one, other in zip(*map(jax.tree.leaves, (together, run())), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(one).max())


@pytest.mark.parametrize("world", ["qwen2_5_vl"], indirect=True)
def test_pictures_of_one_size_where_they_are(world, see):
    rows = tiny.draw(world.config, [[(6, 6)], [(6, 6)]])
    patches = jnp.stack([row[0].patches for row in rows])[:, None]
    jax.tree.map(
        np.testing.assert_array_equal, same_size(patches, (6, 6), world.config), tiny.packed(rows, world.config)
    )


def test_windows_are_those_of_transformers():
    from transformers.vision_utils import get_vision_window_index

    config = hf.model_config("tiny", tiny.reference.model("qwen2_5_vl").config.to_dict()).vision
    config = dataclasses.replace(config, window=4)
    for grid in ((8, 8), (6, 10), (36, 36), (2, 30), (18, 8), (2, 2)):
        index, seams = get_vision_window_index(torch.tensor([[1, *grid]]), 2, window_size=32, patch_size=4)
        ours = windows_of(grid, config)
        assert ours.shape[1] == 16
        ours = [window[window >= 0] for window in ours]
        np.testing.assert_array_equal(np.concatenate(ours), index)
        np.testing.assert_array_equal(np.cumsum([0] + [4 * len(window) for window in ours]), seams)
