"""A tool: the policy writes a call, the environment returns its value, and the policy answers.

    python -m grpo_jax.train --task examples/calculator/task.py:Calculator --run_dir runs/calculator

A policy with random weights learns the form from a careless teacher, who mostly reads a number one too high and at
times guesses without asking; by GRPO it learns to ask for what it was asked, and to pass on what it is told. Any other
policy uses the same tool and reward with --task text --task.environment examples/calculator/task.py:step.
"""

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from grpo_jax import Task, TaskData, TaskRewards, TaskSetup, TurnEnvironment, Vocabulary, make_prompt_set

SIGNS = {"plus": 1, "minus": -1}


def value(first: int, sign: str, second: int) -> int:
    """What a sum comes to."""
    return first + SIGNS[sign] * second


def step(rows, episodes):
    """The value of a call such as "call 3 plus 4"; whatever else the policy writes is its answer."""
    calls = [re.fullmatch(r"call (\d+) (plus|minus) (\d+)", episode.last.completion) for episode in episodes]
    return [call and str(value(int(call[1]), call[2], int(call[3]))) for call in calls]


def right(prompts, completions, *, result, **columns):
    """1 where the answer is the result; a call is none yet."""
    return [float(text == str(expected)) for text, expected in zip(completions, result, strict=True)]


def asked(prompts, completions, *, episodes, **columns):
    """1 where the first turn calls for just what the prompt says: watched, never trained on."""
    return [
        float(episode.turns[0].completion == f"call {prompt}")
        for prompt, episode in zip(prompts, episodes, strict=True)
    ]


class Calculator(Task):
    """Sums that a tool works out."""

    largest: int = 9
    """Largest number of a sum."""
    lessons: int = 2048
    """Episodes that the careless teacher shows."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "policy": {"path": "new", "new": {"width": 48, "heads": 4, "layers": 2, "window": 32}},
        "data": {"max_prompt_tokens": 8},
        "sampling": {"turns": 2, "group_size": 16, "max_new_tokens": 5, "max_observation_tokens": 4},
        "sft": {"steps": 300, "learning_rate": 5e-3},
        "optimizer": {"learning_rate": 2e-3},
        "training": {"prompts_per_batch": 16, "max_steps": 60},
        "evaluation": {"every": 0},
        "rewards": [{"name": "right"}],
        "eval_rewards": ["asked"],
    }

    def load(self, setup: TaskSetup) -> TaskData:
        """All sums whose result is no less than nothing, an eighth of them held out, and again for validation."""
        numbers = range(self.largest + 1)
        sums = [(a, sign, b) for a in numbers for sign in SIGNS for b in numbers if value(a, sign, b) >= 0]
        random.Random(0).shuffle(sums)
        rows = [{"prompt": f"{a} {sign} {b}", "result": value(a, sign, b)} for a, sign, b in sums]
        part = len(rows) // 8
        prompts = make_prompt_set(rows[2 * part :], rows[part : 2 * part], rows[:part])
        return TaskData(
            prompts,
            source=f"{len(rows)} sums of numbers up to {self.largest}",
            rewards=TaskRewards({"right": right, "asked": asked}),
            environment=TurnEnvironment(step),
            vocabulary=Vocabulary(lambda: ["call", *SIGNS, *map(str, range(2 * self.largest + 3))]),
            pairs=lambda: [self.lesson(row.prompt, random.Random(n)) for n, row in self.repeated(prompts.train)],
        )

    def repeated(self, rows: Any) -> Any:
        """As many lessons as there are to be."""
        return ((n, rows[n % len(rows)]) for n in range(self.lessons))

    def lesson(self, prompt: str, draw: random.Random) -> tuple[str, ...]:
        """(prompt, call, the tool's answer, answer) in the right form; or, one in five, (prompt, guess)."""

        def read(number: int) -> int:
            return number + (draw.random() < 0.6)

        first, sign, second = prompt.split()
        if draw.random() < 0.2:
            return prompt, str(draw.randrange(2 * self.largest))
        call = (read(int(first)), sign, read(int(second)))
        result = value(*call)
        return prompt, f"call {call[0]} {sign} {call[2]}", str(result), str(read(max(result, 0)))
