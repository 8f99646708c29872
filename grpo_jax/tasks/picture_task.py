"""What tasks have in common whose texts are drawn: judges, how a completion is read, what is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.rollout.texts import Reading
from grpo_jax.tasks.display import Chart, Curve, Display
from grpo_jax.tasks.picture_rewards import conditioned
from grpo_jax.tasks.rewriting import parse_rewrite
from grpo_jax.tasks.task import Task

MINIATURE = "miniature"
"""As data.prompts: those of the small world that ships with the package."""
TRAINING_PROMPTS, TEST_PROMPTS = 2048, 256


@dataclass(frozen=True)
class PictureTask(Task):
    """Prompts for a text-to-image model: judges.renderer draws them, judges.scorer compares them."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "judges": {"renderer": {"kind": "stable_diffusion_3"}, "scorer": {"kind": "open_clip"}},
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


def split_counts(config: Config) -> tuple[int, int, int]:
    """How many of the miniature's prompts each split has."""
    evaluation = config.evaluation
    return TRAINING_PROMPTS, evaluation.validation_prompts or 1, evaluation.prompts or TEST_PROMPTS
