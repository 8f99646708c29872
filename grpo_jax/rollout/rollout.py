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


class _Written(NamedTuple):
    """What the policy wrote of a chunk; as `Rollout` has it."""

    samples: Any
    completions: list[list[str]]
    usable: np.ndarray


class _Chunk(NamedTuple):
    """Part of a batch on its way through the stages; each of them adds what it makes.

    Attributes:
        rows: p prompts.
        texts: What is judged, [p][G].
        written: `_Written`, or None where the texts were given.
        pictures: What the renderer makes of the texts, or None.
        rewards: f32 [p, G, N].
        watched: f32 [p, G, watched].
    """

    rows: Sequence[Row]
    texts: list[list[str]]
    written: Any = None
    pictures: Any = None
    rewards: Any = None
    watched: Any = None


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
    stopping: Callable[[], bool] = lambda: False,
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
        stopping: Whether a stop was asked for.

    Raises:
        Stopped: A stop was asked for.
        StageError: A stage failed; names it and carries the cause.
    """
    tokens, mask = environment.encode([row.prompt for row in rows])
    keys = prompt_keys(key, EVALUATION_STREAM if evaluation else iteration, rows)

    def write(part: tuple[int, int]) -> _Chunk:
        start, stop = part
        samples = jax.device_get(sample(variables, tokens[start:stop], mask[start:stop], keys[start:stop]))
        return _read(environment, rows[start:stop], samples)

    stages = [Stage("sample", write, timed=False), *_judges(environment, iteration, evaluation)]
    chunks, seconds = run_pipeline(_ranges(len(rows), chunk_prompts), stages, timeout=timeout, stopping=stopping)
    written = [chunk.written for chunk in chunks]
    return Rollout(
        rows,
        tokens,
        mask,
        jax.tree.map(lambda *parts: np.concatenate(parts), *[part.samples for part in written]),
        [group for part in written for group in part.completions],
        [group for chunk in chunks for group in chunk.texts],
        np.concatenate([part.usable for part in written]),
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
    stopping: Callable[[], bool] = lambda: False,
) -> Judgement:
    """Judges given texts [P][G] as evaluation does: for the unchanged prompt and the oracle; raises as `collect`."""

    def give(part: tuple[int, int]) -> _Chunk:
        start, stop = part
        return _Chunk(rows[start:stop], [list(group) for group in texts[start:stop]])

    stages = [Stage("sample", give), *_judges(environment, 0, True)]
    chunks, _ = run_pipeline(_ranges(len(rows), chunk_prompts), stages, timeout=timeout, stopping=stopping)
    return _judgement(chunks)


def _judges(environment: Environment, iteration: int, evaluation: bool) -> list[Stage]:
    render = environment.render

    def score(chunk: _Chunk) -> _Chunk:
        rewards, watched = environment.score(chunk.rows, chunk.texts, chunk.pictures)
        return chunk._replace(rewards=rewards, watched=watched)

    if render is None:
        return [Stage("score", score)]

    def draw(chunk: _Chunk) -> _Chunk:
        return chunk._replace(pictures=render(chunk.rows, chunk.texts, iteration, evaluation))

    return [Stage("render", draw), Stage("score", score)]


def _read(environment: Environment, rows: Sequence[Row], samples: Any) -> _Chunk:
    """A chunk of sampled tokens as text."""
    read = [
        [environment.decode(tokens[mask], row.prompt) for tokens, mask in zip(row_tokens, row_mask, strict=True)]
        for row, row_tokens, row_mask in zip(rows, samples.tokens, samples.mask, strict=True)
    ]
    written = _Written(
        samples,
        [[completion for completion, _, _ in group] for group in read],
        np.array([[usable for _, _, usable in group] for group in read]),
    )
    return _Chunk(rows, [[text for _, text, _ in group] for group in read], written)


def _ranges(count: int, size: int) -> list[tuple[int, int]]:
    size = size or count
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _judgement(chunks: Sequence[_Chunk]) -> Judgement:
    return Judgement(
        np.concatenate([chunk.rewards for chunk in chunks]),
        np.concatenate([chunk.watched for chunk in chunks]),
        [chunk.pictures for chunk in chunks],
    )
