"""Supervised learning by the same trainer: the objective, and the optimizer of a warm start."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from grpo_jax.config.sections import OptimizerSection, WarmStartSection
from grpo_jax.core.losses import sft_loss
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import ForwardPass, Objective


def optimizer_section(section: WarmStartSection, base: OptimizerSection) -> OptimizerSection:
    """The optimizer of the warm start: its learning rate with a short ramp and a cosine, all else as in training."""
    return dataclasses.replace(
        base, learning_rate=section.learning_rate, schedule="cosine", warmup_steps=section.steps // 10
    )


def make_supervised_objective(forward: ForwardPass) -> Objective:
    """`losses.sft_loss` of a batch with one completion for each prompt: (loss, {"supervised": SFTMetrics})."""

    def objective(variables: dict[str, Any], batch: Batch, normaliser: Any) -> tuple[jax.Array, dict[str, Any]]:
        loss, metrics = sft_loss(forward(variables, batch).logprobs, batch.mask, normaliser=normaliser)
        return loss, {"supervised": metrics}

    return objective
