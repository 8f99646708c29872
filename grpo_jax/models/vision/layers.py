"""Layers of vision towers: places of patches, rotations in two dimensions, attention, mergers."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.models.layers import LayerNorm, Projection, RMSNorm
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.rope import rotate
from grpo_jax.models.vision.config import ACTIVATIONS, VisionConfig

_MOST_SCORES = 2**28  # that are there at once, 1 GiB in float32; where there would be more, heads take turns
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)  # a masked score; finite, so that no row becomes NaN


class PatchPlaces(NamedTuple):
    """Where patches are in their pictures.

    Attributes:
        rows: i32 [N, S], 0 behind a picture's own patches.
        columns: as rows.
        present: bool [N, S], False behind them.
    """

    rows: jax.Array
    columns: jax.Array
    present: jax.Array


class Layout(NamedTuple):
    """What every layer knows of the pictures.

    Attributes:
        present: bool [N, S], which patches there are.
        rotation: cosine and sine of their places, each float32 [N, S, E/2].
        windows: i32 [N, W, B], merged tokens of each attention window, M where there is none; or None.
        slots: i32 [N, M], where each merged token is in the windows laid end to end; or None.
    """

    present: jax.Array
    rotation: tuple[jax.Array, jax.Array]
    windows: jax.Array | None = None
    slots: jax.Array | None = None


def places(grid: jax.Array, patches: int, merge: int) -> PatchPlaces:
    """PatchPlaces of S patches in the processor's order: merged block after merged block, its patches row by row.

    Args:
        grid: i32 [N, 2], rows and columns of patches, multiples of ``merge``; (0, 0) for no picture.
        patches: S.
        merge: patches along a block's side.
    """
    index = jnp.arange(patches, dtype=jnp.int32)[None]
    height, width = grid[:, :1], grid[:, 1:]
    block, across = index // merge**2, jnp.maximum(width // merge, 1)
    rows = block // across * merge + index // merge % merge
    columns = block % across * merge + index % merge
    present = index < height * width
    return PatchPlaces(jnp.where(present, rows, 0), jnp.where(present, columns, 0), present)


def rotation(config: VisionConfig, where: PatchPlaces) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [N, S, E/2]: a quarter of a head turns with the row, a quarter with the column."""
    exponent = jnp.arange(0, config.head_dim // 2, 2, dtype=jnp.float32) / (config.head_dim // 2)
    table = 1.0 / config.theta**exponent
    halves = [axis[..., None].astype(jnp.float32) * table[None, None] for axis in (where.rows, where.columns)]
    angles = jnp.concatenate(halves, axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def window_slots(windows: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """The windows with M for -1, and for each of M merged tokens its place in the windows laid end to end (0: none)."""
    windows = jnp.where(windows < 0, tokens, windows)
    flat = windows.reshape(len(windows), -1)
    pictures = jnp.arange(len(windows))[:, None]
    order = jnp.arange(flat.shape[1], dtype=jnp.int32)[None]
    slots = jnp.zeros((len(windows), tokens), jnp.int32).at[pictures, flat].set(order, mode="drop")
    return windows, slots


def attend(query: jax.Array, key: jax.Array, value: jax.Array, readable: jax.Array) -> jax.Array:
    """Softmax attention of all S patches over the readable ones.

    Args:
        query: [.., S, H, E].
        key: as query.
        value: as query.
        readable: bool [.., S].

    Returns:
        [.., S, H, E] in the query's dtype; scores and softmax are float32.
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
    """The same within each window: [N, S, H, E] gathered to [N, W, patches of a window, H, E] and put back."""
    windows, slots = layout.windows, layout.slots
    pictures, tokens = slots.shape
    count, size = windows.shape[1:]
    merged = query.shape[1] // tokens

    def gathered(x: jax.Array) -> jax.Array:
        x = x.reshape(pictures, tokens, -1)
        x = jnp.take_along_axis(x, windows.reshape(pictures, -1, 1), axis=1, mode="fill", fill_value=0)
        return x.reshape(pictures, count, size * merged, *query.shape[2:])

    readable = jnp.repeat(windows < tokens, merged, axis=-1)
    mixed = attend(gathered(query), gathered(key), gathered(value), readable)
    mixed = jnp.take_along_axis(mixed.reshape(pictures, count * size, -1), slots[..., None], axis=1)
    return mixed.reshape(query.shape)


class Block(nn.Module):
    """One layer; a family's own says its norms and its MLP.

    Attributes:
        config: shape and choices.
        dtype: of the computation.
        param_dtype: of freshly drawn parameters.
        lora: adapters' configuration; they are used where the ``lora`` collection holds them.
    """

    config: VisionConfig
    dtype: jax.typing.DTypeLike
    param_dtype: jax.typing.DTypeLike
    lora: LoraConfig | None = None

    def setup(self):
        """Declare the layer's weights."""
        self.norm1, self.norm2 = self.norm(), self.norm()
        self.qkv = self.projection(3 * self.config.width)
        self.proj = self.projection(self.config.width)
        self.setup_mlp()

    def norm(self) -> nn.Module:
        """One of the layer's two norms."""
        raise NotImplementedError

    def setup_mlp(self) -> None:
        """Declare the MLP's weights."""
        raise NotImplementedError

    def mlp(self, x: jax.Array) -> jax.Array:
        """Normed states [N, S, D] to what is added to them."""
        raise NotImplementedError

    def projection(self, features: int) -> Projection:
        """A linear map with a bias, as all of a tower are."""
        return Projection(features, True, self.dtype, self.param_dtype, self.lora)

    def __call__(self, x: jax.Array, whole: jax.Array | None, layout: Layout) -> jax.Array:
        """States [N, S, D] to the next layer's.

        Args:
            x: the states.
            whole: bool scalar, whether attention sees the whole picture rather than a window; None: always.
            layout: of the pictures.
        """
        x = x + self.proj(self.attention(self.norm1(x), whole, layout))
        return x + self.mlp(self.norm2(x))

    def attention(self, x: jax.Array, whole: jax.Array | None, layout: Layout) -> jax.Array:
        """What the patches read of each other, [N, S, D]."""
        c = self.config
        fused = self.qkv(x).reshape(*x.shape[:-1], 3, c.heads, c.head_dim)
        cos, sin = (part[:, :, None] for part in layout.rotation)
        query, key, value = rotate(fused[:, :, 0], cos, sin), rotate(fused[:, :, 1], cos, sin), fused[:, :, 2]

        def everywhere(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return attend(query, key, value, layout.present)

        def near(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return attend_windows(query, key, value, layout)

        if whole is None:
            return everywhere(query, key, value).reshape(x.shape)
        return jax.lax.cond(whole, everywhere, near, query, key, value).reshape(x.shape)


class Merger(nn.Module):
    """The patches of a merged token in one state of the language model's width: norm, linear map, GELU, linear map.

    Attributes:
        config: shape and choices.
        norm: the norm.
        norm_merged: the norm is over the merged token rather than over each patch.
        dtype: of the computation.
        param_dtype: of freshly drawn parameters.
    """

    config: VisionConfig
    norm: type[nn.Module]
    norm_merged: bool
    dtype: jax.typing.DTypeLike
    param_dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, S, D] to [N, M, D of the language model]."""
        c = self.config
        norm = self.norm(c.epsilon, self.param_dtype, name="norm")
        merged = (x.shape[0], x.shape[1] // c.merged, c.merged * c.width)
        x = norm(x.reshape(merged)) if self.norm_merged else norm(x).reshape(merged)
        x = Projection(merged[-1], True, self.dtype, self.param_dtype, name="fc1")(x)
        x = jax.nn.gelu(x, approximate=False)
        return Projection(c.out, True, self.dtype, self.param_dtype, name="fc2")(x)


class PlainBlock(Block):
    """A layer with layer norms and two linear maps in its MLP."""

    def norm(self) -> nn.Module:
        """One of the layer's two norms."""
        return LayerNorm(self.config.epsilon, self.param_dtype)

    def setup_mlp(self) -> None:
        """Declare the MLP's weights."""
        self.fc1 = self.projection(self.config.inner)
        self.fc2 = self.projection(self.config.width)

    def mlp(self, x: jax.Array) -> jax.Array:
        """Normed states [N, S, D] to what is added to them."""
        return self.fc2(ACTIVATIONS[self.config.activation](self.fc1(x)))


class GatedBlock(Block):
    """A layer with RMS norms and a gated MLP."""

    def norm(self) -> nn.Module:
        """One of the layer's two norms."""
        return RMSNorm(self.config.epsilon, self.param_dtype)

    def setup_mlp(self) -> None:
        """Declare the MLP's weights."""
        self.gate_proj = self.projection(self.config.inner)
        self.up_proj = self.projection(self.config.inner)
        self.down_proj = self.projection(self.config.width)

    def mlp(self, x: jax.Array) -> jax.Array:
        """Normed states [N, S, D] to what is added to them."""
        return self.down_proj(ACTIVATIONS[self.config.activation](self.gate_proj(x)) * self.up_proj(x))


def interpolated(table: jax.Array, side: int, where: PatchPlaces, grid: jax.Array) -> jax.Array:
    """Learned positions, bilinear between those of a square table whose corners are the picture's corners.

    Args:
        table: [positions, D], the square row by row.
        side: of the square.
        where: the patches' places.
        grid: i32 [N, 2], rows and columns of patches.

    Returns:
        float32 [N, S, D].
    """

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
