"""CartPole: keep a pole upright, entirely in JAX; where a mistake in an algorithm shows within seconds.

A run has sections of its own: `python -m grpo_jax.train --task cartpole --help all` prints them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, Lt
from pydantic import Field

from grpo_jax.config.fields import (
    WIDTH,
    Count,
    Each,
    Length,
    NonNegative,
    Positive,
    PositiveCount,
    Section,
    Share,
    require,
    resume_mutable,
)
from grpo_jax.config.run import TASKS
from grpo_jax.tasks.display import Chart, Curve, Display
from grpo_jax.tasks.task import Program, Say, Task


class CartPoleAlgorithm(Section):
    """Advantages and loss."""

    name: Literal["grpo", "gdpo", "ppo"] = "grpo"
    """"grpo" normalises the returns of the summed objectives in their group, "gdpo" those of each objective; "ppo" has
    a value network instead."""
    objectives: list[Literal["upright", "centred"]] = ["upright"]
    """What a step is rewarded for: "upright" (1 for each step) and "centred" (near the middle)."""
    weights: list[float] = []
    """Weight of each objective; empty for ones."""
    width: Positive = 0.5
    """Distance from the middle at which "centred" gives nothing any more."""
    condition: Count = 0
    """Count "centred" only in episodes that stay upright for at least this many steps; 0 for always."""
    gamma: Share = 0.994
    """Discount γ of the returns."""
    gae_lambda: Share = 0.95
    """λ of PPO's advantages (GAE)."""
    clip_low: Annotated[Positive, Le(1)] = 0.2
    """Lower clip bound of the policy ratio."""
    clip_high: Positive = 0.2
    """Upper clip bound of the policy ratio."""
    kl_coef: NonNegative = 0.01
    """Weight of the KL term (k3) against the reference, which is the policy at the iteration's start."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    value_coef: NonNegative = 0.5
    """Weight of PPO's value loss."""
    value_clip: Positive | None = None
    """How far PPO's values may move in one iteration; null for any."""
    epochs: PositiveCount = 10
    """Passes over one iteration's steps."""
    minibatches: PositiveCount = 1
    """Updates per pass (PPO; GRPO and GDPO update once per pass)."""

    def __post_init__(self) -> None:
        unique = len(set(self.objectives)) == len(self.objectives)
        require(bool(self.objectives) and unique, "objectives", "one or more, each once", self.objectives)
        fits = len(self.weights) in (0, len(self.objectives)) and all(map(math.isfinite, self.weights))
        require(fits, "weights", f"none or {len(self.objectives)} finite numbers", self.weights)
        both = set(self.objectives) == {"upright", "centred"}
        require(both or not self.condition, "condition", "0 without both objectives", self.condition)
        grouped = self.name != "ppo"
        require(not (grouped and self.minibatches > 1), "minibatches", "1 but with ppo", self.minibatches)
        require(grouped or not self.kl_coef, "kl_coef", "0 with ppo", self.kl_coef)
        require(grouped or not self.condition, "condition", "0 with ppo", self.condition)


class CartPoleRollout(Section):
    """What one iteration plays."""

    groups: Length = 1
    """Starts (P) of one iteration; with ppo unused."""
    group_size: Annotated[Length, Ge(2)] = 16
    """Episodes from each start (G), up to 500 steps each; with ppo unused."""
    environments: Length = 32
    """Carts that ppo plays on side by side."""
    steps: Length = 128
    """Steps of each of them per iteration."""


class CartPoleNetwork(Section):
    """The policy's perceptron; ppo's value network is another one of the same shape."""

    hidden: list[int] = [64]
    """Width of each hidden layer."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Between the layers."""

    def __post_init__(self) -> None:
        fits = all(1 <= width <= 2**16 for width in self.hidden) and len(self.hidden) <= 64
        require(fits, "network.hidden", "up to 64 widths from 1 to 65536", self.hidden)


class CartPoleOptimizer(Section):
    """Adam and its schedule."""

    learning_rate: Positive = 3e-4
    """Peak learning rate."""
    schedule: Literal["constant", "linear"] = "constant"
    """Learning rate over the run."""
    beta1: Annotated[NonNegative, Lt(1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[NonNegative, Lt(1)] = 0.999
    """Decay of the second moment."""
    max_grad_norm: NonNegative = 0.5
    """Gradients are scaled down to this global norm; 0 for never."""


class CartPoleTraining(Section):
    """The loop."""

    iterations: PositiveCount = resume_mutable(100)
    """Iterations in all."""
    save_every: Count = resume_mutable(0)
    """Iterations between checkpoints; 0 for the end only."""
    keep_checkpoints: PositiveCount = resume_mutable(2)
    """Checkpoints kept beside final."""
    max_hours: NonNegative = resume_mutable(0.0)
    """Hours after which this process saves and stops behind a measured block, for --resume to go on; 0 for never."""


class CartPoleEvaluation(Section):
    """Measurement on fresh starts with the likelier action."""

    episodes: Length = 100
    """Episodes of one measurement."""
    every: PositiveCount = 10
    """Iterations between measurements, which are also the compiled block between two looks from outside."""
    solved: Annotated[Positive, Le(500)] = 475.0
    """Mean return from which CartPole counts as solved."""


class CartPoleConfig(Section):
    """A CartPole run of grpo_jax, entirely in JAX."""

    task: Annotated[Any, TASKS]
    """This task."""
    seed: Count = 0
    """Seed of everything random; seeds seed, seed + 1, … are trained."""
    num_seeds: Annotated[int, Ge(1), Le(WIDTH)] = 1
    """How many seeds are trained side by side."""
    run_dir: str | None = resume_mutable(None)
    """Folder of the run; null makes runs/TASK-TIME."""
    resume: bool = resume_mutable(False)
    """Continue the run in run_dir from its last checkpoint."""
    debug: bool = resume_mutable(False)
    """Show tracebacks of user errors."""
    report_to: Annotated[list[Literal["tensorboard", "wandb"]], Each] = resume_mutable(["tensorboard"])
    """Metric writers beside metrics.jsonl (docs/runs.md)."""
    algorithm: CartPoleAlgorithm = Field(default_factory=CartPoleAlgorithm)
    """Advantages and loss."""
    rollout: CartPoleRollout = Field(default_factory=CartPoleRollout)
    """What one iteration plays."""
    network: CartPoleNetwork = Field(default_factory=CartPoleNetwork)
    """The policy."""
    optimizer: CartPoleOptimizer = Field(default_factory=CartPoleOptimizer)
    """Adam and its schedule."""
    training: CartPoleTraining = Field(default_factory=CartPoleTraining)
    """The loop."""
    evaluation: CartPoleEvaluation = Field(default_factory=CartPoleEvaluation)
    """Measurement."""

    def __post_init__(self) -> None:
        """Refuse what no section can refuse alone."""
        every = self.evaluation.every
        for name in ("iterations", "save_every"):
            value = getattr(self.training, name)
            require(value % every == 0, f"training.{name}", f"a multiple of evaluation.every = {every}", value)
        minibatches = self.algorithm.minibatches
        steps = self.rollout.steps
        divides = self.algorithm.name != "ppo" or steps % minibatches == 0
        require(divides, "algorithm.minibatches", f"a divisor of rollout.steps = {steps}", minibatches)


class CartPole(Task):
    """CartPole-v1, several seeds at once."""

    config: ClassVar[type] = CartPoleConfig
    default_config: ClassVar[str | None] = "cartpole_grpo"
    display: ClassVar[Display] = Display(
        live=(("episode_return", "return"), ("evaluation/episode_return", "evaluated"), ("solved", "solved")),
        charts=(
            Chart(
                "Episode return",
                (
                    Curve("episode_return", "training, sampled"),
                    Curve("evaluation/episode_return", "evaluation, greedy", sparse=True),
                ),
                note="Mean over the seeds; 500 is the longest episode.",
            ),
        ),
    )

    def program(self, config: CartPoleConfig, say: Say) -> Program:
        """Compile all seeds into one function."""
        from grpo_jax.tasks.cartpole.program import make_program  # starts JAX

        return make_program(config, say)
