"""The task: rewrite what people type so that a diffusion model draws what they asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_jax.config.fields import require
from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import SPLITS, PromptSet
from grpo_jax.rollout.prompts import load_prompts, make_prompt_set
from grpo_jax.rollout.texts import Reading
from grpo_jax.tasks.display import Chart, Curve, Display
from grpo_jax.tasks.prompt_enhancement.pictures import make_render
from grpo_jax.tasks.prompt_enhancement.rewards import REWARDS, default_condition
from grpo_jax.tasks.prompt_enhancement.rewriting import parse_rewrite
from grpo_jax.tasks.task import Setup, Task, World, oracle_column

MINIATURE = "miniature"
"""As data.prompts: the prompts of the small world that ships with the package."""

DEFAULT_REWARDS = (RewardSection("alignment"), RewardSection("faithfulness", 0.5), RewardSection("length", 0.2))

_TRAINING_PROMPTS, _TEST_PROMPTS = 2048, 256


@dataclass(frozen=True)
class PromptEnhancement(Task):
    """Rewrites prompts for a text-to-image model: judges.renderer draws them, judges.scorer compares them."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "judges": {"renderer": {"kind": "stable_diffusion_3"}, "scorer": {"kind": "open_clip"}},
    }
    default_config: ClassVar[str | None] = "prompt_enhancement_miniature"
    renamed: ClassVar[Mapping[str, str]] = {
        "renderer": "judges.renderer",
        "scorer.watch_model": 'a judge of its own, judges.NAME.model, and "alignment@NAME" in watch',
        "scorer": "judges.scorer",
    }
    display: ClassVar[Display] = Display(
        headline=("pixel_accuracy",),
        live=(("watch/pixel_accuracy/mean", "pixels"),),
        charts=(
            Chart(
                "Pixel accuracy",
                (Curve("watch/pixel_accuracy/mean", "training batch"),),
                note="Read from the picture by rule; never trained on.",
            ),
        ),
        best="the best possible rewrite",
    )

    def check(self, config: Config) -> None:
        """Refuses missing judges, and rewards that need what is not there."""
        for name in ("renderer", "scorer"):
            require(name in config.judges, f"judges.{name}", "a judge", None)
        names = [*(reward.name for reward in config.rewards), *config.watch]
        head = getattr(config.judges["scorer"], "quality_head", None)
        require(
            "quality" not in names or head is not None,
            "rewards.quality",
            "judges.scorer.quality_head to name a safetensors file",
            head,
        )
        known = "pixel_accuracy" not in names or config.data.prompts == MINIATURE
        require(known, "watch.pixel_accuracy", f'the prompts it knows, data.prompts "{MINIATURE}"', config.data.prompts)
        conditioned(config.rewards)

    def reader(self, config: Config) -> Callable[[str, str], Reading]:
        """The prompt that a completion makes."""
        form = config.data.form
        return lambda written, prompt: parse_rewrite(written, form, prompt)

    def load(self, setup: Setup) -> World:
        """Prompts, and what draws; the judges come later."""
        config = setup.config
        return World(
            prompts=setup.prompts or _prompts(config),
            rewards=REWARDS,
            default_rewards=DEFAULT_REWARDS,
            render=lambda judges, asked: make_render(judges, config, baselines="baseline_images" in asked),
            conditions=conditioned,
            references=lambda rows: {"unchanged": [row.prompt for row in rows], **oracle_column(rows)},
        )


def conditioned(sections: Sequence[RewardSection]) -> tuple[RewardSection, ...]:
    """The sections with a reward's default condition filled in.

    Raises:
        UserError: A reward that must not be earned alone (quality) has nothing to be conditioned on.
    """
    names = [section.name for section in sections]
    resolved = []
    for section in sections:
        if section.condition_on is None and section.name == "quality":
            condition = default_condition(section.name, names)
            if condition is None:
                raise UserError(
                    "rewards.quality: a pretty picture of something else would earn it; list alignment or "
                    "alignment_gain among the rewards, or say condition_on: none"
                )
            section = dataclasses.replace(section, condition_on=condition[0], threshold=condition[1])
        resolved.append(section)
    return tuple(resolved)


def _prompts(config: Config) -> PromptSet:
    if config.data.prompts != MINIATURE:
        require(bool(config.data.prompts), "data.prompts", "a .jsonl or .txt file, or builtin", config.data.prompts)
        return load_prompts(config.data.prompts, held_out=config.data.held_out)
    world, evaluation = own_package("bridges", "miniature.world"), config.evaluation
    counts = (_TRAINING_PROMPTS, evaluation.validation_prompts or 1, evaluation.prompts or _TEST_PROMPTS)
    return make_prompt_set(*(world.prompts(split, count) for split, count in zip(SPLITS, counts, strict=True)))
