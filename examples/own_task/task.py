"""A whole task of your own: reach a number from three others, such as "7 from 2 3 4" → "3 plus 4".

    python -m grpo_jax.train --task examples/own_task/task.py:Countdown --run_dir runs/countdown

SFT teaches a new policy the form of answers, and GRPO the right ones. The task has two rewards with a judge, an eval
reward, and a table in the report.
"""

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from grpo_jax import (
    Findings,
    Judge,
    Table,
    Task,
    TaskData,
    TaskReport,
    TaskRewards,
    TaskSetup,
    Vocabulary,
    make_prompt_set,
)
from grpo_jax.config.fields import require

SIGNS = ("plus", "minus")


class Calculator(Judge):
    """Read answers. Rewards get the result of `load` as an argument."""

    strict: bool = True
    """Whether an answer may use each number only as often as it was given."""

    def load(self, device: str) -> "Calculator":
        """Return the judge itself, which needs no model."""
        return self

    def value(self, answer: str, numbers: list[int]) -> float | None:
        """Return the value of an answer; None if it is invalid."""
        if not re.fullmatch(r"\d+( (plus|minus) \d+)+", answer):
            return None
        used = [int(number) for number in re.findall(r"\d+", answer)]
        if self.strict and any(used.count(number) > numbers.count(number) for number in used):
            return None
        signs = [1, *(1 if sign == "plus" else -1 for sign in re.findall("plus|minus", answer))]
        return float(sum(sign * number for sign, number in zip(signs, used, strict=True)))


def right(prompts, completions, *, numbers, goal, calculator, **columns):
    """Return 1 if the answer reaches the goal."""
    return [float(calculator.value(text, n) == g) for text, n, g in zip(completions, numbers, goal, strict=True)]


def readable(prompts, completions, *, numbers, calculator, **columns):
    """Return 1 if the answer is valid."""
    return [float(calculator.value(text, n) is not None) for text, n in zip(completions, numbers, strict=True)]


def distance(prompts, completions, *, numbers, goal, calculator, **columns):
    """Return the distance of a valid answer from the goal; None (missing) for others."""
    values = [calculator.value(text, n) for text, n in zip(completions, numbers, strict=True)]
    return [None if value is None else abs(value - g) for value, g in zip(values, goal, strict=True)]


class Countdown(Task):
    """Reach a number by adding and subtracting others."""

    largest: int = 9
    """Largest number of a puzzle."""
    puzzles: int = 512
    """Number of training puzzles; testing and validation have an eighth as many each."""
    puzzle_seed: int = 0
    """Seed of the puzzles, besides the run's seed."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "judges": {"calculator": {"kind": f"{__file__}:Calculator"}},
        "policy": {"path": "new", "new": {"width": 64, "heads": 4, "layers": 2, "window": 32}},
        "sft": {"steps": 200, "learning_rate": 3e-3},
        "sampling": {"group_size": 16, "max_new_tokens": 6},
        "data": {"max_prompt_tokens": 16},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"prompts_per_batch": 16, "max_steps": 100},
        "eval_rewards": ["distance"],
        "rewards": [{"name": "right"}, {"name": "readable", "weight": 0.2}],
    }

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(self.largest >= 3, "largest", "a number >= 3", self.largest)
        require(self.puzzles >= 16, "puzzles", "a number >= 16", self.puzzles)

    def load(self, setup: TaskSetup) -> TaskData:
        """Make the puzzles."""
        draw = random.Random(self.puzzle_seed)
        held_out = self.puzzles // 8
        rows = list({(row := self.puzzle(draw))["prompt"]: row for _ in range(4 * self.puzzles)}.values())
        test, validation, train = rows[:held_out], rows[held_out : 2 * held_out], rows[2 * held_out :][: self.puzzles]
        prompts = make_prompt_set(train, validation, test)
        return TaskData(
            prompts,
            source=f"{len(train) + 2 * held_out} puzzles of numbers up to {self.largest}",
            rewards=TaskRewards({"right": right, "readable": readable, "distance": distance}),
            vocabulary=Vocabulary(lambda: ["from", *SIGNS, *map(str, range(3 * self.largest + 1))]),
            pairs=lambda: [(row.prompt, row.columns["form"]) for row in prompts.train],
            report=TaskReport(
                remember=lambda name, judged: {name: judged["greedy"].final_rewards[:, 0, 0].tolist()},
                findings=self.by_length,
            ),
            identity={"puzzles": f"{self.puzzles} of {self.largest}, {self.puzzle_seed}"},
        )

    def puzzle(self, draw: random.Random) -> dict[str, Any]:
        """Return a goal that some of three numbers reach, and an answer of the right form that is mostly wrong."""
        while True:
            numbers = draw.sample(range(1, self.largest + 1), 3)
            length = draw.choice((2, 3))
            answer, form = (
                self.written(draw.sample(numbers, length), [draw.choice(SIGNS) for _ in range(length - 1)])
                for _ in range(2)
            )
            goal = Calculator().value(answer, numbers)
            if goal is not None and goal >= 0:
                text = f"{int(goal)} from {numbers[0]} {numbers[1]} {numbers[2]}"
                return {"prompt": text, "numbers": numbers, "goal": goal, "oracle": answer, "form": form}

    @staticmethod
    def written(numbers: list[int], signs: list[str]) -> str:
        """Return numbers with signs between them."""
        rest = (f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True))
        return f"{numbers[0]}{''.join(rest)}"

    @staticmethod
    def by_length(remembered: Mapping[str, Any], rows: Any) -> Findings:
        """Return a table of right answers, before and after, by the number of needed numbers."""
        lengths = [len(row.columns["oracle"].split()) // 2 + 1 for row in rows]
        lines = []
        for length in sorted(set(lengths)):
            chosen = [index for index, one in enumerate(lengths) if one == length]
            shares = [sum(values[index] for index in chosen) / len(chosen) for values in remembered.values()]
            lines.append((f"{length} numbers", len(chosen), *shares))
        return Findings([Table("Right answers by length", ("answer", "puzzles", *remembered), lines)])
