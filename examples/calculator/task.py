"""A tool: the policy writes a call, the environment returns its value, and the policy answers.

    python -m grpo_jax.train --task examples/calculator/task.py:Calculator --run_dir runs/calculator

SFT teaches a new policy the form of a call, with mostly wrong numbers and some guesses without a call. By GRPO the
policy learns to call for the numbers of the prompt, and to answer with the tool's value. Any other policy can use the
same tool and reward with --task text --task.environment examples/calculator/task.py:step.
"""

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from grpo_jax import Task, TaskData, TaskRewards, TaskSetup, TurnEnvironment, Vocabulary, make_prompt_set

SIGNS = {"plus": 1, "minus": -1}


def value(first: int, sign: str, second: int) -> int:
    """Return the value of a sum."""
    return first + SIGNS[sign] * second


def step(rows, episodes):
    """Return the value of a call such as "call 3 plus 4"; any other text is the answer."""
    calls = [re.fullmatch(r"call (\d+) (plus|minus) (\d+)", episode.last.completion) for episode in episodes]
    return [call and str(value(int(call[1]), call[2], int(call[3]))) for call in calls]


def right(prompts, completions, *, result, **columns):
    """Return 1 if the answer is the result; a call is not an answer."""
    return [float(text == str(expected)) for text, expected in zip(completions, result, strict=True)]


def asked(prompts, completions, *, episodes, **columns):
    """Return 1 if the first turn calls for the prompt's sum; measured, never trained on."""
    return [
        float(episode.turns[0].completion == f"call {prompt}")
        for prompt, episode in zip(prompts, episodes, strict=True)
    ]


class Calculator(Task):
    """Compute sums with a tool."""

    largest: int = 9
    """Largest number of a sum."""
    lessons: int = 2048
    """Episodes of SFT."""

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
        """Return all sums with a result of at least 0; an eighth are for testing, an eighth for validation."""
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
        """Repeat the sums for the number of lessons."""
        return ((n, rows[n % len(rows)]) for n in range(self.lessons))

    def lesson(self, prompt: str, draw: random.Random) -> tuple[str, ...]:
        """Return (prompt, call, the tool's answer, answer) in the right form; or, one in five, (prompt, guess)."""

        def read(number: int) -> int:
            return number + (draw.random() < 0.6)

        first, sign, second = prompt.split()
        if draw.random() < 0.2:
            return prompt, str(draw.randrange(2 * self.largest))
        call = (read(int(first)), sign, read(int(second)))
        result = value(*call)
        return prompt, f"call {call[0]} {sign} {call[2]}", str(result), str(read(max(result, 0)))
