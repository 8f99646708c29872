"""The task of anyone's own rewards: what the policy writes is judged as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_jax.config.fields import require
from grpo_jax.rollout.data import load_prompts
from grpo_jax.rollout.texts import as_written, continued
from grpo_jax.tasks.task import Setup, Task, World


@dataclass(frozen=True)
class Text(Task):
    """Any Hugging Face folder, prompts from a file, rewards by import path."""

    defaults: ClassVar[Mapping[str, Any]] = {"sampling": {"max_new_tokens": 128}}  # room for an answer

    def load(self, setup: Setup) -> World:
        """The prompts."""
        config = setup.config
        if setup.prompts is None:
            require(bool(config.data.prompts), "data.prompts", "a .jsonl or .txt file", config.data.prompts)
        prompts = setup.prompts or load_prompts(config.data.prompts, held_out=config.data.held_out)

        return World(prompts, read=continued if config.data.form == "append" else as_written)
