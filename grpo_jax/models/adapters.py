"""The adapters that a config asks for: their settings, and what they are at the start of a run."""

from __future__ import annotations

from typing import Any

import jax

from grpo_jax.config.policy import LoraSection, PolicySection
from grpo_jax.errors import UserError


def lora_config(section: LoraSection, model: Any) -> Any:
    """The `LoraConfig` for a model's config, or None where all weights are trained.

    Raises:
        UserError: A target is no projection of this architecture, or the folder that the section names does not fit it.
    """
    from grpo_jax.models.families import family_of
    from grpo_jax.models.hf.peft import load_adapters
    from grpo_jax.models.lora import LoraConfig, check_targets
    from grpo_jax.models.vision.tower import TOWERS

    if section.path is not None:
        return load_adapters(section.path, model)[0]
    if section.rank == 0:
        return None
    projections = tuple(family_of(model).projections)
    tower = ()
    if section.vision:
        if getattr(model, "vision", None) is None:
            raise UserError(f"policy.lora.vision: this {model.model_type} has no vision tower; leave it out")
        tower = tuple(TOWERS[model.vision.family].projections)
    try:
        lora = LoraConfig(section.rank, section.alpha, tuple(section.targets) or projections, tower)
        check_targets(lora, projections, model.model_type)
        return lora
    except ValueError as error:
        raise UserError(f"policy.lora: {error}") from error


def first_adapters(
    section: LoraSection, lora: Any, model: Any, params: Any, seed: int, visual: Any = None
) -> dict[str, Any]:
    """The `lora` collection that training begins with: the folder's that the section names, else fresh ones."""
    from grpo_jax.models.hf.peft import load_adapters
    from grpo_jax.models.lora import init_adapters

    if section.path is not None:
        return load_adapters(section.path, model)[1]
    return init_adapters(params, jax.random.fold_in(jax.random.key(seed), 2**30), lora, visual)


def needs_tower(section: PolicySection, lora: Any) -> bool:
    """Whether the vision tower takes part in training, whatever the prompts are."""
    return section.vision == "train" or (lora is not None and bool(lora.vision))
