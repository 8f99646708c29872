"""Vision towers as pure functions from pictures to the states that replace placeholder tokens."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.models.layers import (
    ACTIVATIONS,
    COLUMNS,
    FUSED,
    GATED_PROJECTIONS,
    ROWS,
    LayerNorm,
    Projection,
    RMSNorm,
    draw_params,
    remat_block,
)
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.rope import rotate
from grpo_jax.models.variables import VISUAL, PyTree, Variables, tower_params
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Pictures, PictureStates

_MOST_SCORES = 2**28  # scores held at once, 1 GiB in float32; beyond that, heads run one by one
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)  # a masked score; finite, so that no row becomes NaN


class PatchPlaces(NamedTuple):
    """Positions of patches in their pictures: rows and columns i32 [N, S], 0 if `present`, bool [N, S], is False."""

    rows: jax.Array
    columns: jax.Array
    present: jax.Array


class Layout(NamedTuple):
    """Layout of the pictures, the same for every layer."""

    present: jax.Array  # bool [N, S], False on padding
    rotation: tuple[jax.Array, jax.Array]  # cosine and sine of the patches' positions, each float32 [N, S, E/2]
    windows: jax.Array | None = None  # i32 [N, W, B], merged tokens of each attention window, padded with M
    slots: jax.Array | None = None  # i32 [N, M], index of each merged token in the concatenated windows; or None


def places(grid: jax.Array, patches: int, merge: int) -> PatchPlaces:
    """Return the PatchPlaces of S patches in the processor's order: by merged block, then row by row.

    `grid` i32 [N, 2] holds rows and columns of patches, multiples of ``merge``; (0, 0) for no picture.
    """
    index = jnp.arange(patches, dtype=jnp.int32)[None]
    height, width = grid[:, :1], grid[:, 1:]
    block, across = index // merge**2, jnp.maximum(width // merge, 1)
    rows = block // across * merge + index // merge % merge
    columns = block % across * merge + index % merge
    present = index < height * width
    return PatchPlaces(jnp.where(present, rows, 0), jnp.where(present, columns, 0), present)


def patch_rotation(config: VisionConfig, where: PatchPlaces) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine, float32 [N, S, E/2]: a quarter of a head for the row, a quarter for the column."""
    exponent = jnp.arange(0, config.head_dim // 2, 2, dtype=jnp.float32) / (config.head_dim // 2)
    table = 1.0 / config.theta**exponent
    halves = [axis[..., None].astype(jnp.float32) * table[None, None] for axis in (where.rows, where.columns)]
    angles = jnp.concatenate(halves, axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def window_slots(windows: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return windows with M for -1, and each merged token's index in the concatenated windows (0: none)."""
    windows = jnp.where(windows < 0, tokens, windows)
    flat = windows.reshape(len(windows), -1)
    pictures = jnp.arange(len(windows))[:, None]
    order = jnp.arange(flat.shape[1], dtype=jnp.int32)[None]
    slots = jnp.zeros((len(windows), tokens), jnp.int32).at[pictures, flat].set(order, mode="drop")
    return windows, slots


def attend_patches(query: jax.Array, key: jax.Array, value: jax.Array, readable: jax.Array) -> jax.Array:
    """Compute softmax attention of patches [.., S, H, E] over readable ones, bool [.., S]; scores are float32.

    If the scores would need too much memory, heads run one by one.
    """
    heads = max(1, _MOST_SCORES * query.shape[-2] // math.prod((*query.shape[:-1], query.shape[-3])))
    if heads >= query.shape[-2]:
        return _attend(query, key, value, readable)

    @jax.checkpoint
    def few(part: tuple[jax.Array, ...]) -> jax.Array:
        return _attend(*(x[..., None, :] for x in part), readable)[..., 0, :]

    each = tuple(jnp.moveaxis(x, -2, 0) for x in (query, key, value))
    return jnp.moveaxis(jax.lax.map(few, each, batch_size=heads), 0, -2)


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, readable: jax.Array) -> jax.Array:
    scores = jnp.einsum("...qhe,...khe->...hqk", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(readable[..., None, None, :], scores * query.shape[-1] ** -0.5, _HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("...hqk,...khe->...qhe", weights, value)


def attend_windows(query: jax.Array, key: jax.Array, value: jax.Array, layout: Layout) -> jax.Array:
    """Apply `attend_patches` within each window: gather [N, S, H, E] to [N, W, window patches, H, E] and back."""
    windows, slots = layout.windows, layout.slots
    pictures, tokens = slots.shape
    count, size = windows.shape[1:]
    merged = query.shape[1] // tokens

    def gathered(x: jax.Array) -> jax.Array:
        x = x.reshape(pictures, tokens, -1)
        x = jnp.take_along_axis(x, windows.reshape(pictures, -1, 1), axis=1, mode="fill", fill_value=0)
        return x.reshape(pictures, count, size * merged, *query.shape[2:])

    readable = jnp.repeat(windows < tokens, merged, axis=-1)
    mixed = attend_patches(gathered(query), gathered(key), gathered(value), readable)
    mixed = jnp.take_along_axis(mixed.reshape(pictures, count * size, -1), slots[..., None], axis=1)
    return mixed.reshape(query.shape)


class TowerBlock(nn.Module):
    """One layer of attention and an MLP, which is gated in some architectures."""

    config: VisionConfig
    dtype: jax.typing.DTypeLike
    lora: LoraConfig | None = None

    def setup(self):
        """Declare the layer's weights."""
        c = self.config
        architecture = TOWERS[c.model_type]
        projection = partial(Projection, use_bias=True, dtype=self.dtype, lora=self.lora)
        self.norm1 = architecture.norm(c.epsilon)
        self.norm2 = architecture.norm(c.epsilon)
        self.qkv = projection(3 * c.width)
        self.proj = projection(c.width)
        if architecture.gated:
            self.gate_proj = projection(c.inner)
            self.up_proj = projection(c.inner)
            self.down_proj = projection(c.width)
        else:
            self.fc1 = projection(c.inner)
            self.fc2 = projection(c.width)

    def __call__(self, x: jax.Array, whole: jax.Array | None, layout: Layout) -> jax.Array:
        """Run the layer on states [N, S, D].

        `whole`, a bool scalar, selects attention over the whole picture rather than a window; None: always.
        """
        x = x + self.proj(self.attention(self.norm1(x), whole, layout))
        return x + self._mlp(self.norm2(x))

    def _mlp(self, x: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.config.activation]
        if TOWERS[self.config.model_type].gated:
            return self.down_proj(activation(self.gate_proj(x)) * self.up_proj(x))
        return self.fc2(activation(self.fc1(x)))

    def attention(self, x: jax.Array, whole: jax.Array | None, layout: Layout) -> jax.Array:
        """Attend over a picture or a window, [N, S, D]."""
        c = self.config
        fused = self.qkv(x).reshape(*x.shape[:-1], 3, c.heads, c.head_dim)
        cos, sin = (part[:, :, None] for part in layout.rotation)
        query, key, value = rotate(fused[:, :, 0], cos, sin), rotate(fused[:, :, 1], cos, sin), fused[:, :, 2]
        everywhere = partial(attend_patches, readable=layout.present)
        if whole is None:
            return everywhere(query, key, value).reshape(x.shape)
        near = partial(attend_windows, layout=layout)
        return jax.lax.cond(whole, everywhere, near, query, key, value).reshape(x.shape)


class Merger(nn.Module):
    """Merges patches to one state of the language model's width: norm, linear map, GELU, linear map.

    With `norm_merged` the norm is over the merged token rather than over each patch.
    """

    config: VisionConfig
    norm: type[nn.Module]
    norm_merged: bool
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [N, S, D] to [N, M, D of the language model]."""
        c = self.config
        norm = self.norm(c.epsilon, name="norm")
        merged = (x.shape[0], x.shape[1] // c.merged, c.merged * c.width)
        x = norm(x.reshape(merged)) if self.norm_merged else norm(x).reshape(merged)
        x = Projection(merged[-1], True, self.dtype, name="fc1")(x)
        x = jax.nn.gelu(x, approximate=False)
        return Projection(c.out, True, self.dtype, name="fc2")(x)


def interpolated(table: jax.Array, where: PatchPlaces, grid: jax.Array) -> jax.Array:
    """Interpolate learned positions bilinearly, float32 [N, S, D]; the corners of table and picture coincide.

    The largest square in `table` [positions, D] is read row by row.
    """
    side = math.isqrt(len(table))

    def taps(index: jax.Array, size: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        place = index.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1).astype(jnp.float32)
        first = jnp.floor(place)
        corner = first.astype(jnp.int32)
        share = place - first
        return [(jnp.minimum(corner, side - 1), 1 - share), (jnp.minimum(corner + 1, side - 1), share)]

    rows, columns = taps(where.rows, grid[:, :1]), taps(where.columns, grid[:, 1:])
    return sum(
        jnp.take(table, row * side + column, axis=0).astype(jnp.float32) * (share * part)[..., None]
        for row, share in rows
        for column, part in columns
    )


class TowerArchitecture(NamedTuple):
    """One architecture of vision towers."""

    gated: bool  # whether a layer's MLP is gated
    norm: type[nn.Module]  # its norms, made as norm(epsilon)
    patch_bias: bool  # whether the map from pixels to states has a bias
    projections: Mapping[str, str]  # names of the layers' kernels, which can have adapters → their sharding
    names: Mapping[str, str]  # of its modules: the tower's → Hugging Face's, with {} for the index in a stack


def names_of(modules: Mapping[str, str], merger: Mapping[str, str]) -> dict[str, str]:
    """Return the names of all architectures, with those of a layer's MLP and of the merger."""
    return {
        "patch_embed": "patch_embed.proj",
        **{f"layers/{name}": f"blocks.{{}}.{name}" for name in ("norm1", "norm2")},
        **{f"layers/{name}": f"blocks.{{}}.attn.{name}" for name in ("qkv", "proj")},
        **{f"layers/{name}": f"blocks.{{}}.mlp.{theirs}" for name, theirs in modules.items()},
        **{f"merger/{name}": f"merger.{theirs}" for name, theirs in merger.items()},
    }


_PLAIN_MERGER = {"norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"}
_QWEN3_MERGER = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}

_QWEN2_VL = TowerArchitecture(
    gated=False,
    norm=LayerNorm,
    patch_bias=False,
    projections={"qkv": FUSED, "proj": ROWS, "fc1": COLUMNS, "fc2": ROWS},
    names=names_of({"fc1": "fc1", "fc2": "fc2"}, _PLAIN_MERGER),
)
TOWERS: dict[str, TowerArchitecture] = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL._replace(
        gated=True,
        norm=RMSNorm,
        projections={"qkv": FUSED, "proj": ROWS, **GATED_PROJECTIONS},
        names=names_of({name: name for name in GATED_PROJECTIONS}, _PLAIN_MERGER),
    ),
    "qwen3_vl": _QWEN2_VL._replace(
        patch_bias=True,
        names=names_of({"fc1": "linear_fc1", "fc2": "linear_fc2"}, _QWEN3_MERGER)
        | {"pos_embed": "pos_embed"}
        | {f"deepstack/{name}": f"deepstack_merger_list.{{}}.{theirs}" for name, theirs in _QWEN3_MERGER.items()},
    ),
}


class Tower(nn.Module):
    """Vision tower from patches to merged states; its fields are those of `decoder.Decoder`."""

    config: VisionConfig
    dtype: jax.typing.DTypeLike = jnp.float32
    remat: str = "products"
    lora: LoraConfig | None = None
    spread: Callable[[jax.Array], jax.Array] | None = None

    def setup(self):
        """Declare the weights."""
        c, architecture = self.config, TOWERS[self.config.model_type]
        self.patch_embed = Projection(c.width, architecture.patch_bias, self.dtype)
        if c.positions:
            self.pos_embed = self.param("pos_embed", nn.initializers.zeros, (c.positions, c.width))
        self.layers = remat_block(TowerBlock, self.remat)(c, self.dtype, self.lora)
        self.merger = Merger(c, architecture.norm, False, self.dtype)
        if c.deepstack_layers:
            stack = nn.vmap(Merger, in_axes=0, variable_axes={"params": 0}, split_rngs={"params": True})
            self.deepstack = stack(c, architecture.norm, True, self.dtype)

    def __call__(
        self, patches: jax.Array, grid: jax.Array, windows: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Map patches [N, S, C] with grids i32 [N, 2] to states [N, M, D] and DeepStack's, each [N, M, D]."""
        c = self.config
        where = places(grid, patches.shape[1], c.merge)
        x = self.patch_embed(patches.astype(self.dtype))
        if c.positions:
            x = x + interpolated(self.pos_embed, where, grid).astype(self.dtype)
        layout = Layout(where.present, patch_rotation(c, where))
        if c.window is not None:
            windows, slots = window_slots(windows, patches.shape[1] // c.merged)
            layout = layout._replace(windows=windows, slots=slots)
        x, deep_states = self._run(x, layout)
        states = self.merger(x)
        deepstack = tuple(self.deepstack(deep_states)) if c.deepstack_layers else ()
        merged = where.present[:, :: c.merged, None]
        return jnp.where(merged, states, 0), tuple(jnp.where(merged, part, 0) for part in deepstack)

    def _run(self, x: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
        """Return the states after all layers, and after DeepStack's layers [J, N, S, D]."""
        c = self.config

        def step(block: TowerBlock, carry: tuple[jax.Array, jax.Array], layer: PyTree) -> tuple[PyTree, None]:
            x, deep_states = carry
            whole, keep = layer
            x = block(x if self.spread is None else self.spread(x), whole, layout)
            if keep is not None:
                deep_states = jnp.where(keep[:, None, None, None], x[None], deep_states)
            return (x, deep_states), None

        layers = jnp.arange(c.depth)
        whole = None if c.window is None else jnp.isin(layers, jnp.array(c.full_attention_layers, jnp.int32))
        keep = layers[:, None] == jnp.array(c.deepstack_layers)[None] if c.deepstack_layers else None
        scanned = nn.scan(
            step, variable_axes={"params": 0, "lora": 0}, split_rngs={"params": True}, in_axes=0, length=c.depth
        )
        deep_states = jnp.zeros((len(c.deepstack_layers), *x.shape), x.dtype)
        return scanned(self.layers, (x, deep_states), (whole, keep))[0]


def encode_pictures(tower: Tower, variables: Variables, pictures: Pictures) -> PictureStates:
    """Run a tower on `Pictures` [.., I, ..].

    Its parameters are ``variables["visual"]``, or ``variables["params"]["visual"]`` if trained; its adapters are
    ``variables["lora"]["visual"]``, if any.
    """
    collections = {"params": tower_params(variables)}
    if adapters := variables.get("lora", {}).get(VISUAL):
        collections["lora"] = adapters
    lead = pictures.grid.shape[:-1]
    flat = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[len(lead) :]), pictures)
    result = tower.apply(collections, *flat)
    states, deepstack = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), result)
    return PictureStates(states, jnp.asarray(pictures.grid) // tower.config.merge, deepstack)


def tower_shapes(config: VisionConfig) -> dict[str, PyTree]:
    """Return the shapes of the tower's parameters, without allocation."""
    return jax.eval_shape(lambda key: init_tower(config, key), jax.random.key(0))


def init_tower(config: VisionConfig, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> dict[str, PyTree]:
    """Initialise parameters: normal weights, unit norms, zero biases."""
    tower = Tower(config, remat="none")
    patches = jax.ShapeDtypeStruct((1, config.merged, config.pixels), jnp.float32)
    windows = None if config.window is None else jax.ShapeDtypeStruct((1, 1, config.window**2), jnp.int32)
    grid = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    shapes = jax.eval_shape(tower.init, key, patches, grid, windows)["params"]
    return draw_params(shapes, key, lambda names: config.initializer_range, dtype)
