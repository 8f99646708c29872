"""The task: rewrite a prompt, see what was drawn of it, and write a better one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.binding import TaskRewards
from grpo_jax.rollout.data import Row, noise_seed
from grpo_jax.tasks.picture_rewards import REWARDS, conditioned
from grpo_jax.tasks.picture_task import MINIATURE, PictureTask, miniature_prompts, picture_prompts
from grpo_jax.tasks.prompt_refinement.answers import INSTRUCTION, Shown, make_respond
from grpo_jax.tasks.rendering import make_render
from grpo_jax.tasks.task import TaskData, TaskReport, TaskSetup, TurnEnvironment, oracle_column

CONTROLS: Mapping[str, Shown] = {"blind": "none", "wrong": "other"}
"""What the policy is shown between two turns where it is measured otherwise than trained, by the measure's ending."""

DEFAULT_REWARDS = (RewardSection("alignment"), RewardSection("length", 0.1))


@dataclass(frozen=True)
class PromptRefinement(PictureTask):
    """Rewrites prompts in several turns: judges.renderer draws each, the policy sees it, and writes a better one.

    All pictures of a prompt are drawn from the same noise.

    Args:
        answer: What is said between two turns; {prompt} stands for the user's. Empty: a request to mend what is wrong.
        shown: What the policy sees between two turns: the picture that was just drawn of its prompt ("drawn"), "none",
            or that of an "other" user's prompt. The last two are controls.
    """

    defaults: ClassVar[Mapping[str, Any]] = {**PictureTask.defaults, "sampling": {"turns": 2}}
    default_config: ClassVar[str | None] = "prompt_refinement_miniature"

    answer: str = ""
    shown: Shown = "drawn"

    def check(self, config: Config) -> None:
        """Refuses what no picture task has, and a single turn."""
        super().check(config)
        require(
            config.sampling.turns >= 2, "sampling.turns", "at least 2, to mend what was drawn", config.sampling.turns
        )
        require(config.data.form == "rewrite", "data.form", "'rewrite'", config.data.form)

    def count_pictures(self, config: Config) -> tuple[int, int]:
        """The one that was drawn, between two turns."""
        return 0, int(self.shown != "none")

    def load(self, setup: TaskSetup) -> TaskData:
        """Prompts, what draws, and what is said between two turns; the judges come later."""
        config, instruction = setup.config, self.answer or INSTRUCTION

        def references(rows: Sequence[Row]) -> dict[str, list[str]]:
            return {"unchanged": [row.prompt for row in rows], **_oracle(rows, config)}

        return TaskData(
            prompts=setup.prompts
            or picture_prompts(config, {MINIATURE: miniature_prompts}, "a .jsonl or .txt file, or builtin"),
            rewards=TaskRewards(REWARDS, defaults=DEFAULT_REWARDS, conditions=conditioned),
            render=lambda judges, asked: make_render(judges, config, baselines="baseline_images" in asked),
            environment=TurnEnvironment(
                make_respond(instruction, self.shown),
                {name: make_respond(instruction, shown) for name, shown in CONTROLS.items() if shown != self.shown},
                shows_pictures=True,
            ),
            report=TaskReport(references),
        )


def _oracle(rows: Sequence[Row], config: Config) -> dict[str, list[str]]:
    """The best text for each row; a renderer that does not draw what it is told says itself what that is."""
    known = getattr(config.judges["renderer"], "oracle", None)
    if known is None or any("requested" not in row.columns for row in rows):
        return oracle_column(rows)
    seeds = [noise_seed(config.seed, 0, row.id, evaluation=True) for row in rows]
    return {"oracle": [known(row.columns["requested"], seed) for row, seed in zip(rows, seeds, strict=True)]}
