"""Policy losses as loops over single tokens, and batches and settings for the tests of losses."""

import functools

import jax
import numpy as np
import pytest

from grpo_jax.core.losses import CappedWeight, Clip, FixedLength, KLPenalty, SoftGate, grpo_loss
from grpo_jax.core.surrogates import DivergenceMask, DivergencePenalty

ROWS, LENGTH = 6, 5
SURROGATES = {
    "clip": Clip(0.2, 0.28),
    "dual clip": Clip(0.2, 0.2, dual=1.5),
    "capped": CappedWeight(1.3),
    "gate": SoftGate(1.0, 1.4),
    "divergence mask": DivergenceMask(0.02, 0.05, cap=1.3),
    "divergence penalty": DivergencePenalty(0.1),
}
AGGREGATIONS = {"sequence": "sequence", "token": "token", "fixed": FixedLength(7)}
CHOICES = [
    pytest.param(dict(surrogate=SURROGATES[s], ratio=r, aggregation=AGGREGATIONS[a]), id=f"{s}-{r}-{a}")
    for s, r, a in [
        ("clip", "token", "sequence"),
        ("clip", "sequence", "sequence"),
        ("clip", "token", "fixed"),
        ("dual clip", "token", "token"),
        ("dual clip", "sequence", "fixed"),
        ("capped", "token", "token"),
        ("capped", "sequence", "sequence"),
        ("gate", "token", "sequence"),
        ("gate", "sequence", "token"),
        ("clip", "geometric", "sequence"),
        ("divergence mask", "token", "token"),
        ("divergence penalty", "token", "sequence"),
    ]
]
EXTRAS = dict(kl=KLPenalty(0.3, corrected=True), entropy_coef=0.2)


def batch(seed=0, rows=ROWS, length=LENGTH, dtype=np.float32, spread=0.4, full=False):
    """Random rows of random lengths; the first has no token, unless `full`."""
    random = np.random.default_rng(seed)
    logprobs = -random.exponential(size=(rows, length)) - 0.05
    old = logprobs + spread * random.normal(size=(rows, length))
    ref = logprobs + spread * random.normal(size=(rows, length))
    entropy = random.exponential(size=(rows, length))
    lengths = random.integers(1, length + 1, rows)
    lengths[0] = length if full else 0
    mask = np.arange(length) < lengths[:, None]
    advantages = random.normal(size=rows)
    parts = dict(logprobs=logprobs, old=old, ref=ref, entropy=entropy, advantages=advantages)
    return {name: part.astype(dtype) for name, part in parts.items()} | {"mask": mask}


@functools.partial(jax.jit, static_argnames=("choices", "kl", "entropy_coef"))
def slopes(parts, normaliser=None, *, choices, kl=None, entropy_coef=0.0):
    """((loss, metrics), gradient with respect to (logprobs, entropy))."""

    def loss(logprobs, entropy):
        return grpo_loss(
            logprobs,
            parts["old"],
            parts["advantages"],
            parts["mask"],
            ref_logprobs=parts["ref"],
            entropy=entropy,
            normaliser=normaliser,
            kl=kl,
            entropy_coef=entropy_coef,
            **dict(choices),
        )

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(parts["logprobs"], parts["entropy"])


def evaluate(parts, choices, normaliser=None, **extras):
    return slopes(parts, normaliser, choices=tuple(sorted(choices.items())), **extras)


def loop_objective(surrogate, log_ratio, logprob, advantage):
    """One token, as the papers write it."""
    ratio = np.exp(log_ratio)
    if isinstance(surrogate, Clip):
        clipped = min(max(ratio, 1 - surrogate.low), 1 + surrogate.high)
        value = min(ratio * advantage, clipped * advantage)
        if surrogate.dual is not None and advantage < 0:
            value = max(value, surrogate.dual * advantage)
        return value
    if isinstance(surrogate, CappedWeight):
        return min(ratio, surrogate.cap) * advantage * logprob
    old = np.exp(logprob - log_ratio)
    if isinstance(surrogate, DivergenceMask):
        change = np.exp(logprob) - old
        leaves = (advantage > 0 and change > surrogate.high) or (advantage < 0 and change < -surrogate.low)
        return 0.0 if leaves else min(ratio, surrogate.cap) * advantage * logprob
    if isinstance(surrogate, DivergencePenalty):
        return ratio * advantage - abs(advantage) * old * (ratio - 1) ** 2 / (2 * surrogate.epsilon)
    temperature = surrogate.positive if advantage > 0 else surrogate.negative
    return 4 / temperature / (1 + np.exp(-temperature * (ratio - 1))) * advantage


def loop_row_ratio(log_ratios, surrogate, level, advantage):
    """The log ratio of a row: GMPO's mean of clipped tokens, or their geometric mean."""
    if level == "geometric":
        high, low = np.log(1 + surrogate.high), np.log(1 - surrogate.low)
        log_ratios = [min(x, high) if advantage > 0 else max(x, low) for x in log_ratios]
    return sum(log_ratios) / len(log_ratios)


def loop_loss(parts, choices, kl=None, entropy_coef=0.0):
    surrogate, level, aggregation = choices["surrogate"], choices["ratio"], choices["aggregation"]
    row_values, token_values, entropies = [], [], []
    for i in range(len(parts["mask"])):
        places = [t for t in range(parts["mask"].shape[1]) if parts["mask"][i, t]]
        if not places:
            continue
        log_ratios = {t: parts["logprobs"][i, t] - parts["old"][i, t] for t in places}
        whole = loop_row_ratio(log_ratios.values(), surrogate, level, parts["advantages"][i])
        values = []
        for t in places:
            log_ratio = log_ratios[t] if level == "token" else whole
            advantage = parts["advantages"][i] if parts["advantages"].ndim == 1 else parts["advantages"][i, t]
            value = -loop_objective(surrogate, log_ratio, parts["logprobs"][i, t], advantage)
            if kl is not None:
                difference = parts["ref"][i, t] - parts["logprobs"][i, t]
                estimate = {"k1": -difference, "k2": difference**2 / 2}.get(
                    kl.estimator, np.exp(difference) - difference - 1
                )
                value += kl.coef * estimate * (np.exp(log_ratios[t]) if kl.corrected else 1.0)
            values.append(value)
            entropies.append(parts["entropy"][i, t])
        row_values.append(sum(values) / len(values))
        token_values += values
    total = {
        "sequence": lambda: sum(row_values) / len(row_values),
        "token": lambda: sum(token_values) / len(token_values),
    }.get(aggregation, lambda: sum(token_values) / (len(row_values) * aggregation.length))()
    return total - entropy_coef * sum(entropies) / len(entropies)
