"""CartPole: keep a pole upright, entirely in JAX. A bug in an algorithm shows within seconds.

A run has sections of its own: `python -m grpo_jax.train --task cartpole --help all` prints them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from pydantic import Field

from grpo_jax.config.fields import WIDTH, Count, Length, Positive, PositiveCount, Section, Share, resume_mutable
from grpo_jax.config.run import BaseConfig
from grpo_jax.tasks.task import Blocks, Chart, Curve, Display, Task, TaskSetup


class CartPoleAlgorithm(Section):
    """Advantages and loss."""

    name: Literal["grpo", "gdpo", "ppo"] = "grpo"
    """"grpo" normalises the returns of the summed rewards in their group, "gdpo" those of each reward; "ppo" has a
    value network and plays on 32 carts in parallel."""
    objectives: list[Literal["upright", "centred"]] = ["upright"]
    """Rewards of a step: "upright" (1 for each step) and "centred" (near the middle)."""
    weights: list[float] = []
    """Weight of each reward; empty for ones."""
    condition: Count = 0
    """Count "centred" only in episodes that stay upright for at least this many steps; 0 for always."""
    group_size: Annotated[Length, Ge(2)] = 16
    """Episodes per group (G), up to 500 steps each; unused with ppo."""
    gamma: Share = 0.994
    """Discount γ of the returns."""
    epochs: PositiveCount = 10
    """Passes over one iteration's steps."""

    def __post_init__(self) -> None:
        unique = len(set(self.objectives)) == len(self.objectives)
        self.require(bool(self.objectives) and unique, "objectives", "one or more, each once")
        fits = len(self.weights) in (0, len(self.objectives))
        self.require(fits, "weights", f"none or {len(self.objectives)} numbers")
        conditioned = set(self.objectives) == {"upright", "centred"} and self.name != "ppo"
        self.require(conditioned or not self.condition, "condition", "0 without both objectives or with ppo")


class CartPoleOptimizer(Section):
    """Adam; with ppo its learning rate falls to 0 over the run."""

    learning_rate: Positive = 3e-4
    """Peak learning rate."""


class CartPoleTraining(Section):
    """The training loop."""

    iterations: PositiveCount = resume_mutable(100)
    """Iterations in all."""
    save_every: Count = resume_mutable(0)
    """Iterations between checkpoints, of which the last two are kept; 0 for a checkpoint at the end only."""
    keep_checkpoints: ClassVar[int] = 2
    max_hours: ClassVar[float] = 0.0


class CartPoleEvaluation(Section):
    """Measurement on 100 fresh starts with the likelier action."""

    every: PositiveCount = 10
    """Iterations between measurements; as many are compiled into one block."""


class CartPoleConfig(BaseConfig):
    """Seeds, folder and other settings of the whole run."""

    seed: Count = 0
    """First seed; seed, seed + 1, … are trained."""
    num_seeds: Annotated[int, Ge(1), Le(WIDTH)] = 1
    """Number of seeds, trained in parallel."""
    algorithm: CartPoleAlgorithm = Field(default_factory=CartPoleAlgorithm)
    optimizer: CartPoleOptimizer = Field(default_factory=CartPoleOptimizer)
    training: CartPoleTraining = Field(default_factory=CartPoleTraining)
    evaluation: CartPoleEvaluation = Field(default_factory=CartPoleEvaluation)

    def __post_init__(self) -> None:
        """Check fields of different sections."""
        every = self.evaluation.every
        for name in ("iterations", "save_every"):
            fits = getattr(self.training, name) % every == 0
            self.require(fits, f"training.{name}", f"a multiple of evaluation.every = {every}")


class CartPole(Task):
    """CartPole-v1, several seeds at once."""

    config: ClassVar[type] = CartPoleConfig
    default_config: ClassVar[str | None] = "cartpole_grpo"
    display: ClassVar[Display] = Display(
        live=(("episode_return", "return"), ("evaluation/episode_return", "evaluated"), ("solved", "solved")),
        charts=(
            Chart(
                "Episode return, mean over the seeds; 500 is the longest",
                (Curve("episode_return", "sampled"), Curve("evaluation/episode_return", "greedy", sparse=True)),
            ),
        ),
    )

    def load(self, setup: TaskSetup) -> Blocks:
        """Compile all seeds into one function."""
        from grpo_jax.tasks.cartpole.program import make_blocks  # starts JAX

        return make_blocks(setup.config, setup.info)
