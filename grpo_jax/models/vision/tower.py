"""Vision towers as pure functions: pictures in, states that take the places of placeholder tokens out."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.models.families.family import COLUMNS, FUSED, ROWS
from grpo_jax.models.layers import LayerNorm, Projection, RMSNorm
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.variables import VISUAL, Variables, tower_params
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.layers import (
    Block,
    GatedBlock,
    Layout,
    Merger,
    PlainBlock,
    interpolated,
    places,
    rotation,
    window_slots,
)
from grpo_jax.models.vision.pictures import Pictures, PictureStates


class TowerFamily(NamedTuple):
    """One family of towers.

    Attributes:
        block: its layer.
        norm: its norms, made as norm(epsilon, param_dtype).
        patch_bias: whether the map from pixels to states has a bias.
        projections: names of the layers' kernels, on which adapters can be put → how devices share them.
        names: of its modules: the tower's → Hugging Face's, with {} for the number of what is stacked.
    """

    block: type[Block]
    norm: type[nn.Module]
    patch_bias: bool
    projections: Mapping[str, str]
    names: Mapping[str, str]


def names_of(modules: Mapping[str, str], merger: Mapping[str, str]) -> dict[str, str]:
    """Names that all families have, with those of a layer's MLP and of the merger."""
    return {
        "patch_embed": "patch_embed.proj",
        **{f"layers/{name}": f"blocks.{{}}.{name}" for name in ("norm1", "norm2")},
        **{f"layers/{name}": f"blocks.{{}}.attn.{name}" for name in ("qkv", "proj")},
        **{f"layers/{name}": f"blocks.{{}}.mlp.{theirs}" for name, theirs in modules.items()},
        **{f"merger/{name}": f"merger.{theirs}" for name, theirs in merger.items()},
    }


PROJECTIONS = {"qkv": FUSED, "proj": ROWS, "fc1": COLUMNS, "fc2": ROWS}
MERGER = {"norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"}

_QWEN2_VL = TowerFamily(
    block=PlainBlock,
    norm=LayerNorm,
    patch_bias=False,
    projections=PROJECTIONS,
    names=names_of({"fc1": "fc1", "fc2": "fc2"}, MERGER),
)

_MLP = {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS}

_QWEN2_5_VL = TowerFamily(
    block=GatedBlock,
    norm=RMSNorm,
    patch_bias=False,
    projections={"qkv": FUSED, "proj": ROWS, **_MLP},
    names=names_of({name: name for name in _MLP}, MERGER),
)

_MERGER = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}

_QWEN3_VL = TowerFamily(
    block=PlainBlock,
    norm=LayerNorm,
    patch_bias=True,
    projections=PROJECTIONS,
    names=names_of({"fc1": "linear_fc1", "fc2": "linear_fc2"}, _MERGER)
    | {"pos_embed": "pos_embed"}
    | {f"deepstack/{name}": f"deepstack_merger_list.{{}}.{theirs}" for name, theirs in _MERGER.items()},
)

TOWERS: dict[str, TowerFamily] = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen3_vl": _QWEN3_VL,
}


class Tower(nn.Module):
    """From patches to merged states.

    Attributes:
        config: shape and choices.
        dtype: of the computation.
        param_dtype: of freshly drawn parameters.
        remat: what the backward pass computes again (see ``policy.make_policy``).
        lora: adapters' configuration; they are used where the ``lora`` collection holds them.
        spread: lays the states [N, S, D] that enter a layer over a mesh of devices; None for one device.
    """

    config: VisionConfig
    dtype: jax.typing.DTypeLike = jnp.float32
    param_dtype: jax.typing.DTypeLike = jnp.float32
    remat: str = "products"
    lora: LoraConfig | None = None
    spread: Callable[[jax.Array], jax.Array] | None = None

    def setup(self):
        """Declare the weights."""
        c, family = self.config, TOWERS[self.config.family]
        types = (self.dtype, self.param_dtype)
        self.patch_embed = Projection(c.width, family.patch_bias, *types)
        if c.positions:
            self.pos_embed = self.param("pos_embed", nn.initializers.zeros, (c.positions, c.width), self.param_dtype)
        self.layers = rematerialised(family.block, self.remat)(c, *types, self.lora)
        self.merger = Merger(c, family.norm, False, *types)
        if c.deepstack_layers:
            stack = nn.vmap(Merger, in_axes=0, variable_axes={"params": 0}, split_rngs={"params": True})
            self.deepstack = stack(c, family.norm, True, *types)

    def __call__(
        self, patches: jax.Array, grid: jax.Array, windows: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Patches [N, S, C] of pictures with grids i32 [N, 2] to states [N, M, D] and deepstack's, each [N, M, D]."""
        c = self.config
        where = places(grid, patches.shape[1], c.merge)
        x = self.patch_embed(patches.astype(self.dtype))
        if c.positions:
            x = x + interpolated(self.pos_embed, c.side, where, grid).astype(self.dtype)
        layout = Layout(where.present, rotation(c, where))
        if c.window is not None:
            layout = layout._replace(**_windows(windows, patches.shape[1] // c.merged))
        x, kept = self._run(x, layout)
        states = self.merger(x)
        deepstack = tuple(self.deepstack(kept)) if c.deepstack_layers else ()
        merged = where.present[:, :: c.merged, None]
        return jnp.where(merged, states, 0), tuple(jnp.where(merged, part, 0) for part in deepstack)

    def _run(self, x: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
        """States after all layers, and after those of deepstack [J, N, S, D]."""
        c = self.config

        def step(block: Block, carry: tuple[jax.Array, jax.Array], layer: tuple[Any, ...]) -> tuple[Any, None]:
            x, kept = carry
            whole, keep = layer
            x = block(x if self.spread is None else self.spread(x), whole, layout)
            return (x, kept if keep is None else jnp.where(keep[:, None, None, None], x[None], kept)), None

        layers = jnp.arange(c.depth)
        whole = None if c.window is None else jnp.isin(layers, jnp.array(c.full_attention_layers, jnp.int32))
        keep = layers[:, None] == jnp.array(c.deepstack_layers)[None] if c.deepstack_layers else None
        scanned = nn.scan(
            step, variable_axes={"params": 0, "lora": 0}, split_rngs={"params": True}, in_axes=0, length=c.depth
        )
        kept = jnp.zeros((len(c.deepstack_layers), *x.shape), x.dtype)
        return scanned(self.layers, (x, kept), (whole, keep))[0]


def _windows(windows: jax.Array | None, tokens: int) -> dict[str, jax.Array]:
    if windows is None:
        raise ValueError("windows: this tower's attention has windows, and the pictures came without; see `windows_of`")
    return dict(zip(("windows", "slots"), window_slots(windows, tokens), strict=True))


def rematerialised(block: type[Block], remat: str) -> type[Block]:
    """The layer with what its backward pass computes again: ``none``, ``products`` or ``layer``."""
    if remat == "none":
        return block
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "products" else None
    return nn.remat(block, prevent_cse=False, policy=keep)


def make_tower(
    config: VisionConfig,
    dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "products",
    lora: LoraConfig | None = None,
    spread: Callable[[jax.Array], jax.Array] | None = None,
) -> Callable[[Variables, Pictures], PictureStates]:
    """The function of a tower.

    Args:
        config: its shape and choices.
        dtype: of the computation; norms, rotations and softmax are float32 either way.
        remat: what the backward pass computes again: ``none``; ``products``, all but the products with weights;
            ``layer``, whole layers.
        lora: configuration of the adapters, if variables will hold any.
        spread: lays states [N, S, D] over a mesh; None for one device.

    Returns:
        encode_images(variables, Pictures) -> PictureStates. The tower's parameters are ``variables["visual"]``, or
        ``variables["params"]["visual"]`` where it is trained; adapters ``variables["lora"]["visual"]``, if any.

    Raises:
        ValueError: an adapter's target is no projection of this tower.
    """
    projections = tuple(TOWERS[config.family].projections)
    unknown = [name for name in (lora.vision if lora else ()) if name not in projections]
    if unknown:
        raise ValueError(f"vision must be some of {projections} for the tower of {config.family!r}, got {unknown}")
    tower = Tower(config, dtype=dtype, remat=remat, lora=lora, spread=spread)

    def encode_images(variables: Variables, pictures: Pictures) -> PictureStates:
        _check(config, pictures)
        own = {"params": tower_params(variables)}
        adapters = variables.get("lora", {}).get(VISUAL)
        if adapters is not None:
            own["lora"] = adapters
        lead = pictures.grid.shape[:-1]

        def flat(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else jnp.asarray(x).reshape(-1, *x.shape[len(lead) :])

        states, deepstack = tower.apply(own, *map(flat, pictures))

        def apart(x: jax.Array) -> jax.Array:
            return x.reshape(*lead, *x.shape[1:])

        return PictureStates(apart(states), jnp.asarray(pictures.grid) // config.merge, tuple(map(apart, deepstack)))

    return encode_images


def _check(config: VisionConfig, pictures: Pictures) -> None:
    patches, grid, _ = pictures
    shapes = f"got {patches.shape} and {grid.shape}"
    if patches.shape[:-2] != grid.shape[:-1] or grid.shape[-1:] != (2,):
        raise ValueError(f"patches and grid must be [.., I, S, C] and [.., I, 2], {shapes}")
    if patches.shape[-1] != config.pixels or patches.shape[-2] % config.merged:
        raise ValueError(
            f"patches must have {config.pixels} numbers each and be a multiple of {config.merged}, {shapes}"
        )


def tower_shapes(config: VisionConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> dict[str, Any]:
    """The tower's parameters as shapes; nothing is allocated."""
    return jax.eval_shape(lambda key: init_tower(config, key, dtype), jax.random.key(0))


def init_tower(config: VisionConfig, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> dict[str, Any]:
    """Freshly drawn parameters: normal weights, unit norms, zero biases."""
    tower = Tower(config, param_dtype=dtype, remat="none")
    patches = jax.ShapeDtypeStruct((1, config.merged, config.pixels), jnp.float32)
    windows = None
    if config.window is not None:
        windows = jax.ShapeDtypeStruct((1, 1, config.window**2), jnp.int32)
    grid = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    shapes = jax.eval_shape(tower.init, key, patches, grid, windows)["params"]
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(key, len(leaves))

    def draw(name: str, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if name in ("scale", "bias"):
            return jnp.full(leaf.shape, name == "scale", leaf.dtype)
        return (jax.random.normal(key, leaf.shape, jnp.float32) * config.initializer_range).astype(leaf.dtype)

    drawn = [draw(path[-1].key, leaf, own) for (path, leaf), own in zip(leaves, keys, strict=True)]
    return jax.tree_util.tree_unflatten(structure, drawn)
