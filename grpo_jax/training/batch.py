"""A judged batch as an update takes it: trimmed, packed and placed on the host, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.algorithm import AlgorithmSection
from grpo_jax.core.advantages import sum_rewards
from grpo_jax.core.selection import without_truncated
from grpo_jax.models.sharding import shard_batch
from grpo_jax.models.vision.pictures import Pictures, PictureStates
from grpo_jax.sampling.sampler import Samples
from grpo_jax.training.estimators import Objectives, estimate_advantages, estimate_turn_advantages
from grpo_jax.training.packing import Packing, pack, trimmed

_WORTH = 1 / 16


class Batch(NamedTuple):
    """One sampled batch on the policy's device; P may be a minibatch's share.

    Attributes:
        prompt_tokens: i32 [P, L], left-padded.
        prompt_mask: bool [P, L].
        tokens: i32 [P, G, T].
        mask: bool [P, G, T], what the policy wrote and learns from, EOS included.
        advantages: f32 [P, G], or [P, G, T] under PPO; None where they wait for the values.
        scores: f32 [P, G], the rewards' sum that PPO's advantages are made of, or None.
        old_logprobs: f32 [P, G, T] of the policy before its first update with the batch, which is the one that sampled
            unless that was done ahead; or None with one update per batch.
        ref_logprobs: f32 [P, G, T] of the reference, or None where nothing is measured against one.
        rollout_logprobs: f32 [P, G, T] of the policy as the sampler computed them: what the gap between sampler and
            trainer is measured against. None measures none.
        sampler_logprobs: f32 [P, G, T] of the distribution drawn from, or None without importance correction.
        token_weights: f32 [P, G, T] on each token's policy gradient, or None for 1.
        kl_weights: f32 [P, G] on each completion's KL, where groups are not drawn independently; or None for 1.
        old_values: f32 [P, G, T] before the first update, or None without a value head.
        returns: f32 [P, G, T], what the values learn, or None.
        packing: Rows that short completions share, or None for a row each.
        pictures: What the prompts show ("pictures" [P, I, ..]) and the answers among the tokens ("answers"
            [P, G, I, ..]), those that there are: `PictureStates` of a frozen tower, or `Pictures` that the pass forward
            encodes with the tower as it is.
        present: bool [P, G, T], what is read at all: in an episode also what was said to the policy. None for `mask`.
        turn: i32 [P, G, T], the turn of each token of an episode, from 0; or None.
    """

    prompt_tokens: jax.Array
    prompt_mask: jax.Array
    tokens: jax.Array
    mask: jax.Array
    advantages: jax.Array | None = None
    scores: jax.Array | None = None
    old_logprobs: jax.Array | None = None
    ref_logprobs: jax.Array | None = None
    rollout_logprobs: jax.Array | None = None
    sampler_logprobs: jax.Array | None = None
    token_weights: jax.Array | None = None
    kl_weights: jax.Array | None = None
    old_values: jax.Array | None = None
    returns: jax.Array | None = None
    packing: Packing | None = None
    pictures: Mapping[str, Pictures | PictureStates] = {}
    present: jax.Array | None = None
    turn: jax.Array | None = None

    @property
    def exists(self) -> jax.Array:
        """bool [P, G, T], the tokens that are read."""
        return self.mask if self.present is None else self.present

    def read_by_policy(self) -> Batch:
        """Only what a forward pass reads."""
        read = ("prompt_tokens", "prompt_mask", "tokens", "mask", "packing", "pictures", "present")
        return Batch(**{name: getattr(self, name) for name in read})


def required(name: str, array: jax.Array | None) -> jax.Array:
    """An array of a batch that may be None, where it must not be.

    Raises:
        ValueError: It is None.
    """
    if array is None:
        raise ValueError(f"batch.{name}: expected an array, got None")
    return array


def make_batch(
    prompts: tuple[np.ndarray, np.ndarray],
    samples: Samples,
    objectives: Objectives,
    informative: np.ndarray,
    algorithm: AlgorithmSection,
    *,
    pictures: Mapping[str, Pictures | PictureStates] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    kept: int = 0,
) -> Batch:
    """What is learned from, on the policy's devices.

    Prompts and completions are cut to the longest of the batch; short completions share rows (`packing`). A prompt is
    read once for its group: it is left as it is where cutting saves less than 1/16 of what the group reads, since for
    each new length the update compiles anew.
    Under dead_groups "drop" and "resample" groups of zero variance are masked, and out of every statistic.

    Args:
        prompts: i32 [P, L] and bool [P, L], left-padded, on the host.
        samples: Completions, on the host.
        objectives: What is maximised, on the policy's device.
        informative: bool [P], the groups whose variance is not zero.
        algorithm: What is learned, and from which tokens.
        pictures: Of prompts and answers, as `Batch` has them.
        mesh: The policy's devices where they are several.
        kept: The last completions of each group that nobody wrote (sampling.keep_prompt): they have no token to learn
            from, and their rewards count as the others' do.
    """
    device = next(iter(objectives.rewards.devices()))
    written = samples.mask
    read = written if samples.present is None else samples.present
    tokens, mask, logprobs, sampler_logprobs = (
        trimmed(array, read) for array in (samples.tokens, written, samples.logprobs, samples.sampler_logprobs)
    )
    tokens, mask, logprobs, truncated = jax.device_put((tokens, mask, logprobs, samples.truncated), device)
    if algorithm.mask_truncated:
        mask = without_truncated(mask, truncated)
    rewards = objectives.rewards
    if algorithm.dead_groups != "keep":
        varies = jnp.asarray(informative)[:, None, None]
        mask &= varies
        rewards = jnp.where(varies, rewards, jnp.nan)
    pictures = dict(pictures or {})
    if mesh is None:
        pictures = jax.device_put(pictures, device)
    uncut: Any = prompts  # until it is known what their groups read
    batch = Batch(uncut[0], uncut[1], tokens, mask, rollout_logprobs=logprobs, pictures=pictures)
    if samples.turn is not None:
        present, turn = (jax.device_put(trimmed(array, read), device) for array in (read, samples.turn))
        batch = batch._replace(present=present, turn=turn)
    if algorithm.importance_cap:
        batch = batch._replace(sampler_logprobs=jax.device_put(sampler_logprobs, device))
    if algorithm.learns_values:
        # A completion without a reward says nothing about its tokens: it takes no part.
        scores = sum_rewards(rewards, weights=objectives.weights)
        batch = batch._replace(scores=scores, mask=mask & ~jnp.isnan(scores)[..., None])
    elif objectives.returns is not None and batch.turn is not None:
        returns = objectives.returns
        if algorithm.dead_groups != "keep":
            returns = jnp.where(jnp.asarray(informative)[:, None, None, None], returns, jnp.nan)
        advantages = estimate_turn_advantages(returns, batch.turn, mask, algorithm, objectives.weights)
        batch = batch._replace(advantages=advantages)
    else:
        # What nobody wrote has a vote where advantages are whitened, by tokens that of one.
        votes = mask.at[:, mask.shape[1] - kept :, 0].set(True) if kept else mask
        batch = batch._replace(advantages=estimate_advantages(rewards, votes, algorithm, objectives.weights))
    if samples.weights is not None:  # they are for a sum over the group; the loss takes the mean of its rows
        rows = batch.mask.any(axis=-1).sum(axis=-1, keepdims=True)
        batch = batch._replace(kl_weights=rows * jax.device_put(samples.weights, device))
    if batch.present is not None:  # a completion that nothing is learned from is not read either
        batch = batch._replace(present=batch.present & batch.mask.any(axis=-1, keepdims=True))
    if "answers" not in pictures:  # among pictures a row holds one completion
        batch = batch._replace(packing=jax.device_put(pack(np.asarray(batch.exists)), device))
    read = (batch.tokens if batch.packing is None else batch.packing.source)[0].size
    cut = (trimmed(array, prompts[1], left=True, worth=read * _WORTH) for array in prompts)
    prompt_tokens, prompt_mask = jax.device_put(tuple(cut), device)
    return shard_batch(batch._replace(prompt_tokens=prompt_tokens, prompt_mask=prompt_mask), mesh)


def minibatches(batch: Batch, count: int, key: jax.Array) -> list[Batch]:
    """Cuts a batch into `count` equal parts along P, in an order drawn from `key`; groups stay whole."""
    if count == 1:
        return [batch]
    prompts = batch.tokens.shape[0]
    order = jax.random.permutation(key, prompts).reshape(count, prompts // count)
    return [jax.tree.map(lambda array, rows=rows: array[rows], batch) for rows in order]


def micro_batches(batch: Batch, parts: int) -> Batch:
    """The batch as `parts` equal micro-batches along P: a leading axis more."""
    prompts = batch.tokens.shape[0]
    if prompts % parts:
        raise ValueError(f"batch: expected a number of prompts that {parts} micro-batches divide, got {prompts}")
    return jax.tree.map(lambda array: array.reshape(parts, prompts // parts, *array.shape[1:]), batch)
