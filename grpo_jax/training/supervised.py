"""Supervised steps before reinforcement learning, by the same trainer: pairs of a prompt and the text to write."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
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
from grpo_jax.training.optimizer import make_optimizer, make_schedule
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
        UserError: There are fewer pairs than a batch takes, a checkpoint cannot be written or read, or the loss is no
            longer finite.
    """
    config, section = parts.config, parts.config.warm_start
    if len(pairs) < section.batch:
        raise UserError(
            f"warm_start.batch: expected at most {len(pairs)}, as many as there are pairs, got {section.batch}"
        )
    optimizing = optimizer_section(section, config.optimizer)
    optimizer = make_optimizer(optimizing, make_schedule(optimizing, section.steps))
    optimizer = shard_optimizer(optimizer, parts.mesh)
    forward = make_forward(parts.policy, temperature=config.sampling.temperature)
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
            _require_updates(state)
        if every and (number + 1) % every == 0:
            save(number + 1, state, wait=False)
    return state.variables, time.monotonic() - started


def _require_updates(state: TrainState) -> None:
    skipped = int(state.skipped)
    if skipped >= trainer.PATIENCE:
        raise UserError(
            f"warm_start: the loss or its gradient was not finite in {skipped} updates in a row, which were left out; "
            "lower warm_start.learning_rate, or look for what is wrong with the policy's weights"
        )


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


def supervised_batch(parts: Parts, pairs: Sequence[tuple[str, str]]) -> Batch:
    """The pairs as tokens: prompts as in sampling, texts with the end token, cut to max_new_tokens (then without)."""
    tokenizer, length = parts.loaded.tokenizer, parts.config.sampling.max_new_tokens
    prompt_tokens, prompt_mask = parts.environment.encode([prompt for prompt, _ in pairs])
    tokens = np.full((len(pairs), 1, length), parts.loaded.pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    chat = bool(getattr(tokenizer, "chat_template", None)) and parts.config.data.form == "rewrite"
    for row, (prompt, text) in enumerate(pairs):
        # Behind plain text a word starts with its space; behind a chat template's mark it does not.
        gap = "" if chat or not prompt or prompt[-1].isspace() else " "
        ids = list(tokenizer(gap + text, add_special_tokens=False)["input_ids"])
        ids = [*ids, parts.loaded.eos_ids[0]][:length]
        tokens[row, 0, : len(ids)], mask[row, 0, : len(ids)] = ids, True
    return Batch(prompt_tokens, prompt_mask, tokens, mask)
