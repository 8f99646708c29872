"""The task: rewrite people's prompts so that a diffusion model draws the requested picture."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any, ClassVar

from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.prompts import load_prompts
from grpo_jax.tasks.pictures import PictureTask, picture_data, picture_prompts
from grpo_jax.tasks.task import TaskData, TaskReport, TaskSetup, oracle_column

COMPOSITIONAL = "compositional"
"""Value of data.prompts: objects, counts, colours and places, with questions for a judge that sees."""
BOTH = "builtin+compositional"
"""Value of data.prompts: those that ship with the package, and as many compositional ones, in turn."""
DEFAULT_REWARDS = (
    RewardSection(name="alignment"),
    RewardSection(name="faithfulness", weight=0.5),
    RewardSection(name="length", weight=0.2),
)


class PromptEnhancement(PictureTask):
    """Rewrite prompts for a text-to-image model; judges.renderer draws them, judges.scorer scores the pictures."""

    default_config: ClassVar[str | None] = "prompt_enhancement_miniature"

    def load(self, setup: TaskSetup) -> TaskData:
        """Load the prompts and the renderer."""
        config = setup.config
        makers = {COMPOSITIONAL: compositional_records, BOTH: partial(_both_records, config.data.held_out)}
        prompts = setup.prompts or picture_prompts(config, makers)
        return replace(
            picture_data(config, prompts, DEFAULT_REWARDS),
            report=TaskReport(lambda rows: {"unchanged": [row.prompt for row in rows], **oracle_column(rows)}),
        )


def _both_records(held_out: float, split: str, count: int) -> list[dict[str, Any]]:
    """Alternate built-in and compositional prompts, so that any number of them has half from each list."""
    rows = getattr(load_prompts("builtin", held_out=held_out), split)
    made = compositional_records(split, len(rows))
    # All rows have all columns: a reward is called with those of a chunk.
    plain = [dict.fromkeys(made[0]) | {"prompt": row.prompt, **row.columns} for row in rows]
    return [record for pair in zip(plain, made, strict=True) for record in pair]


def compositional_records(split: str, count: int) -> list[dict[str, Any]]:
    """Return fixed records with `prompt`, `questions` (a list of strings) and `kind`, alternating between kinds.

    They have GenEval's `tag`, `include` and `exclude` too, of which three in four are not None. They come from
    `scripts/compositional.py`, divided into "train", "validation" and "test".
    """
    lines = gzip.decompress(resources.files("grpo_jax.tasks").joinpath("compositional_prompts.jsonl.gz").read_bytes())
    records = [record for line in lines.splitlines() if (record := json.loads(line)).pop("split") == split]
    return records[:count]
