"""The renderer's part of an iteration: the advantages of its pictures, and its update (docs/renderer.md)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from grpo_jax.config.run import RENDERER, Config
from grpo_jax.core.advantages import Condition, condition_rewards, group_advantages
from grpo_jax.rollout.data import Row, noise_seed
from grpo_jax.rollout.rollout import Rollout

if TYPE_CHECKING:
    from bridges.trainable import TrainableRenderer

_STREAM = 2**31 - 9


def noise_seeds(
    config: Config, rows: Sequence[Row], texts: Sequence[Sequence[str]], iteration: int, *, evaluation: bool
) -> list[int]:
    """Return the seed of each picture's noise, P·G·K of them, in [0, 2**63); `texts` are `[P][G]`.

    The pictures of a prompt share one noise, so that only words differ; the k-th of several pictures of a text has
    that of seed + k. If the renderer learns, a copy of a text in the group has new noise: the n-th picture of a text
    has that of seed + n. Evaluation always draws one picture, of one noise.
    """
    count = 1 if evaluation else config.pictures_per_text
    seeds = []
    for row, group in zip(rows, texts, strict=True):
        first = noise_seed(config.seed, iteration, row.id, evaluation=evaluation)
        for g, text in enumerate(group):
            copies = group[:g].count(text) if config.renderer_learns and not evaluation else 0
            seeds += [(first + copies * count + k) % 2**63 for k in range(count)]
    return seeds


def learn_pictures(
    config: Config,
    renderer: TrainableRenderer,
    rollout: Rollout,
    iteration: int,
    *,
    weights: Sequence[float],
    conditions: Sequence[Condition],
    key: jax.Array,
) -> dict[str, float]:
    """Train the renderer on an iteration's pictures, each by its own rewards; return metrics "renderer/NAME".

    `weights` [N] are 0 for rewards that judge no picture, as of lengths: those train only the words. `key` is the
    run's key.
    """
    judge: Any = config.judges[RENDERER]  # with `train`
    section = judge.train
    groups = [[episode.last.picture_rewards for episode in group] for group in rollout.episodes]
    rewards = np.array(groups, np.float32)[..., : len(weights)]  # [P, G, K, N]
    prompts, group, count, _ = rewards.shape
    judged = condition_rewards(rewards.reshape(prompts, group * count, -1), conditions)
    texts = [[text for text in group for _ in range(count)] for group in rollout.texts]
    advantages = picture_advantages(
        np.asarray(judged), texts, weights=weights, by_text=section.credit == "text", scale=section.advantage_scale
    )
    seeds = noise_seeds(config, rollout.rows, rollout.texts, iteration, evaluation=False)
    key = jax.random.fold_in(jax.random.fold_in(key, _STREAM), iteration)
    metrics = renderer.learn([*chain.from_iterable(texts)], seeds, advantages.ravel(), key)
    return {f"renderer/{name}": value for name, value in metrics.items()}


def picture_advantages(
    rewards: np.ndarray, texts: Sequence[Sequence[str]], *, weights: Sequence[float], by_text: bool, scale: str
) -> np.ndarray:
    """Compare each picture with those of its prompt, or `by_text` only with those of the same text.

        A = Σ_n w_n · (r_n - mean of the group) / (std + eps) / Σ_n |w_n|

    The deviation is that of all pictures (`scale` "batch", as DiffusionNFT), or of the group ("group").

    Args:
        rewards: f32 [P, M, N] of the M pictures of each prompt; NaN is missing.
        texts: `[P][M]`, the text of each picture.
        weights: [N].

    Returns:
        f32 [P, M]; 0 without another picture to compare with, NaN if all rewards of non-zero weight are missing.
    """
    prompts, count, objectives = rewards.shape
    groups = rewards
    if by_text:  # a group for each text at the place of its first picture; other places are empty groups
        first = np.array([[row.index(text) for text in row] for row in texts])
        same = first[:, None, :] == np.arange(count)[:, None]
        groups = np.where(same[..., None], rewards[:, None], np.nan).reshape(prompts * count, count, objectives)
    total, compiled = np.zeros(groups.shape[:2], np.float32), jax.jit(group_advantages, static_argnames="scale")
    for n, weight in enumerate(weights):
        total += weight / np.abs(weights).sum() * np.asarray(compiled(groups[..., n], scale=scale))
    missing = np.isnan(rewards).all(axis=-1, where=np.array(weights) != 0)
    return np.where(missing, np.nan, total.reshape(prompts, -1, count).sum(axis=1)).astype(np.float32)
