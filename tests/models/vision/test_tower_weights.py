"""A tower's weights: reading, writing, adapters, placement, and errors."""

from functools import partial

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from support import tiny_models  # noqa: E402
from support import torch_reference as reference  # noqa: E402
from support.folders import load_folder  # noqa: E402
from support.tiny_decoders import normal_like  # noqa: E402
from support.vision import tiny_pictures as tiny  # noqa: E402

from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.models.hf import folder as hf  # noqa: E402
from grpo_jax.models.hf.peft import load_adapters, save_adapters  # noqa: E402
from grpo_jax.models.lora import LoraConfig, init_adapters, merge  # noqa: E402
from grpo_jax.models.sharding import shardings  # noqa: E402
from grpo_jax.models.vision.tower import TOWERS, Tower, encode_pictures, tower_shapes  # noqa: E402


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def world(request, tmp_path_factory):
    return tiny.seeing(tmp_path_factory.mktemp(request.param), request.param)


def tensors(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def tower_of_torch(folder, rows):
    """Tower states that transformers computes from a folder."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").eval()
    with torch.no_grad():
        states, deepstack = tiny.torch_states(model, rows)
    return [state for layer in (states, *deepstack) for state in layer]


def all_states(seen, rows):
    seen = jax.device_get(seen)
    return [state for layer in (seen.states, *seen.deepstack) for state in tiny.flat_states(layer, rows)]


def assert_states_agree(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_round_trip_is_bit_equal(tmp_path, architecture):
    source = reference.folder(tmp_path / "source", architecture, dtype=torch.bfloat16, max_shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    loaded = load_folder(source, tokenizer=False, vision=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.visual)} == {np.dtype("float32")}
    hf.save_folder(tmp_path / "export", source, loaded.config, {**loaded.params, "visual": loaded.visual})
    before, after = tensors(source), tensors(tmp_path / "export")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert load_folder(source, tokenizer=False).visual is None


@pytest.mark.parametrize("world", ["qwen3_vl"], indirect=True)  # round trips are those of all
def test_a_trained_tower_is_written_and_transformers_agrees(world, tmp_path):
    params = jax.device_get({**world.loaded.params, "visual": world.loaded.visual})
    changed = jax.tree.map(lambda leaf: leaf * np.float32(1.1) + np.float32(0.01), params)
    hf.save_folder(
        tmp_path / "export", world.loaded.path, world.loaded.config, merge({"params": changed}, None), dtype="float32"
    )
    before, after = tensors(world.loaded.path), tensors(tmp_path / "export")
    assert not any(torch.equal(before[name], after[name]) for name in before)
    rows = tiny.draw(world.config, seed=3)
    ours = jax.jit(partial(encode_pictures, Tower(world.config)))({"params": changed}, tiny.packed(rows, world.config))
    assert_states_agree(all_states(ours, rows), tower_of_torch(tmp_path / "export", rows))


def adapted(world, rank=2):
    """Adapters on decoder and tower, away from their start of zeros; drawn on the host."""
    lora = LoraConfig(rank, 7.0, ("q_proj",), tuple(TOWERS[world.config.model_type].projections))
    make = partial(init_adapters, lora=lora)
    shapes = jax.eval_shape(make, world.loaded.params, jax.random.key(0), visual=world.loaded.visual)
    return lora, normal_like(shapes, 0.2)


@pytest.mark.parametrize("world", [pytest.param("qwen2_5_vl", marks=pytest.mark.wide), "qwen3_vl"], indirect=True)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_computes_what_we_compute(world, tmp_path):
    peft = pytest.importorskip("peft")
    lora, adapters = adapted(world)
    save_adapters(tmp_path / "adapter", adapters, lora, world.loaded.config, base=str(world.loaded.path))
    model = transformers.AutoModelForImageTextToText.from_pretrained(world.loaded.path, dtype="float32").eval()
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    reached = {name for name, part in theirs.named_modules() if isinstance(part, peft.tuners.lora.LoraLayer)}
    count = world.loaded.config.num_layers + len(lora.vision) * world.config.depth
    assert len(reached) == count
    rows = tiny.draw(world.config, seed=4)
    pictures = tiny.packed(rows, world.config)
    ours = jax.jit(partial(encode_pictures, Tower(world.config, lora=lora)))(
        world.variables | {"lora": adapters}, pictures
    )
    with torch.no_grad():
        states, deepstack = tiny.torch_states(theirs.base_model.model, rows)
    assert_states_agree(all_states(ours, rows), [state for layer in (states, *deepstack) for state in layer])
    again = load_adapters(tmp_path / "adapter", world.loaded.config)
    assert again[0] == lora
    jax.tree.map(np.testing.assert_array_equal, again[1], adapters)


def test_broken_towers_are_named(tmp_path):
    source = tiny_models.qwen_vl(tmp_path / "source", "qwen2_5_vl")
    whole = load_file(source / "model.safetensors")
    name = "visual.blocks.0.mlp.up_proj.weight"

    def load_with(**changes):
        kept = {key: tensor for key, tensor in (whole | changes).items() if tensor is not None}
        save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
        load_folder(source, tokenizer=False)  # text needs no tower
        load_folder(source, tokenizer=False, vision=True)

    for changes, message in (
        ({name: None}, f"cannot load the policy in .*{name} is missing"),
        ({"visual.blocks.7.norm1.weight": torch.ones(16)}, "visual.blocks.7.norm1.weight is unexpected"),
    ):
        with pytest.raises(UserError, match=message):
            load_with(**changes)
    load_with()


def test_a_mesh_shares_out_what_divides(world):
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tensor"))
    shapes = tower_shapes(world.config)
    placed = shardings({"visual": shapes, "params": {"visual": shapes}}, mesh)
    kernels = [
        (path[-2].key, place.spec)
        for path, place in jax.tree_util.tree_flatten_with_path(placed)[0]
        if path[-1].key == "kernel"
    ]
    assert kernels and all(any(spec) for _, spec in kernels)
    shardings({"lora": adapted(world)[1]}, mesh)
    odd = jax.sharding.AbstractMesh((3, 5), ("fsdp", "tensor"))
    placed = jax.tree.leaves_with_path(shardings({"visual": shapes}, odd))
    assert all(not any(place.spec) for path, place in placed if "layers" in jax.tree_util.keystr(path))
