"""A batch of prompts through sampler and judges: completions, texts and rewards, chunk by chunk.

The parts come as functions in an `Environment`; nothing here knows a model, a task or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.rollout.environment import Environment
from grpo_jax.rollout.pipeline import Stage, run_pipeline

EVALUATION_STREAM = 2**31 - 1
"""Takes the place of the iteration in the keys of evaluation, so that no training iteration shares them."""


class Judgement(NamedTuple):
    """Rewards f32 [P, G, N], watched f32 [P, G, W], and the pictures of each chunk."""

    rewards: np.ndarray
    watched: np.ndarray
    pictures: list[Any]


class Rollout(NamedTuple):
    """One sampled and judged batch.

    Attributes:
        rows: P prompts.
        prompt_tokens: i32 [P, L].
        prompt_mask: bool [P, L].
        samples: Arrays of the sampler, [P, G, T] and [P, G].
        completions: What the policy wrote, [P][G].
        texts: What was judged, [P][G].
        usable: bool [P, G], false where the completion could not be read and the user's prompt stands in.
        judgement: Rewards and pictures.
        seconds: Seconds of work by stage.
    """

    rows: Sequence[Row]
    prompt_tokens: np.ndarray
    prompt_mask: np.ndarray
    samples: Any
    completions: list[list[str]]
    texts: list[list[str]]
    usable: np.ndarray
    judgement: Judgement
    seconds: dict[str, float]


class _Chunk(NamedTuple):
    """Part of a batch on its way through the stages."""

    rows: Sequence[Row]
    prompt_tokens: np.ndarray | None = None
    prompt_mask: np.ndarray | None = None
    samples: Any = None
    completions: list[list[str]] | None = None
    texts: list[list[str]] | None = None
    usable: np.ndarray | None = None
    pictures: Any = None
    rewards: np.ndarray | None = None
    watched: np.ndarray | None = None


def prompt_keys(key: jax.Array, stream: int, rows: Sequence[Row]) -> jax.Array:
    """One key per prompt from (seed, iteration, prompt id) alone: typed key array [P]."""
    stream_key = jax.random.fold_in(key, stream)
    ids = jnp.asarray([row.id for row in rows], jnp.uint32)
    return jax.vmap(lambda row_id: jax.random.fold_in(stream_key, row_id))(ids)


def collect(
    environment: Environment,
    sample: Callable[..., Any],
    variables: Any,
    rows: Sequence[Row],
    *,
    key: jax.Array,
    iteration: int,
    evaluation: bool = False,
    chunk_prompts: int = 0,
    timeout: float | None = None,
) -> Rollout:
    """Samples and judges one batch; the stages work at once on different chunks.

    Args:
        environment: Tokenizer, renderer and rewards.
        sample: sample(variables, prompt_tokens, prompt_mask, keys [P]) → Samples.
        variables: The policy's.
        rows: P prompts.
        key: The run's key.
        iteration: Chooses the random numbers in training; without influence in evaluation.
        evaluation: Fixed random numbers and evaluation's render settings.
        chunk_prompts: Prompts of a chunk; 0 for one chunk.
        timeout: Seconds a judge may spend on one chunk; the sampler, which compiles in its first call, has no limit.

    Raises:
        StageError: A stage failed; names it and carries the cause.
    """
    tokens, mask = environment.encode([row.prompt for row in rows])
    keys = prompt_keys(key, EVALUATION_STREAM if evaluation else iteration, rows)

    def write(part: tuple[int, int]) -> _Chunk:
        start, stop = part
        drawn = jax.device_get(sample(variables, tokens[start:stop], mask[start:stop], keys[start:stop]))
        chunk = _Chunk(rows[start:stop], tokens[start:stop], mask[start:stop], drawn)
        return _read(environment, chunk)

    stages = [Stage("sample", write, timed=False), *_judges(environment, iteration, evaluation)]
    chunks, seconds = run_pipeline(_ranges(len(rows), chunk_prompts), stages, timeout=timeout)
    return Rollout(
        rows,
        tokens,
        mask,
        jax.tree.map(lambda *parts: np.concatenate(parts), *[chunk.samples for chunk in chunks]),
        [group for chunk in chunks for group in chunk.completions],
        [group for chunk in chunks for group in chunk.texts],
        np.concatenate([chunk.usable for chunk in chunks]),
        _judgement(chunks),
        seconds,
    )


def judge(
    environment: Environment,
    rows: Sequence[Row],
    texts: Sequence[Sequence[str]],
    *,
    chunk_prompts: int = 0,
    timeout: float | None = None,
) -> Judgement:
    """Judges given texts [P][G] as evaluation does: for the unchanged prompt and the oracle."""

    def give(part: tuple[int, int]) -> _Chunk:
        start, stop = part
        return _Chunk(rows[start:stop], texts=[list(group) for group in texts[start:stop]])

    stages = [Stage("sample", give), *_judges(environment, 0, True)]
    chunks, _ = run_pipeline(_ranges(len(rows), chunk_prompts), stages, timeout=timeout)
    return _judgement(chunks)


def _judges(environment: Environment, iteration: int, evaluation: bool) -> list[Stage]:
    def render(chunk: _Chunk) -> _Chunk:
        return chunk._replace(pictures=environment.render(chunk.rows, chunk.texts, iteration, evaluation))

    def score(chunk: _Chunk) -> _Chunk:
        rewards, watched = environment.score(chunk.rows, chunk.texts, chunk.pictures)
        return chunk._replace(rewards=rewards, watched=watched)

    return [Stage("score", score)] if environment.render is None else [Stage("render", render), Stage("score", score)]


def _read(environment: Environment, chunk: _Chunk) -> _Chunk:
    """Turns a chunk's tokens into text."""
    read = [
        [environment.decode(tokens[mask], row.prompt) for tokens, mask in zip(row_tokens, row_mask, strict=True)]
        for row, row_tokens, row_mask in zip(chunk.rows, chunk.samples.tokens, chunk.samples.mask, strict=True)
    ]
    return chunk._replace(
        completions=[[written for written, _, _ in group] for group in read],
        texts=[[text for _, text, _ in group] for group in read],
        usable=np.array([[usable for _, _, usable in group] for group in read]),
    )


def _ranges(count: int, size: int) -> list[tuple[int, int]]:
    size = size or count
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _judgement(chunks: Sequence[_Chunk]) -> Judgement:
    return Judgement(
        np.concatenate([chunk.rewards for chunk in chunks]),
        np.concatenate([chunk.watched for chunk in chunks]),
        [chunk.pictures for chunk in chunks],
    )
