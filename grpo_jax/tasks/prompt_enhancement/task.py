"""The task: rewrite what people type so that a diffusion model draws what they asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.binding import TaskRewards
from grpo_jax.rollout.data import PromptSet
from grpo_jax.rollout.prompts import load_prompts
from grpo_jax.tasks.picture_rewards import REWARDS, conditioned
from grpo_jax.tasks.picture_task import MINIATURE, PictureTask, make_render, miniature_prompts, picture_prompts
from grpo_jax.tasks.prompt_enhancement.compositional import compositional_records
from grpo_jax.tasks.task import TaskData, TaskReport, TaskSetup, oracle_column

COMPOSITIONAL = "compositional"
"""As data.prompts: objects, counts, colours and places, with questions for a judge that sees."""
BOTH = "builtin+compositional"
"""As data.prompts: those that ship with the package, and as many compositional ones, in turn."""
DEFAULT_REWARDS = (RewardSection("alignment"), RewardSection("faithfulness", 0.5), RewardSection("length", 0.2))


@dataclass(frozen=True)
class PromptEnhancement(PictureTask):
    """Rewrites prompts for a text-to-image model: judges.renderer draws them, judges.scorer compares them."""

    default_config: ClassVar[str | None] = "prompt_enhancement_miniature"
    judges_prompts: ClassVar[bool] = True
    renamed: ClassVar[Mapping[str, str]] = {
        "renderer": "judges.renderer",
        "scorer.watch_model": 'a judge of its own, judges.NAME.model, and "alignment@NAME" in watch',
        "scorer": "judges.scorer",
    }

    def load(self, setup: TaskSetup) -> TaskData:
        """Prompts, and what draws; the judges come later."""
        config = setup.config
        return TaskData(
            prompts=setup.prompts or _prompts(config),
            rewards=TaskRewards(REWARDS, defaults=DEFAULT_REWARDS, conditions=conditioned),
            render=lambda judges, asked: make_render(judges, config, baselines="baseline_images" in asked),
            report=TaskReport(lambda rows: {"unchanged": [row.prompt for row in rows], **oracle_column(rows)}),
        )


def _prompts(config: Config) -> PromptSet:
    makers = {MINIATURE: miniature_prompts, COMPOSITIONAL: compositional_records}
    makers[BOTH] = partial(_both_records, config.data.held_out)
    return picture_prompts(config, makers, "a .jsonl or .txt file, or builtin")


def _both_records(held_out: float, split: str, count: int) -> list[dict[str, Any]]:
    """A built-in prompt, a compositional one, and so on: of however many are measured, half are of each list."""
    rows = getattr(load_prompts("builtin", held_out=held_out), split)
    plain = [{"prompt": row.prompt, **row.columns} for row in rows]
    return [record for pair in zip(plain, compositional_records(split, len(rows)), strict=True) for record in pair]
