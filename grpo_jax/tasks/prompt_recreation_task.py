"""The task: see a picture, and write the prompt that makes a diffusion model draw it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import PromptSet, Row
from grpo_jax.rollout.pictures import read_rgb, size_of
from grpo_jax.tasks.pictures import MINIATURE, PictureTask, picture_data, picture_prompts
from grpo_jax.tasks.pictures import REWARDS as PICTURE_REWARDS
from grpo_jax.tasks.task import TaskData, TaskSetup

if TYPE_CHECKING:
    from torch import Tensor

    from bridges.clip import ImageEncoder


def similarity(
    prompts: list[str],
    completions: list[str],
    *,
    images: Tensor,
    target: list[object],
    scorer: ImageEncoder,
    **columns: object,
) -> Tensor:
    """Likeness of the drawn picture to the row's own for the scorer: a cosine in [-1, 1]."""
    return scorer.image_image(images, tensors_of(target))


def tensors_of(sources: Sequence[object]) -> list[Tensor]:
    """Return pictures of rows as torch float [3, H, W] in [0, 1]; one that is repeated is the same tensor."""
    import torch

    tensors: dict[int, Tensor] = {}
    for source in sources:
        if id(source) not in tensors:
            array = np.asarray(read_rgb(source), np.float32) / 255
            tensors[id(source)] = torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1)))
    return [tensors[id(source)] for source in sources]


REWARDS = {
    "similarity": similarity,
    **{name: PICTURE_REWARDS[name] for name in ("length", "quality", "pixel_accuracy")},
}
"""Rewards by their name in a config."""

DEFAULT_REWARDS = (RewardSection("similarity"), RewardSection("length", 0.1))

_GREY = 128


@dataclass(frozen=True)
class PromptRecreation(PictureTask):
    """Draws a picture again: judges.renderer draws the prompts, judges.scorer compares pictures.

    Args:
        pictures: What the policy sees of a row: the picture that is to be drawn again ("shown"), a grey one of its size
            ("hidden"), or another row's ("shuffled"). The last two are controls: nothing can be learned from them.
    """

    default_config: ClassVar[str | None] = "prompt_recreation_miniature"

    pictures: Literal["shown", "hidden", "shuffled"] = "shown"

    def check(self, config: Config) -> None:
        """Refuse settings that no picture task has, and a policy that would continue a prompt."""
        super().check(config)
        require(config.data.form == "rewrite", "data.form", "'rewrite', the prompt is a picture", config.data.form)

    def count_pictures(self, config: Config) -> tuple[int, int]:
        """Count one picture: the one to be drawn again."""
        return 1, 0

    def load(self, setup: TaskSetup) -> TaskData:
        """Load the pictures and the renderer."""
        config = setup.config
        rows = setup.prompts or picture_prompts(config, {MINIATURE: _example_pictures}, "a .jsonl or .parquet file")
        prompts = PromptSet(*(seen(part, self.pictures) for part in rows))
        return picture_data(config, prompts, REWARDS, DEFAULT_REWARDS)


def seen(rows: Sequence[Row], pictures: str) -> tuple[Row, ...]:
    """Return the rows as the policy gets them, each row's one picture to be drawn in the column "target"."""
    for row in rows:
        if len(row.pictures) != 1:
            raise UserError(f"row {row.id}: expected one picture, which is to be drawn again, got {len(row.pictures)}")
    row_pictures = [row.pictures for row in rows]
    if pictures == "hidden":
        row_pictures = [(_grey(row),) for row in rows]
    elif pictures == "shuffled":
        row_pictures = [*row_pictures[1:], *row_pictures[:1]]
    return tuple(
        dataclasses.replace(row, pictures=picture, columns={**row.columns, "target": row.pictures[0]})
        for row, picture in zip(rows, row_pictures, strict=True)
    )


def _grey(row: Row) -> np.ndarray:
    try:
        height, width = size_of(row.pictures[0])
    except ValueError as error:
        raise UserError(f"row {row.id}: {error}") from error
    return np.full((height, width, 3), _GREY, np.uint8)


def _example_pictures(split: str, count: int) -> list[dict[str, Any]]:
    return own_package("bridges", "miniature.world").pictures(split, count)
