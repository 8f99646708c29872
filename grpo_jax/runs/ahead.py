"""Compile the first programs of a run in threads, while its judges are loaded."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, cast

from grpo_jax.errors import ABANDONED
from grpo_jax.rollout.rollout import EVALUATION_STREAM, prompt_keys
from grpo_jax.runs.batches import rows_at
from grpo_jax.runs.evaluation import chunk_size
from grpo_jax.runs.loading import RunContext
from grpo_jax.training.batch import full_batch


def compile_ahead(ctx: RunContext) -> None:
    """Start compiling samplers, log-probabilities and first update; other programs compile at their first call."""
    if ctx.compiles_ahead:
        threading.Thread(target=_compile, args=(ctx,), name=f"{ABANDONED}tracing").start()


def _compile(ctx: RunContext) -> None:
    config, learner, samplers = ctx.config, ctx.learner, cast(Any, ctx.samplers)  # for a single turn
    assert learner is not None
    with suppress(Exception):  # the run raises it too, with more context
        state = learner.shapes(ctx.policy.variables)
        if not config.resume and ctx.test_rows:
            for sampler, count in ((samplers.greedy, 1), (samplers.sampled, config.evaluation.samples)):
                if count:
                    rows = ctx.test_rows[: max(chunk_size(ctx) // count, 1)]
                    prompt, keys = ctx.fns.encode(rows), prompt_keys(ctx.key, EVALUATION_STREAM, rows)
                    sampler(state.variables, prompt.tokens, prompt.mask, keys)
        rows, part = rows_at(ctx, 0), slice(config.training.chunk_prompts or None)
        prompt, keys = ctx.fns.encode(rows), prompt_keys(ctx.key, 0, rows)
        samplers.training(state.variables, prompt.tokens[part], prompt.mask[part], keys[part])
        if not config.resume:  # after the first update, lengths depend on the batch
            rewards = {"weights": ctx.rewards.weights, "conditions": ctx.rewards.conditions}
            learner.update(state, full_batch(config, prompt.mask.shape, device=ctx.policy_device, **rewards), None)
