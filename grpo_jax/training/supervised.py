"""Supervised steps before reinforcement learning, by the same trainer: pairs of a prompt and the text to write."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import OptimizerSection, WarmStartSection
from grpo_jax.core import losses
from grpo_jax.errors import UserError
from grpo_jax.models.sharding import place, shard_optimizer
from grpo_jax.rollout.data import batch_at
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.parts import Parts
from grpo_jax.training import trainer
from grpo_jax.training.loss_scale import make_loss_scale
from grpo_jax.training.objectives import Batch, ForwardPass, Objective, make_forward
from grpo_jax.training.trainer import TrainState, restored_state, saved_parts

_TOLD = 20  # lines on the console


def warm_start(
    parts: Parts,
    pairs: Sequence[tuple[str, str]],
    *,
    checkpoints: Checkpoints,
    meta: Mapping[str, Any],
    stop: threading.Event,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], float] | None:
    """Teaches the policy the pairs; what is trained (all weights, or the adapters) is what the run trains.

    It goes on after its own last checkpoint, if there is one, as if it had never been interrupted, and saves every
    `config.training.save_every` updates and when it is stopped. The weights in `parts.variables` are taken over: they
    cannot be read afterwards.

    What is taught is what is sampled: the distribution over the allowed tokens, and texts that end as the sampler's do
    (`taught_tokens`). A text with a token that is not allowed cannot be written: its pair is left out, and how many
    were is said.

    Args:
        parts: Policy, tokenizer and `config.warm_start`.
        pairs: (prompt, text), visited in an order drawn from the run's seed.
        checkpoints: Of the warm start alone.
        meta: Saved along, with the seconds so far as "warm_start".
        stop: Set by a signal.
        say: Prints a line.

    Returns:
        The policy's variables and the seconds it took, those before an interruption included; None if it was stopped.

    Raises:
        UserError: There are fewer pairs than a batch takes, or a checkpoint cannot be written or read.
    """
    config, section = parts.config, parts.config.warm_start
    pairs = teachable(parts, pairs, say)
    if len(pairs) < section.batch:
        raise UserError(
            f"warm_start.batch: expected at most {len(pairs)}, as many as there are pairs to teach, got {section.batch}"
        )
    optimizing = optimizer_section(section, config.optimizer)
    optimizer = trainer.make_optimizer(optimizing, trainer.make_schedule(optimizing, section.steps))
    optimizer = shard_optimizer(optimizer, parts.mesh)
    allowed = None if parts.allowed_tokens is None else jnp.asarray(parts.allowed_tokens)
    forward = make_forward(parts.policy, temperature=config.sampling.temperature, allowed_tokens=allowed)
    step = trainer.make_train_step(
        make_supervised_objective(forward),
        optimizer,
        normaliser=lambda batch: losses.loss_normaliser(batch.mask, "token"),
        accumulation=math.gcd(section.batch, config.training.accumulation),
    )
    scale = make_loss_scale(config.policy.compute_dtype)
    state = trainer.init_state(parts.variables, optimizer, keep_reference=False, loss_scale=scale, take_over=True)
    state = place(state, parts.mesh)
    done, seconds = 0, 0.0
    if checkpoints.latest_step() is not None:
        trainer.release(saved_parts(state))
        restored, saved = checkpoints.restore("latest", saved_parts(state))
        state, done, seconds = restored_state(restored, state.variables), saved["step"], saved["warm_start"]
        say(f"warm start goes on after update {done} of {section.steps}")
    started = time.monotonic() - seconds

    def save(step: int, state: TrainState, *, wait: bool) -> None:
        checkpoints.save(step, saved_parts(state), {**meta, "warm_start": time.monotonic() - started}, wait=wait)

    told, every = max(1, section.steps // _TOLD), config.training.save_every
    for number in range(done, section.steps):
        if stop.is_set():
            save(number, state, wait=True)
            return None
        places = batch_at(config.seed, number, batch_size=section.batch, n=len(pairs))
        state, report = step(state, supervised_batch(parts, [pairs[place] for place in places]))
        if (number + 1) % told == 0 or number + 1 == section.steps:
            say(f"warm start {number + 1}/{section.steps}  loss {float(report['loss']):.3f}")
        if every and (number + 1) % every == 0:
            save(number + 1, state, wait=False)
    return state.variables, time.monotonic() - started


def optimizer_section(section: WarmStartSection, base: OptimizerSection) -> OptimizerSection:
    """The optimizer of the warm start: its learning rate with a short ramp and a cosine, all else as in training."""
    return OptimizerSection(
        learning_rate=section.learning_rate,
        schedule="cosine",
        warmup_steps=section.steps // 10,
        weight_decay=base.weight_decay,
        beta1=base.beta1,
        beta2=base.beta2,
        max_grad_norm=base.max_grad_norm,
    )


def make_supervised_objective(forward: ForwardPass) -> Objective:
    """`losses.sft_loss` of a batch with one completion for each prompt: (loss, {"supervised": SFTMetrics})."""

    def objective(variables: dict[str, Any], batch: Batch, normaliser: Any) -> tuple[jax.Array, dict[str, Any]]:
        loss, metrics = losses.sft_loss(forward(variables, batch).logprobs, batch.mask, normaliser=normaliser)
        return loss, {"supervised": metrics}

    return objective


def teachable(parts: Parts, pairs: Sequence[tuple[str, str]], say: Callable[[str], None]) -> Sequence[tuple[str, str]]:
    """The pairs whose texts the policy may write (`data.allowed_tokens`); says how many are left out."""
    allowed = parts.allowed_tokens
    if allowed is None:
        return pairs
    kept = [pair for pair in pairs if allowed[taught_tokens(parts, *pair)].all()]
    if len(kept) < len(pairs):
        say(
            f"warm start: {len(pairs) - len(kept)} of {len(pairs)} pairs are left out, their texts hold tokens that "
            f"data.allowed_tokens = {parts.config.data.allowed_tokens} rules out"
        )
    return kept


def taught_tokens(parts: Parts, prompt: str, text: str) -> list[int]:
    """A text as the completion of a prompt, up to the token that ends it; cut to max_new_tokens (then without it).

    It ends with the tokenizer's own end token, which closes a turn of its chat template, or with the first of the
    folder's end tokens where that is none of them. The sampler stops at any: a text that holds one ends there.
    """
    tokenizer, ends = parts.loaded.tokenizer, parts.loaded.eos_ids
    chat = bool(getattr(tokenizer, "chat_template", None)) and parts.config.data.form == "rewrite"
    # Behind plain text a word starts with its space; behind a chat template's mark it does not.
    gap = "" if chat or not prompt or prompt[-1].isspace() else " "
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    ids = [*tokenizer(gap + text, add_special_tokens=False)["input_ids"], end]
    stop = next(place for place, token in enumerate(ids) if token in ends)
    return ids[: stop + 1][: parts.config.sampling.max_new_tokens]


def supervised_batch(parts: Parts, pairs: Sequence[tuple[str, str]]) -> Batch:
    """The pairs as tokens: prompts as in sampling, texts as `taught_tokens`."""
    prompt_tokens, prompt_mask = parts.environment.encode([prompt for prompt, _ in pairs])
    tokens = np.full((len(pairs), 1, parts.config.sampling.max_new_tokens), parts.loaded.pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, pair in enumerate(pairs):
        ids = taught_tokens(parts, *pair)
        tokens[row, 0, : len(ids)], mask[row, 0, : len(ids)] = ids, True
    return Batch(prompt_tokens, prompt_mask, tokens, mask)
