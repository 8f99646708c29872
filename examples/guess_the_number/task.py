"""A game of several turns: the policy guesses a hidden number, and gets the hint higher or lower.

    python -m grpo_jax.train --task examples/guess_the_number/task.py:GuessTheNumber --run_dir runs/guess

The prompt does not contain the number, so the policy must learn the next guess. SFT shows a new policy games that use
one hint in two. By GRPO, with the rewards of each turn and of later turns (algorithm.turn_advantage return), it learns
to use all hints, and to halve the range.
"""

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from grpo_jax import Task, TaskData, TaskRewards, TaskSetup, TurnEnvironment, Vocabulary, make_prompt_set


def hint(guess: str, number: int) -> str | None:
    """Return the hint to a guess; None, which ends the game, for the right number and for other texts."""
    if not guess.isdigit() or int(guess) == number:
        return None
    return "higher" if number > int(guess) else "lower"


def step(rows, episodes):
    """Return a hint to each guess."""
    return [hint(episode.last.completion, row.columns["number"]) for row, episode in zip(rows, episodes, strict=True)]


def found(prompts, completions, *, number, **columns):
    """Return 1 for the number, else 0, in each turn."""
    return [float(text == str(one)) for text, one in zip(completions, number, strict=True)]


class GuessTheNumber(Task):
    """Find a number by guessing."""

    largest: int = 7
    """Largest number; the smallest is 1."""
    lessons: int = 1024
    """Games of SFT."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "policy": {"path": "new", "new": {"width": 48, "heads": 4, "layers": 2, "window": 32}},
        "data": {"max_prompt_tokens": 8},
        "sampling": {"turns": 3, "group_size": 32, "max_new_tokens": 2, "max_observation_tokens": 4},
        "algorithm": {"advantage": "grpo", "turn_advantage": "return"},
        "sft": {"steps": 300, "learning_rate": 2e-3},
        "optimizer": {"learning_rate": 2e-3},
        "training": {"prompts_per_batch": 7, "max_steps": 100},
        "evaluation": {"every": 0},
        "rewards": [{"name": "found"}],
    }

    def load(self, setup: TaskSetup) -> TaskData:
        """Return each number once; training and test share all, because no prompt contains the number."""
        rows = [{"prompt": f"guess 1 to {self.largest}", "number": n} for n in range(1, self.largest + 1)]
        return TaskData(
            make_prompt_set(rows, rows, rows),
            source=f"numbers from 1 to {self.largest}",
            rewards=TaskRewards({"found": found}),
            environment=TurnEnvironment(step),
            vocabulary=Vocabulary(lambda: ["guess", "to", "higher", "lower", *map(str, range(1, self.largest + 1))]),
            pairs=lambda: [self.lesson(setup.config.sampling.turns, random.Random(n)) for n in range(self.lessons)],
        )

    def lesson(self, turns: int, draw: random.Random) -> tuple[str, ...]:
        """Return a game whose guesses are random among all numbers, or among the possible ones."""
        number, said, left = draw.randint(1, self.largest), [], range(1, self.largest + 1)
        for _ in range(turns):
            guess = draw.choice(left if draw.random() < 0.5 else range(1, self.largest + 1))
            answer = hint(str(guess), number)
            said += [str(guess)] if answer is None else [str(guess), answer]
            if answer is None:
                break
            left = [one for one in left if (one > guess if answer == "higher" else one < guess)]
        return (f"guess 1 to {self.largest}", *said[: 2 * turns - 1])
