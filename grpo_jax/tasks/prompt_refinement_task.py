"""The task: rewrite a prompt, see its picture, and write a better one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.data import Row, noise_seed
from grpo_jax.rollout.env import Env, Episode, Observation
from grpo_jax.tasks.pictures import PictureTask, picture_data, picture_prompts
from grpo_jax.tasks.task import TaskData, TaskReport, TaskSetup, TurnEnvironment, oracle_column

Shown = Literal["drawn", "none", "other"]

INSTRUCTION = (
    "This picture was drawn from your prompt. What the user asked for: {prompt}\n"
    "Write a better prompt that fixes what is wrong. Answer with the prompt alone."
)

CONTROLS: Mapping[str, Shown] = {"blind": "none", "wrong": "other"}
"""Controls, by the ending of their measures: pictures shown between two turns in place of the trained ones."""

DEFAULT_REWARDS = (RewardSection(name="alignment"), RewardSection(name="length", weight=0.1))


class PromptRefinement(PictureTask):
    """Rewrite prompts in several turns: judges.renderer draws each, the policy sees it, and writes a better one.

    All pictures of a prompt are drawn from the same noise.
    """

    defaults: ClassVar[Mapping[str, Any]] = {**PictureTask.defaults, "sampling": {"turns": 2}}
    default_config: ClassVar[str | None] = "prompt_refinement_miniature"

    observation: str = ""
    """Message between two turns, with {prompt} for the user's prompt; empty for a request to fix the mistakes."""
    shown: Shown = "drawn"
    """Picture between two turns: the one of the policy's prompt ("drawn"), "none", or one of an "other" user's prompt.
    The last two are controls."""

    def check(self, config: Config) -> None:
        """Refuse settings without effect in picture tasks, and a single turn."""
        super().check(config)
        require(config.sampling.turns >= 2, "sampling.turns", "at least 2, to see its picture", config.sampling.turns)
        require(config.data.form == "rewrite", "data.form", "'rewrite'", config.data.form)

    def load(self, setup: TaskSetup) -> TaskData:
        """Load the prompts, the renderer and the observation between two turns."""
        config = setup.config
        instruction = self.observation or INSTRUCTION
        prompts = setup.prompts or picture_prompts(config)
        controls = {name: make_step(instruction, shown) for name, shown in CONTROLS.items() if shown != self.shown}
        return replace(
            picture_data(config, prompts, DEFAULT_REWARDS),
            learn=None,  # the pictures of its turns are not told apart
            environment=TurnEnvironment(make_step(instruction, self.shown), controls, shows_pictures=True),
            report=TaskReport(lambda rows: {"unchanged": [row.prompt for row in rows], **_oracle(rows, config)}),
        )


def make_step(instruction: str, shown: Shown) -> Env:
    """Return step(rows, episodes) → the latest picture and the instruction, with the prompt for "{prompt}".

    `shown` selects the picture "drawn" last, "none", or that of an "other" prompt (`others`).
    """

    def step(rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Observation]:
        pictures = [None if shown == "none" else episode.last.image for episode in episodes]
        if shown == "other":
            pictures = others(rows, pictures)
        return [
            Observation(instruction.replace("{prompt}", row.prompt), () if picture is None else (picture,))
            for row, picture in zip(rows, pictures, strict=True)
        ]

    return step


def others(rows: Sequence[Row], pictures: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Return for each row the picture of the next row with another prompt, cyclically; None if there is none."""
    following = []
    for index, row in enumerate(rows):
        after = (other % len(rows) for other in range(index + 1, index + len(rows)))
        following.append(next((pictures[i] for i in after if rows[i].id != row.id and pictures[i] is not None), None))
    return following


def _oracle(rows: Sequence[Row], config: Config) -> dict[str, list[str]]:
    """Return the best text for each row; a renderer that changes pictures converts that text."""
    oracle = getattr(config.judges["renderer"], "oracle", None)
    best = oracle_column(rows)
    if oracle is None or not best:
        return best
    seeds = [noise_seed(config.seed, 0, row.id, evaluation=True) for row in rows]
    return {"oracle": [oracle(text, seed) for text, seed in zip(best["oracle"], seeds, strict=True)]}
