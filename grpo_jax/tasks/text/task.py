"""The task of anyone's own rewards: what the policy writes is judged as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.rollout.prompts import load_prompts
from grpo_jax.rollout.texts import Reading, as_written, continued
from grpo_jax.tasks.task import Setup, Task, World


@dataclass(frozen=True)
class Text(Task):
    """Any Hugging Face folder, prompts from a file, rewards by import path."""

    defaults: ClassVar[Mapping[str, Any]] = {"sampling": {"max_new_tokens": 128}}  # room for an answer

    def reader(self, config: Config) -> Callable[[str, str], Reading]:
        """Completions as they are; a continuation with its prompt."""
        return continued if config.data.form == "append" else as_written

    def load(self, setup: Setup) -> World:
        """The prompts."""
        section = setup.config.data
        if setup.prompts is not None:
            return World(setup.prompts)
        require(bool(section.prompts), "data.prompts", "a .jsonl or .txt file", section.prompts)
        return World(load_prompts(section.prompts, held_out=section.held_out))
