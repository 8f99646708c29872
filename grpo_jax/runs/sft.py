"""Supervised fine-tuning (SFT) before reinforcement learning, on the task's prompt-completion pairs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.core.aggregation import loss_normaliser
from grpo_jax.errors import Stopped, UserError, short_repr
from grpo_jax.models.hf.chat import decoded, special_ids
from grpo_jax.models.sharding import shard, shard_optimizer
from grpo_jax.models.variables import Variables
from grpo_jax.rollout.data import Row, batch_at
from grpo_jax.rollout.encoding import follows_text
from grpo_jax.rollout.env import as_observation, prepared
from grpo_jax.rollout.prompts import UNREAD_KEYS
from grpo_jax.runs.context import RunContext
from grpo_jax.runs.evaluation import evaluate
from grpo_jax.runs.session import Notes, Record
from grpo_jax.sampling.samplers import completion_tokens
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import make_forward, make_supervised_objective
from grpo_jax.training.state import TrainState, commit_to_device, init_state, make_optimizer, make_schedule
from grpo_jax.training.update import PATIENCE, make_train_step

Pair = Sequence[Any]
"""A prompt (a text or a row) and the completion; of an episode then an observation or its text, a completion, …"""

UNTRAINED = "untrained"
"""The policy as it was loaded, before SFT."""
_LINES = 20  # lines on the console


def warm_up(ctx: RunContext, info: Callable[[str], None]) -> tuple[Variables, Notes, dict[str, float]]:
    """Evaluate the policy and run SFT: returns variables, notes of the run (`before`, `task_data`), seconds."""
    notes, started = Notes(), time.monotonic()
    if not ctx.config.sft.steps:
        return ctx.policy.variables, notes, {}
    if ctx.test_rows:
        untrained = evaluate(ctx, ctx.policy.variables, ctx.test_rows)
        task_data = ctx.task_data.report.remember(UNTRAINED, {"greedy": untrained.rollout})
        notes = Notes({UNTRAINED: untrained.measures}, task_data=task_data)
    evaluated = time.monotonic()
    variables = run_sft(ctx, info)
    return variables, notes, {"evaluate": evaluated - started, "sft": time.monotonic() - evaluated}


def run_sft(ctx: RunContext, info: Callable[[str], None]) -> Variables:
    """Train the policy on the task's pairs; return the variables. A stop (`Stopped`) saves nothing.

    It trains the same weights as the run (all, or the adapters). It takes over the weights in `ctx.policy.variables`,
    which cannot be read afterwards. Training matches sampling: the distribution is over the allowed tokens, and
    completions end as the sampler's (`supervised_tokens`).
    """
    config, section, data = ctx.config, ctx.config.sft, ctx.task_data
    source = completion_pairs(data.prompts.train) if data.pairs is None else data.pairs()
    if not (pairs := [*islice(source, section.rows or None)]):
        raise UserError('sft.steps: expected 0, or training rows with a "completion" (data.columns.completion)')
    pairs = teachable(ctx, pairs, info)
    most = f"at most {len(pairs)}, the number of SFT pairs"
    require(section.batch <= len(pairs), "sft.batch", most, section.batch)
    for reason, count in pair_problems(ctx, pairs).items():
        if count:
            info(f"SFT: warning: {count} of {len(pairs)} pairs {reason}")
    state, step = make_sft(ctx)
    line_every = max(1, section.steps // _LINES)
    for number in range(section.steps):
        if ctx.is_stopped():
            raise Stopped
        places = batch_at(config.seed, number, batch_size=section.batch, n=len(pairs))
        batch = supervised_batch(ctx, state.variables, [pairs[place] for place in places])
        state, report = jax.block_until_ready(step(state, batch))
        if (number + 1) % line_every == 0 or number + 1 == section.steps:
            info(f"SFT {number + 1}/{section.steps}  loss {float(report['loss']):.3f}")
            skipped = int(state.skipped)
            if skipped >= min(PATIENCE, section.steps):
                raise UserError(
                    f"sft: the loss or its gradient was not finite in {skipped} updates in a row, which were left "
                    "out; lower sft.learning_rate, or check the policy's weights"
                )
    return state.variables


def make_sft(ctx: RunContext) -> tuple[TrainState, Callable[[TrainState, Batch], tuple[TrainState, Record]]]:
    """Return the initial state, which takes over the policy's variables, and the compiled supervised step."""
    config, policy, section = ctx.config, ctx.policy, ctx.config.sft
    optimizing = config.optimizer.replace(
        learning_rate=section.learning_rate, schedule="cosine", warmup_steps=section.steps // 10
    )
    optimizer = shard_optimizer(make_optimizer(optimizing, make_schedule(optimizing, section.steps)), policy.mesh)
    allowed = None if ctx.allowed_tokens is None else jnp.asarray(ctx.allowed_tokens)
    forward = make_forward(policy, temperature=config.sampling.temperature, allowed_tokens=allowed, trie=ctx.trie)
    step = make_train_step(
        make_supervised_objective(forward),
        optimizer,
        normaliser=lambda batch: loss_normaliser(batch.mask, "token"),
        grad_accumulation_steps=math.gcd(section.batch, config.training.grad_accumulation_steps),
        grad_dtype=config.training.grad_dtype,
    )
    state = init_state(policy.variables, optimizer, keep_reference=False, take_over=True)
    return commit_to_device(shard(state, policy.mesh)), step


def completion_pairs(rows: Sequence[Row]) -> Iterator[Pair]:
    """Yield the rows with a `completion`, each with its text.

    As in TRL's prompt-completion data sets, a completion is a text or a list of one assistant message. UserError for
    another value.
    """
    for row in rows:
        match row.columns.get("completion"):
            case [{"role": "assistant", "content": str(text), **rest}] if text and not any(map(rest.get, UNREAD_KEYS)):
                yield row, text
            case str(text) if text:
                yield row, text
            case None | "":
                continue
            case value:
                expected = "a text, or a list of one assistant message with its whole text as content"
                require(False, f"completion of row {row.id}", expected, short_repr(value))


def teachable(ctx: RunContext, pairs: Sequence[Pair], info: Callable[[str], None]) -> Sequence[Pair]:
    """Return the pairs without forbidden tokens (`data.forbidden_tokens`); log the number of the others."""
    allowed, choices = ctx.allowed_tokens, ctx.task_data.choices
    if choices is not None:
        listed, why = frozenset(choices.texts), "are none of those that this task lists"
        writable = [pair for pair in pairs if listed.issuperset(pair[1::2])]
    elif allowed is not None:
        why = "hold tokens that data.forbidden_tokens rules out"
        tokens = ((supervised_tokens(ctx, as_row(pair[0]).prompt, text) for text in pair[1::2]) for pair in pairs)
        writable = [pair for pair, parts in zip(pairs, tokens, strict=True) if all(allowed[ids].all() for ids in parts)]
    else:
        return pairs
    if len(writable) < len(pairs):
        info(f"SFT: {len(pairs) - len(writable)} of {len(pairs)} pairs are left out, their texts {why}")
    return writable


def pair_problems(ctx: RunContext, pairs: Sequence[Pair]) -> dict[str, int]:
    """Count the pairs whose texts train something else than they say, by reason."""
    tokenizer, prompt = ctx.policy.tokenizer, ctx.fns.encode([as_row(pairs[0][0])])
    thought = decoded(tokenizer, prompt.tokens[prompt.mask]).rstrip().endswith("</think>")
    ends = tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer).intersection(ctx.policy.eos_ids)))
    texts = ["\0".join(pair[1::2]) for pair in pairs]
    think = "think after prompts that end with </think>: set data.chat_template_options.enable_thinking true"
    return {
        "are cut at sampling.max_new_tokens, without their end token": sum(_is_cut(ctx, pair) for pair in pairs),
        f"hold {' or '.join(ends)} as text before their end token": sum(any(map(text.count, ends)) for text in texts),
        think: sum(thought and "</think>" in text for text in texts),
    }


def _is_cut(ctx: RunContext, pair: Pair) -> bool:
    """Return whether a text of a pair has more tokens than a completion; no text has more tokens than bytes."""
    most = ctx.config.sampling.max_new_tokens
    long = (text for text in pair[1::2] if len(text.encode()) >= most)
    return any(supervised_tokens(ctx, as_row(pair[0]).prompt, text)[-1] not in ctx.policy.eos_ids for text in long)


def supervised_tokens(ctx: RunContext, prompt: str, text: str) -> list[int]:
    """Encode a text as a completion (`completion_tokens`), truncated to max_new_tokens, then without EOS."""
    loaded, config = ctx.policy.folder, ctx.config
    # Choices have the same tokens after every prompt.
    apart = ctx.task_data.choices is not None or (prompt != "" and not prompt[-1].isspace())
    plain = follows_text(config, loaded.tokenizer)
    ids = completion_tokens(loaded.tokenizer, text, loaded.eos_ids, plain=plain, gap=plain and apart)
    return ids[: config.sampling.max_new_tokens]


def supervised_stream(ctx: RunContext, pair: Pair, grids: Sequence[np.ndarray] = ()) -> tuple[list[int], list[bool]]:
    """Return the tokens after a pair's prompt, as in sampling, and a mask of the policy's own tokens."""
    env, texts, turns = ctx.fns.env, pair[1::2], ctx.config.sampling.turns
    require(len(texts) <= turns, "sampling.turns", f"at least {len(texts)}, as many as the pairs of SFT have", turns)
    ids, learned, place = [], [], 0
    for number, text in enumerate(texts):
        if number and env is not None:
            observation = as_observation(pair[2 * number])
            start, place = place, place + len(observation.pictures)
            ids += env.encode_observation(observation, ids[-1] in ctx.policy.eos_ids, grids[start:place])
            learned += [False] * (len(ids) - len(learned))
        ids += supervised_tokens(ctx, as_row(pair[0]).prompt if number == 0 else "", text)
        learned += [True] * (len(ids) - len(learned))
    return ids, learned


def supervised_batch(ctx: RunContext, variables: Variables, pairs: Sequence[Pair]) -> Batch:
    """Encode the pairs: prompts and completions as in sampling, with picture states under `variables`."""
    fns, section = ctx.fns, ctx.config.sampling
    prompts = fns.encode([as_row(pair[0]) for pair in pairs])
    seen = [[picture for value in pair[2::2] for picture in as_observation(value).pictures] for pair in pairs]
    shown = prepared(fns.prepare, seen, [(row, 0) for row in range(len(pairs))], (len(pairs), 1))
    tokens = np.full((len(pairs), 1, section.stream_tokens), ctx.policy.pad_id, np.int32)
    present, mask = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
    for row, pair in enumerate(pairs):
        grids = [] if shown is None else list(np.asarray(shown.grid[row, 0])[: len(seen[row])])
        ids, learned = supervised_stream(ctx, pair, grids)
        tokens[row, 0, : len(ids)], present[row, 0, : len(ids)], mask[row, 0, : len(ids)] = ids, True, learned
    inputs = {"pictures": fns.see(variables, prompts.pictures)[1], "observations": fns.see(variables, shown)[1]}
    arrays: Any = (prompts.tokens, prompts.mask, tokens, mask)  # jit places NumPy arrays
    batch = Batch(*arrays, pictures={name: part for name, part in inputs.items() if part is not None})
    return batch if section.turns == 1 else batch._replace(present=present)


def as_row(prompt: str | Row) -> Row:
    """Return a pair's prompt as a row."""
    return prompt if isinstance(prompt, Row) else Row(0, prompt)
