"""Positions, masks and pictures of the running tokens, as inputs of attention."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.architectures import ModelConfig, architecture_of
from grpo_jax.models.attention import Cache, Context, Prefix, RowState, Tokens, VisionInput
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import PictureStates


class Places(NamedTuple):
    """Tokens [.., S] of rows with pictures."""

    index: jax.Array  # i32 [.., S], each token's index among the row's I·M picture states; -1 for text
    positions: jax.Array  # i32 [.., S, 3], of time, row and column, counted from the row's first token
    advance: jax.Array  # i32 [..], the position after the row's last token


def find_places(vision: VisionConfig, tokens: jax.Array, mask: jax.Array, pictures: PictureStates) -> Places:
    """Find the `pictures` [.., I, ..] of each row of tokens i32 [.., S] by their placeholder tokens, in order.

    A row has one placeholder for each merged token of its pictures.
    """
    grid, capacity = pictures.grid, pictures.states.shape[-2]
    pictured = (tokens == vision.image_token) & mask
    number = jnp.cumsum(pictured, axis=-1, dtype=jnp.int32) - 1
    sizes = grid[..., 0] * grid[..., 1]
    ends = jnp.cumsum(sizes, axis=-1)
    picture = jnp.sum(number[..., None] >= ends[..., None, :], axis=-1)
    picture = jnp.clip(picture, 0, grid.shape[-2] - 1)

    def of_picture(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, picture, axis=-1)

    offset = number - of_picture(ends - sizes)
    height, width = (jnp.maximum(of_picture(grid[..., axis]), 1) for axis in (0, 1))
    row, column = offset // width, offset % width
    last = offset == height * width - 1
    steps = jnp.where(pictured, jnp.where(last, jnp.maximum(height, width), 0), 1) * mask
    passed = jnp.cumsum(steps, axis=-1, dtype=jnp.int32)
    start = passed - steps
    inside = jnp.stack([jnp.zeros_like(row), row, column], axis=-1)
    positions = start[..., None] + jnp.where(pictured[..., None], inside, 0)
    return Places(jnp.where(pictured, picture * capacity + offset, -1), positions, passed[..., -1])


class Prompts(NamedTuple):
    """Running prompts: their context, i32 [P] real tokens, and i32 [P] the position after each."""

    context: Context
    lengths: jax.Array
    advance: jax.Array


def prompt_context(
    config: ModelConfig, mask: jax.Array, tokens: jax.Array | None = None, pictures: PictureStates | None = None
) -> Prompts:
    """Make the context of prompts [P, L], with positions from each first real token; only pictures need the tokens."""
    count = jnp.cumsum(mask.astype(jnp.int32), axis=1)
    prompt, lengths = Tokens(jnp.maximum(count - 1, 0), mask), count[:, -1]
    if pictures is None:
        return Prompts(Context(prompt.positions, prompt), lengths, lengths)
    places = find_places(config.vision, tokens, mask, pictures)
    context = Context(places.positions, prompt, vision=_vision_input(pictures, places.index))
    return Prompts(context, lengths, places.advance)


def group_context(
    config: ModelConfig, prompts: Prompts, tokens: jax.Array, mask: jax.Array, observations: PictureStates | None = None
) -> Context:
    """Make the context of prompts and their groups' tokens [P, G, T] with pictures `observations` [P, G, I, ..]."""
    count, group, steps = tokens.shape
    if steps == 0:
        return prompts.context
    ahead = jnp.arange(steps, dtype=jnp.int32)
    order = prompts.lengths[:, None] + ahead
    completion = Tokens(order, jnp.ones(order.shape, bool))
    if observations is None:
        positions = jnp.broadcast_to((prompts.advance[:, None] + ahead)[:, None], (count, group, steps))
        index = jnp.full((count, group * steps), -1, jnp.int32)
    else:
        places = find_places(config.vision, tokens, mask, observations)
        positions = prompts.advance[:, None, None, None] + places.positions
        index = _across_group(places.index, observations)
    return _followed(prompts.context, positions, completion, index, observations)


def packed_context(prompts: Prompts, steps: jax.Array, mask: jax.Array) -> Context:
    """Make the context of prompts and packed rows, whose places predict the tokens numbered ``steps`` [P, G, T].

    A place holds the token before the predicted one. At the start of a completion that token belongs to another
    completion: no other token reads it, and its state is not used.
    """
    if steps.shape[2] == 0:
        return prompts.context
    begins, ahead = steps == 0, jnp.maximum(steps - 1, 0)
    order = prompts.lengths[:, None, None] + ahead
    completion = Tokens(order, mask & ~begins, jnp.cumsum(begins, axis=-1, dtype=jnp.int32))
    index = jnp.full((len(steps), steps[0].size), -1, jnp.int32)
    return _followed(prompts.context, prompts.advance[:, None, None] + ahead, completion, index, None)


def decode_context(config: ModelConfig, prefix: Prefix, cache: Cache, group: int) -> Context:
    """Make the context of a decoded token: the prompts it reads, and the written slots of the cache."""
    order = prefix.lengths[:, None] + cache.length
    completion = Tokens(order, jnp.ones(order.shape, bool))
    positions = jnp.broadcast_to(prefix.advance[:, None] + cache.length, (len(prefix.lengths), group))
    slots = jnp.arange(cache.keys[0].shape[-1], dtype=jnp.int32)
    written = Tokens(prefix.lengths[:, None] + slots, (slots <= cache.length)[None])
    # Use a constant table: XLA would recompute sines and cosines in every layer, for every head of every token.
    with jax.ensure_compile_time_eval():
        places = np.arange(prefix.tokens.mask.shape[1] + len(slots), dtype=np.int32)
        table = jax.jit(architecture_of(config).rotation, static_argnums=0)(config, places)
    rotation = table and tuple(jnp.take(part, positions, axis=-2) for part in table)
    return Context(positions, prefix.tokens, completion, written, cache.length, rotation)


def extend_context(
    config: ModelConfig,
    prefix: Prefix,
    cache: Cache,
    tokens: jax.Array,
    mask: jax.Array,
    pictures: PictureStates | None = None,
) -> tuple[Context, RowState]:
    """Make the context of further tokens [P, G, A] of completions of different lengths, and the cache's new row state.

    `mask` bool [P, G, A] is True for the first tokens of each row. They are written from the cache's slot ``length``
    on, and `pictures` [P, G, I, ..] belong to them.
    """
    before = cache.rows
    count, group, steps = tokens.shape
    readable = jax.lax.dynamic_update_slice_in_dim(before.mask, mask, cache.length, axis=2)
    held = jnp.cumsum(readable, axis=-1, dtype=jnp.int32)
    order = prefix.lengths[:, None, None] + held - readable
    completion = Tokens(jax.lax.dynamic_slice_in_dim(order, cache.length, steps, axis=2), mask)
    ahead = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    start = before.advance[..., None]
    vision, advance = None, before.advance + ahead[..., -1]
    positions = (start + ahead - mask).reshape(count, group * steps)
    if pictures is not None:
        places = find_places(config.vision, tokens, mask, pictures)
        positions = (start[..., None] + places.positions).reshape(count, group * steps, 3)
        vision = _vision_input(pictures, _across_group(places.index, pictures))
        advance = before.advance + places.advance
    cached = Tokens(order, readable)
    context = Context(positions, prefix.tokens, completion, cached, cache.length, vision=vision)
    return context, RowState(readable, advance)


def _across_group(index: jax.Array, pictures: PictureStates) -> jax.Array:
    """Convert indices [P, G, S] of each completion's states to indices [P, G·S] of its group's states."""
    count, group, _ = index.shape
    states = pictures.states.shape[-3] * pictures.states.shape[-2]
    first = jnp.arange(group, dtype=jnp.int32)[:, None] * states
    return jnp.where(index >= 0, index + first, -1).reshape(count, -1)


def _vision_input(pictures: PictureStates, index: jax.Array) -> VisionInput:
    def of_rows(states: jax.Array) -> jax.Array:
        return states.reshape(states.shape[0], -1, states.shape[-1])

    return VisionInput(of_rows(pictures.states), index, tuple(map(of_rows, pictures.deepstack)))


def _followed(
    context: Context, positions: jax.Array, completion: Tokens, index: jax.Array, observations: PictureStates | None
) -> Context:
    """Append completions to prompts, at positions [P, G, T] or, with pictures, [P, G, T, 3]."""
    vision = context.vision
    if vision is None and observations is None:
        positions = jnp.concatenate([context.positions, positions.reshape(len(positions), -1)], axis=1)
        return Context(positions, context.prompt, completion)
    parts = [_with_axes(context.positions, 2), _with_axes(positions, 3).reshape(len(positions), -1, 3)]
    inputs = [] if vision is None else [vision]
    first = 0 if vision is None else vision.states.shape[1]
    before = jnp.full(context.prompt.positions.shape, -1, jnp.int32) if vision is None else vision.index
    if observations is not None:
        index = jnp.where(index >= 0, index + first, -1)
        inputs.append(_vision_input(observations, index))
    joined = VisionInput(
        jnp.concatenate([one.states for one in inputs], axis=1),
        jnp.concatenate([before, index], axis=1),
        tuple(jnp.concatenate(layer, axis=1) for layer in zip(*[one.deepstack for one in inputs], strict=True)),
    )
    return Context(jnp.concatenate(parts, axis=1), context.prompt, completion, vision=joined)


def _with_axes(positions: jax.Array, rank: int) -> jax.Array:
    """Repeat positions of this rank for the three axes, which agree for text tokens; others stay unchanged."""
    return jnp.stack([positions] * 3, axis=-1) if positions.ndim == rank else positions
