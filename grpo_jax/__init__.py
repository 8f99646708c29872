"""Post-train language policies in JAX with GRPO, GDPO or PPO, with rewards from anywhere.

The names below are imported lazily: `import grpo_jax` alone loads neither JAX nor a model.
"""

import importlib
from typing import Any

__grpo_jax__ = True  # marks this project's package: another distribution may install one of the same name

_PUBLIC = {
    "config.fields": ("require", "to_yaml"),
    "config.judge": ("Judge",),
    "config.run": ("Config", "make_config"),
    "core.advantages": (
        "Condition",
        "batch_whitened_advantages",
        "condition_rewards",
        "gdpo_advantages",
        "group_advantages",
        "leave_one_out_advantages",
        "max_at_k_advantages",
        "raft_advantages",
        "sum_rewards",
    ),
    "core.aggregation": ("FixedLength", "loss_normaliser"),
    "core.flow": ("add_noise", "diffusion_nft_loss", "unit_rewards"),
    "core.kl": ("KLPenalty", "kl_divergence"),
    "core.logprobs": ("token_logprobs",),
    "core.losses": ("PRESETS", "grpo_loss", "sft_loss"),
    "core.ppo": ("ppo_loss", "value_loss"),
    "core.returns": ("discounted_returns", "gae_advantages", "kl_penalised_rewards"),
    "core.surrogates": ("CappedWeight", "Clip", "DivergenceMask", "DivergencePenalty", "GammaWeight", "SoftGate"),
    "errors": ("UserError",),
    "models.policy": ("Policy", "load_policy"),
    "predict": ("load_rewriter",),
    "rollout.data": ("PromptSet",),
    "rollout.reward_registry": ("TaskRewards",),
    "rollout.env": ("Episode", "Observation", "Turn"),
    "rollout.prompts": ("make_prompt_set",),
    "sampling.decoding": ("Samples",),
    "sampling.sampler": ("generate", "make_sampler"),
    "sampling.token_choice": ("SamplingParams",),
    "tasks.task": (
        *("Chart", "Curve", "Display", "Findings", "Table", "Task", "TaskData", "TaskReport", "TaskSetup"),
        *("TurnEnvironment", "Vocabulary"),
    ),
    "train": ("run",),
}
_PLACES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]: one table, not two


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _PLACES:
        raise AttributeError(f"module 'grpo_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"grpo_jax.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
