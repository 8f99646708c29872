"""Answers as JSON from a start that writes them: the miniature's own careless lessons, told again in the form.

    python benchmarks/miniature.py --variants json json_shuffled

The lessons are those of `scripts/miniature/train_policy.py`: of a casual word the right meaning in three cases of ten.
The steps are drawn at random, so that nothing about them is taught.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import numpy as np

from grpo_jax import TaskData, TaskSetup
from grpo_jax.tasks.prompt_enhancement_task import PromptEnhancement
from scripts.miniature.train_policy import make_lesson


@dataclass(frozen=True)
class JsonLessons(PromptEnhancement):
    """Prompt enhancement with `task.answer: json` and `task.steps`, and pairs for a warm start.

    Args:
        lessons: How many pairs.
    """

    lessons: int = 8192

    def load(self, setup: TaskSetup) -> TaskData:
        """Add the lessons to what the task has."""
        return dataclasses.replace(super().load(setup), pairs=self._pairs)

    def _pairs(self) -> list[tuple[str, str]]:
        rng = np.random.default_rng(0)
        lesson, pairs = make_lesson(rng), []
        for _ in range(self.lessons):
            prompt, caption = lesson()
            pairs.append(
                (prompt, json.dumps({"prompt": caption, "steps": int(rng.integers(*self.steps, endpoint=True))}))
            )
        return pairs
