"""Settings of a training on CartPole, and the constants that they refer to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_jax.config.fields import require

MAX_STEPS = 500
"""Steps of the longest episode."""
OBJECTIVES = ("upright", "centred")
_MOST_ITERATIONS = 100_000  # environment steps are counted in 32 bits


@dataclass(frozen=True)
class Settings:
    """Settings of a training; `SETTINGS` has those of each algorithm."""

    # "grpo" normalises the returns of the summed rewards in their group, "gdpo" those of each reward; "ppo" has a value
    # network and plays on 32 carts in parallel
    algorithm: Literal["grpo", "gdpo", "ppo"] = "grpo"
    objectives: tuple[str, ...] = ("upright",)  # rewards of a step: "upright" is 1, "centred" is largest in the middle
    weights: tuple[float, ...] = ()  # weight of each reward; empty for ones
    condition: int = 0  # count "centred" only in episodes of at least this many steps; 0 for always
    learning_rate: float = 3e-4  # Adam's; with ppo it falls to 0 over `iterations`
    gamma: float = 0.994  # discount γ of the returns
    iterations: int = 120
    group_size: int = 16  # episodes per group (G), up to 500 steps each; unused with ppo
    epochs: int = 10  # passes over one iteration's steps

    def __post_init__(self) -> None:
        """Raise UserError for settings that do not fit together."""
        names, count, iterations = self.objectives, len(self.objectives), self.iterations
        require(self.algorithm in ("grpo", "gdpo", "ppo"), "algorithm", "grpo, gdpo or ppo", self.algorithm)
        require(self.group_size > 1, "group_size", "at least 2 episodes to compare", self.group_size)
        require(self.epochs > 0, "epochs", "at least 1 pass", self.epochs)
        known = bool(names) and set(names) <= set(OBJECTIVES) and len(set(names)) == count
        require(known, "objectives", f"one or more of {', '.join(OBJECTIVES)}, each once", ",".join(names))
        require(len(self.weights) in (0, count), "weights", f"none or {count} numbers", self.weights)
        conditioned = count > 1 and self.algorithm != "ppo"
        limit, when = (MAX_STEPS, "") if conditioned else (0, ", for it takes both objectives, with grpo or gdpo")
        require(0 <= self.condition <= limit, "condition", f"a number in [0, {limit}]{when}", self.condition)
        require(1 <= iterations <= _MOST_ITERATIONS, "iterations", f"1 to {_MOST_ITERATIONS:,}", iterations)


SETTINGS = {
    "grpo": Settings(),
    "gdpo": Settings("gdpo", OBJECTIVES, learning_rate=1e-3),
    "ppo": Settings("ppo", learning_rate=3e-3, gamma=0.99, iterations=50),
}
"""Tuned settings of each algorithm. Those of grpo are its CartPole reference's."""
