"""AdamW with its learning-rate schedule, gradient clip, and mask of weights that decay."""

from __future__ import annotations

import jax
import optax

from grpo_jax.config.sections import OptimizerSection
from grpo_jax.models.variables import VALUE, Variables

_DECAYED = ("kernel", "a", "b")  # matrices of projections, and of the adapters beside them


def make_schedule(section: OptimizerSection, total_updates: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then constant, linear to 0 or cosine to 0."""
    peak, warmup = section.learning_rate, section.warmup_steps
    assert peak is not None  # the config fills it in
    remaining = max(total_updates - warmup, 1)
    after: optax.Schedule
    if section.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif section.schedule == "linear":
        after = optax.linear_schedule(peak, 0.0, remaining)
    else:
        after = optax.cosine_decay_schedule(peak, remaining)
    if warmup == 0:
        return after
    # The first update already moves: it uses peak / warmup rather than 0.
    ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([ramp, after], [warmup])


def decayed(weights: Variables) -> Variables:
    """Mask of the weights that decay, a bool for each: projections, kernels and adapters.

    Norms, biases, embeddings (learned positions and an untied unembedding too) and the value head do not: decay would
    pull norms to 0 rather than to 1, rare tokens to 0 with every update they take no part in, and values to 0.
    """

    def decays(path: tuple[object, ...], _: object) -> bool:
        names = [getattr(entry, "key", None) for entry in path]
        return names[-1] in _DECAYED and names[0] != VALUE

    return jax.tree_util.tree_map_with_path(decays, weights)


def make_optimizer(section: OptimizerSection, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip; float32 throughout.

        m = β1 m + (1 - β1) g,  v = β2 v + (1 - β2) g²,  w' = w - rate · (m̂ / (√v̂ + ε) + weight_decay · w)

    with the last term for the weights that decay alone (`decayed`). From https://arxiv.org/abs/1711.05101.
    """

    adamw = optax.adamw(schedule, b1=section.beta1, b2=section.beta2, weight_decay=section.weight_decay, mask=decayed)
    if section.max_grad_norm == 0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(section.max_grad_norm), adamw)
