"""Estimators with a paper of their own, against TRL's code or a loop written from the equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.oracle import policy_batch

from grpo_jax.core.losses import PRESETS, EntropyControl, adapt_entropy_coef


def test_adaptive_entropy_coefficient_is_trls(x64):
    """Twelve updates: each loss, with the coefficient that the updates before left, and each coefficient."""
    pytest.importorskip("trl", reason="TRL is the oracle: pip install -e '.[diffusion,oracles]'")
    from oracles.oracle_trl import tensor, trainer
    from oracles.oracle_trl_cases import our_loss

    target, delta, start = 1.0, 0.3, 0.5
    theirs = trainer(
        args={
            "entropy_target": target, "entropy_coef_delta": delta, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0,
        },
        entropy_coef=start, _entropy_bonus_enabled=True, use_adaptive_entropy=True,
        _last_world_entropy=float("inf"), _entropy_window_stats=None, max_completion_length=5,
    )  # fmt: skip
    control = EntropyControl(jnp.float64(start), jnp.float64(0))
    adapt = jax.jit(lambda control, entropy: adapt_entropy_coef(control, entropy, target=target, delta=delta))
    moved = []
    for step, level in enumerate([1.5, 0.5, 0.5, 0.5, 1.5, 1.5, 0.5, 1.5, 1.5, 1.5, 1.5, 0.5]):
        parts = policy_batch(step)
        parts["entropy"] = parts["entropy"] / parts["entropy"][parts["mask"]].mean() * level
        loss, _, metrics = our_loss(parts, PRESETS["grpo"], entropy_coef=control.applied)
        mask = tensor(parts["mask"]).long()
        passed = tensor(parts["logprobs"]), tensor(parts["entropy"]), None
        theirs._get_per_token_logps_and_entropies = lambda *_, passed=passed, **__: passed
        expected = theirs._compute_loss(None, {
            "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
            "advantages": tensor(parts["advantages"]), "old_per_token_logps": tensor(parts["old"]),
        })  # fmt: skip
        np.testing.assert_allclose(loss, expected.item(), atol=1e-6)
        control = adapt(control, metrics.entropy.value())
        np.testing.assert_allclose(control.coef, theirs.entropy_coef, atol=1e-12)
        moved.append(float(control.coef))
    assert min(moved) == 0 and max(moved) == 1 and len(set(np.round(moved, 6))) > 4
