"""Compile what a run's start needs in threads, while its judges are loaded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import jax
import numpy as np

from grpo_jax.errors import ABANDONED
from grpo_jax.models.broadcast import process_count
from grpo_jax.rollout.data import Row, draw_at
from grpo_jax.rollout.env import Episode, Turn
from grpo_jax.rollout.rollout import EVALUATION_STREAM, Rollout, prompt_keys
from grpo_jax.runs.batches import batch_of, weigh
from grpo_jax.runs.evaluation import chunk_size
from grpo_jax.runs.loading import RunContext
from grpo_jax.sampling.sampler import Samples


def compile_ahead(ctx: RunContext) -> None:
    """Begin to compile samplers, log-probabilities and update; a run that finds nothing compiled compiles itself.

    Left out are meshes, pictures, turns and listed texts, whose programs' shapes follow from what is sampled.
    """
    plain = ctx.config.sampling.turns == 1 and ctx.trie is None and ctx.fns.encode_images is None
    if plain and ctx.policy.mesh is None and process_count() == 1 and not ctx.config.sft.steps:
        threading.Thread(target=_compile, args=(ctx,), name=f"{ABANDONED}tracing").start()


def _compile(ctx: RunContext) -> None:
    config, learner = ctx.config, ctx.learner
    assert learner is not None
    with suppress(Exception):  # the run meets it as well, where it says more
        state = learner.shapes(ctx.policy.variables)
        if not config.resume and ctx.test_rows:
            for sampler, count in ((ctx.samplers.greedy, 1), (ctx.samplers.sampled, config.evaluation.samples)):
                if count:
                    rows = ctx.test_rows[: max(chunk_size(ctx) // count, 1)]
                    prompt, keys = ctx.fns.encode(rows), prompt_keys(ctx.key, EVALUATION_STREAM, rows)
                    samples = sampler(state.variables, prompt.tokens, prompt.mask, keys)
                    weigh(ctx, _full_rollout(ctx, ctx.test_rows, samples))
        size, chunk = config.training.prompts_per_batch, config.training.chunk_prompts
        rows = [ctx.prompts.train[i] for i in draw_at(config.seed, 0, 0, batch_size=size, n=len(ctx.prompts.train))]
        prompt, keys, part = ctx.fns.encode(rows), prompt_keys(ctx.key, 0, rows), slice(chunk or size)
        samples = ctx.samplers.training(state.variables, prompt.tokens[part], prompt.mask[part], keys[part])
        rollout = _full_rollout(ctx, rows, samples)._replace(prompt_tokens=prompt.tokens, prompt_mask=prompt.mask)
        learner.update(state, batch_of(ctx, rollout, weigh(ctx, rollout, training=True)), None)


def _full_rollout(ctx: RunContext, rows: Sequence[Row], samples: Samples) -> Rollout:
    """Return a rollout whose completions are all as long as they may be: the usual shapes of an update."""
    shape = (len(rows), *samples.tokens.shape[1:2])
    filled = jax.tree.map(lambda x: np.zeros((len(rows), *x.shape[1:]), x.dtype), samples)
    filled = filled._replace(mask=np.ones_like(filled.mask))
    number = len(ctx.rewards.maximised)
    rewards = np.zeros((*shape, 1, number), np.float32) + np.arange(shape[1], dtype=np.float32)[:, None, None]
    episodes = [[Episode((Turn(""),))] * shape[1]] * shape[0]
    return Rollout(rows, episodes, rewards, rewards[..., :0], filled)
