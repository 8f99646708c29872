"""Training batches: trimmed, packed and placed on the devices once.

Short completions of a group share a row of W tokens. Attention keeps them apart (`forward_group`'s `steps`), so
log-probabilities and gradients are those of separate rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.run import Config
from grpo_jax.config.sections import AlgorithmSection
from grpo_jax.core.advantages import sum_rewards
from grpo_jax.core.selection import without_truncated
from grpo_jax.models.sharding import shard_batch
from grpo_jax.models.vision.pictures import Pictures, PictureStates
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.sampling.decoding import Samples
from grpo_jax.training.estimators import Objectives, estimate_advantages, estimate_turn_advantages, make_turn_objectives

SMALLEST = 16  # lengths are rounded up to multiples of this at least
MAX_PACKED_SHARE = 0.85  # pack completions if at most this share of the rows remains
MIN_TRIM_SAVING = 1 / 16  # trim prompts if that saves at least this share of a group's tokens

T = TypeVar("T")
Array = jax.Array | np.ndarray  # on the policy's devices, or still on the host


class Packing(NamedTuple):
    """Positions of the tokens of P groups of G completions [T] in R rows of W for each prompt."""

    source: Array  # i32 [P, R, W], index g·T + t of the token in its group; -1 for none
    start: Array  # i32 [P, G], position r·W + w of each completion's first token


def _rounded(number: int, limit: int, smallest: int = 1) -> int:
    """Round up to quarters of `limit`: each new size recompiles the update."""
    step = max(smallest, -(-limit // 4))
    return min(limit, -(-number // step) * step)


def trimmed(array: Array, mask: Array, *, left: bool = False, worth: float = 0) -> Array:
    """Cut the last axis [.., T] to the longest row of a mask [.., T], rounded up to quarters of T."""
    width = mask.shape[-1]
    longest = _rounded(max(int(mask.sum(-1).max()), 1), width, SMALLEST)
    longest = longest if width - longest >= worth else width
    return array[..., width - longest :] if left else array[..., :longest]


def pack(mask: np.ndarray, *, shortest: int = 32) -> Packing | None:
    """Pack a group's completions into shared rows, longest first; None if that saves little.

    `mask` is bool [P, G, T], true for the first tokens of each completion; empty completions take no space. Packing
    is worth its compilation from T = `shortest` on. R is the same for all prompts.
    """
    mask = np.asarray(mask)
    prompts, group, width = mask.shape
    if width < shortest:
        return None
    lengths = mask.sum(-1)
    places = [_places(row, width) for row in lengths]
    rows = _rounded(max(1, *(used for _, used in places)), group)
    if rows > MAX_PACKED_SHARE * group:
        return None
    start = np.stack([place for place, _ in places]).astype(np.int32)
    source = np.full((prompts, rows * width), -1, np.int32)
    p, g, t = np.nonzero(mask)
    source[p, start[p, g] + t] = g * width + t
    return Packing(source.reshape(prompts, rows, width), start)


def _places(lengths: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    start, room = np.zeros(len(lengths), int), []
    for g in np.argsort(-lengths, kind="stable"):
        if lengths[g] == 0:
            continue
        row = next((r for r, left in enumerate(room) if left >= lengths[g]), len(room))
        if row == len(room):
            room.append(width)
        start[g] = row * width + width - room[row]
        room[row] -= lengths[g]
    return start, len(room)


def packed(tokens: jax.Array, packing: Packing) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pack tokens [P, G, T] into shared rows: tokens, mask and steps (t of each token), all [P, R, W]."""
    source = jnp.asarray(packing.source)
    flat = tokens.reshape(tokens.shape[0], -1)
    gathered = jnp.take_along_axis(flat, jnp.maximum(source, 0).reshape(source.shape[0], -1), axis=1)
    mask = source >= 0
    return gathered.reshape(source.shape), mask, jnp.where(mask, source % tokens.shape[-1], 0)


def unpacked(values: jax.Array, mask: jax.Array, packing: Packing) -> jax.Array:
    """Unpack values [P, R, W] of shared rows to completions [P, G, T]; 0 if the mask [P, G, T] is false."""
    steps = jnp.arange(mask.shape[-1], dtype=jnp.int32)
    place = jnp.where(mask, packing.start[..., None] + steps, 0).reshape(mask.shape[0], -1)
    gathered = jnp.take_along_axis(values.reshape(values.shape[0], -1), place, axis=1)
    return jnp.where(mask, gathered.reshape(mask.shape), 0)


class Batch(NamedTuple):
    """One sampled batch on the policy's device; P may be a minibatch's share. Log-probabilities are f32 [P, G, T]."""

    prompt_tokens: jax.Array  # i32 [P, L], left-padded
    prompt_mask: jax.Array  # bool [P, L]
    tokens: jax.Array  # i32 [P, G, T]
    mask: jax.Array  # bool [P, G, T], the policy's own tokens to train on, including EOS
    # f32 [P, G], or [P, G, T] by token; None until values or a teacher's log-probabilities are known. For
    # "optimal_token_baseline" the summed rewards until the update's preparation
    advantages: jax.Array | None = None
    scores: jax.Array | None = None  # f32 [P, G], the summed rewards for PPO's advantages
    # of the policy before its first update with the batch; None with one update per batch. Unless the batch was
    # sampled ahead, this policy also sampled it
    old_logprobs: jax.Array | None = None
    ref_logprobs: jax.Array | None = None  # of the reference
    rollout_logprobs: jax.Array | None = None  # of the policy, computed by the sampler, to compare with the trainer's
    sampler_logprobs: jax.Array | None = None  # of the sampling distribution; None without importance correction
    token_weights: jax.Array | None = None  # f32 [P, G, T] on each token's policy gradient; None for 1
    old_values: jax.Array | None = None  # f32 [P, G, T] before the first update; None without a value head
    returns: jax.Array | None = None  # f32 [P, G, T], the targets of the values
    packing: Packing | None = None  # shared rows of short completions; None for one row each
    # of the prompts ("pictures" [P, I, ..]) and of the observations ("observations" [P, G, I, ..]): `PictureStates` of
    # a frozen tower, or `Pictures` that the forward pass encodes
    pictures: Mapping[str, Pictures | PictureStates] = {}
    present: jax.Array | None = None  # bool [P, G, T], all tokens in context, with observations; None for `mask`
    turn: jax.Array | None = None  # i32 [P, G, T], the turn of each token of an episode, from 0
    kept: jax.Array | None = None  # i32 [P, G, T, K], the tokens to renormalise over, padded with -1; None for all

    @property
    def exists(self) -> jax.Array:
        """Return the tokens in context, bool [P, G, T]."""
        return self.mask if self.present is None else self.present

    def read_by_policy(self) -> Batch:
        """Keep only the fields that a forward pass reads."""
        read = ("prompt_tokens", "prompt_mask", "tokens", "mask", "packing", "pictures", "present", "kept")
        return Batch(**{name: getattr(self, name) for name in read})


def required(name: str, value: T | None) -> T:
    """Return a value of a batch; ValueError if it is None."""
    if value is None:
        raise ValueError(f"batch.{name}: expected an array, got None")
    return value


def make_batch(
    rollout: Rollout,
    objectives: Objectives,
    algorithm: AlgorithmSection,
    *,
    device: jax.Device | None = None,
    mesh: jax.sharding.Mesh | None = None,
    full: bool = False,
) -> Batch:
    """Make the batch of an update, on the policy's devices, from a sampled rollout.

    Prompts and completions are trimmed to the longest of the batch. Prompts stay untrimmed if that would save less
    than 1/16 of the group's tokens: each new length recompiles the update, and a group reads its prompt only once.
    With zero_variance_groups "drop" or "resample", groups of zero variance are masked and enter no statistic.

    Args:
        device: The policy's first device; None for JAX's default.
        mesh: The policy's devices, if there are several.
        full: Neither trim nor pack: use the shapes of `full_batch`.
    """
    samples = required("samples", rollout.samples)
    prompts: Any = required("prompt_tokens", rollout.prompt_tokens), required("prompt_mask", rollout.prompt_mask)
    in_context = samples.mask if samples.present is None else samples.present
    in_context = np.ones_like(in_context) if full else in_context

    def put(array: Array) -> jax.Array:
        return jax.device_put(trimmed(array, in_context), device)

    mask = put(samples.mask & objectives.informative[:, None, None])
    if algorithm.mask_truncated:
        mask = without_truncated(mask, jax.device_put(samples.truncated, device))
    shown = dict(rollout.pictures) if mesh is not None else jax.device_put(dict(rollout.pictures), device)
    tokens, logprobs = put(samples.tokens), put(samples.logprobs)
    batch = Batch(prompts[0], prompts[1], tokens, mask, rollout_logprobs=logprobs, pictures=shown)
    if samples.turn is not None:
        batch = batch._replace(present=put(in_context), turn=put(samples.turn))
    if samples.kept is not None:  # train the sampling distribution itself
        kept = jax.device_put(np.asarray(samples.kept)[:, :, : mask.shape[-1]], device)
        batch = batch._replace(kept=kept, rollout_logprobs=put(samples.sampler_logprobs))
    if algorithm.importance_cap:
        batch = batch._replace(sampler_logprobs=put(samples.sampler_logprobs))
    batch = _with_advantages(batch, objectives, algorithm)
    if batch.present is not None:  # do not read completions without training signal
        batch = batch._replace(present=batch.present & batch.mask.any(axis=-1, keepdims=True))
    # Completions with pictures or kept tokens are not packed: both are indexed by the completion's own positions.
    if "observations" not in shown and batch.kept is None and not full:
        batch = batch._replace(packing=jax.device_put(pack(np.asarray(batch.exists)), device))
    size = math.prod((batch.tokens if batch.packing is None else batch.packing.source).shape[1:])
    worth = np.inf if full else size * MIN_TRIM_SAVING
    cut = (trimmed(array, prompts[1], left=True, worth=worth) for array in prompts)
    prompt_tokens, prompt_mask = jax.device_put(tuple(cut), device)
    return shard_batch(batch._replace(prompt_tokens=prompt_tokens, prompt_mask=prompt_mask), mesh)


def _with_advantages(batch: Batch, objectives: Objectives, algorithm: AlgorithmSection) -> Batch:
    """Add the advantages, or PPO's scores; a teacher's advantages come with its log-probabilities."""
    rewards, returns = objectives.of_informative_groups()
    if algorithm.learns_values:
        # A completion without a reward has no training signal: mask it.
        scores = sum_rewards(rewards, weights=objectives.weights)
        return batch._replace(scores=scores, mask=batch.mask & ~jnp.isnan(scores)[..., None])
    if algorithm.advantage == "opd":
        return batch
    if returns is not None and batch.turn is not None:
        advantages = estimate_turn_advantages(returns, batch.turn, batch.mask, algorithm, objectives.weights)
    else:
        advantages = estimate_advantages(rewards, batch.mask, algorithm, objectives.weights)
    return batch._replace(advantages=advantages)


def full_batch(config: Config, prompts: tuple[int, int]) -> Batch:
    """Return a batch of zeros with prompts (P, L), completions of maximal length, and one reward."""
    sampling, algorithm = config.sampling, config.resolved_algorithm
    shape = (prompts[0], sampling.group_size, sampling.stream_tokens)
    mask, zeros = np.ones(shape, bool), np.zeros(shape, np.float32)
    samples = Samples(zeros.astype(np.int32), mask, zeros, zeros, np.zeros(shape[:2], bool))
    if sampling.sampling_mask == "keep":
        samples = samples._replace(kept=np.zeros((*shape, sampling.top_k), np.int32))
    if sampling.turns > 1:
        samples = samples._replace(present=mask, turn=zeros.astype(np.int32))
    turns = (*shape[:2], sampling.turns)
    judged, lengths = np.zeros((*turns, 1), np.float32), np.ones(turns, np.int32)
    options = {"weights": {"": 1.0}, "max_new_tokens": sampling.max_new_tokens}
    objectives, present = make_turn_objectives(judged, lengths, algorithm, **options), np.ones(prompts, bool)
    objectives = objectives._replace(informative=present[:, 0])
    rollout = Rollout([], [], judged, judged, samples, present.astype(np.int32), present)
    batch = make_batch(rollout, objectives, algorithm, full=True)
    return batch._replace(ref_logprobs=jnp.asarray(zeros)) if algorithm.teacher else batch


def minibatches(batch: Batch, count: int, key: jax.Array) -> list[Batch]:
    """Split a batch into `count` equal parts along P, in an order drawn from `key`; groups stay whole."""
    if count == 1:
        return [batch]
    prompts = batch.tokens.shape[0]
    order = jax.random.permutation(key, prompts).reshape(count, prompts // count)
    return [jax.tree.map(lambda array, rows=rows: array[rows], batch) for rows in order]


def micro_batches(batch: Batch, parts: int) -> Batch:
    """Split a batch into `parts` equal micro-batches along P, on a new leading axis."""
    prompts = batch.tokens.shape[0]
    return jax.tree.map(lambda array: array.reshape(parts, prompts // parts, *array.shape[1:]), batch)
