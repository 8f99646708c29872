"""CartPole: keep a pole upright, entirely in JAX; where a mistake in an algorithm shows within seconds.

A run has sections of its own: `python -m grpo_jax.train --task cartpole --help all` prints them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, Lt

from grpo_jax.config.build import Named
from grpo_jax.config.fields import (
    WIDTH,
    Count,
    Length,
    NonNegative,
    Positive,
    PositiveCount,
    Share,
    check_ranges,
    may_change,
    require,
)
from grpo_jax.config.run import TASKS
from grpo_jax.tasks.display import Chart, Curve, Display
from grpo_jax.tasks.task import Program, Say, Task


@dataclass(frozen=True)
class CartPoleAlgorithm:
    """Advantages and loss.

    Args:
        name: "grpo" normalises the returns of the summed objectives in their group, "gdpo" those of each objective;
            "ppo" has a value network instead.
        objectives: What a step is rewarded for: "upright" (1 for each step) and "centred" (near the middle).
        weights: Weight of each objective; empty for ones.
        width: Distance from the middle at which "centred" gives nothing any more.
        condition: Count "centred" only in episodes that stay upright for at least this many steps; 0 for always.
        discount: Discount γ of the returns.
        trace: λ of PPO's advantages (GAE).
        clip_low: Lower clip bound of the policy ratio.
        clip_high: Upper clip bound of the policy ratio.
        kl_coef: Weight of the KL term (k3) against the reference, which is the policy at the iteration's start.
        entropy_coef: Weight of the entropy bonus.
        value_coef: Weight of PPO's value loss.
        value_clip: How far PPO's values may move in one iteration; null for any.
        epochs: Passes over one iteration's steps.
        minibatches: Updates per pass (PPO; GRPO and GDPO update once per pass).
    """

    name: Literal["grpo", "gdpo", "ppo"] = "grpo"
    objectives: list[Literal["upright", "centred"]] = field(default_factory=lambda: ["upright"])
    weights: list[float] = field(default_factory=list)
    width: Positive = 0.5
    condition: Count = 0
    discount: Share = 0.994
    trace: Share = 0.95
    clip_low: Annotated[Positive, Le(1)] = 0.2
    clip_high: Positive = 0.2
    kl_coef: NonNegative = 0.01
    entropy_coef: NonNegative = 0.01
    value_coef: NonNegative = 0.5
    value_clip: Positive | None = None
    epochs: PositiveCount = 10
    minibatches: PositiveCount = 1

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm")
        unique = len(set(self.objectives)) == len(self.objectives)
        require(bool(self.objectives) and unique, "algorithm.objectives", "one or more, each once", self.objectives)
        fits = len(self.weights) in (0, len(self.objectives)) and all(map(math.isfinite, self.weights))
        require(fits, "algorithm.weights", f"none or {len(self.objectives)} finite numbers", self.weights)
        both = set(self.objectives) == {"upright", "centred"}
        require(both or not self.condition, "algorithm.condition", "0 without both objectives", self.condition)
        grouped = self.name != "ppo"
        require(not (grouped and self.minibatches > 1), "algorithm.minibatches", "1 but with ppo", self.minibatches)
        require(grouped or not self.kl_coef, "algorithm.kl_coef", "0 with ppo", self.kl_coef)
        require(grouped or not self.condition, "algorithm.condition", "0 with ppo", self.condition)


@dataclass(frozen=True)
class CartPoleRollout:
    """What one iteration plays.

    Args:
        groups: Starts (P) of one iteration; with ppo unused.
        group_size: Episodes from each start (G), up to 500 steps each; with ppo unused.
        environments: Carts that ppo plays on side by side.
        steps: Steps of each of them per iteration.
    """

    groups: Length = 1
    group_size: Annotated[Length, Ge(2)] = 16
    environments: Length = 32
    steps: Length = 128

    def __post_init__(self) -> None:
        check_ranges(self, "rollout")


@dataclass(frozen=True)
class CartPoleNetwork:
    """The policy's perceptron; ppo's value network is another one of the same shape.

    Args:
        hidden: Width of each hidden layer.
        activation: Between the layers.
    """

    hidden: list[int] = field(default_factory=lambda: [64])
    activation: Literal["tanh", "relu"] = "tanh"

    def __post_init__(self) -> None:
        fits = all(1 <= width <= 2**16 for width in self.hidden) and len(self.hidden) <= 64
        require(fits, "network.hidden", "up to 64 widths from 1 to 65536", self.hidden)


@dataclass(frozen=True)
class CartPoleOptimizer:
    """Adam and its schedule.

    Args:
        learning_rate: Peak learning rate.
        schedule: Learning rate over the run.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        max_grad_norm: Gradients are scaled down to this global norm; 0 for never.
    """

    learning_rate: Positive = 3e-4
    schedule: Literal["constant", "linear"] = "constant"
    beta1: Annotated[NonNegative, Lt(1)] = 0.9
    beta2: Annotated[NonNegative, Lt(1)] = 0.999
    max_grad_norm: NonNegative = 0.5

    def __post_init__(self) -> None:
        check_ranges(self, "optimizer")


@dataclass(frozen=True)
class CartPoleTraining:
    """The loop.

    Args:
        iterations: Iterations in all.
        save_every: Iterations between checkpoints; 0 for the end only.
        keep_checkpoints: Checkpoints kept beside final.
        max_hours: Hours after which this process saves and stops behind a measured block, for --resume to go on; 0 for
            never.
    """

    iterations: PositiveCount = may_change(100)
    save_every: Count = may_change(0)
    keep_checkpoints: PositiveCount = may_change(2)
    max_hours: NonNegative = may_change(0.0)

    def __post_init__(self) -> None:
        check_ranges(self, "training")


@dataclass(frozen=True)
class CartPoleEvaluation:
    """Measurement on fresh starts with the likelier action.

    Args:
        episodes: Episodes of one measurement.
        every: Iterations between measurements, which are also the compiled block between two looks from outside.
        solved: Mean return from which CartPole counts as solved.
    """

    episodes: Length = 100
    every: PositiveCount = 10
    solved: Annotated[Positive, Le(500)] = 475.0

    def __post_init__(self) -> None:
        check_ranges(self, "evaluation")


@dataclass(frozen=True)
class CartPoleConfig:
    """A CartPole run of grpo_jax, entirely in JAX.

    Args:
        task: This task.
        seed: Seed of everything random; seeds seed, seed + 1, … are trained.
        num_seeds: How many seeds are trained side by side.
        run_dir: Folder of the run; null makes runs/TASK-TIME.
        resume: Continue the run in run_dir from its last checkpoint.
        debug: Show tracebacks of user errors.
        report_to: Metric writers beside metrics.jsonl (docs/ending.md).
        project: What the run belongs to: project on Weights & Biases.
        algorithm: Advantages and loss.
        rollout: What one iteration plays.
        network: The policy.
        optimizer: Adam and its schedule.
        training: The loop.
        evaluation: Measurement.
    """

    task: Annotated[Any, Named(TASKS)]
    seed: Count = 0
    num_seeds: Annotated[int, Ge(1), Le(WIDTH)] = 1
    run_dir: str | None = may_change(None)
    resume: bool = may_change(False)
    debug: bool = may_change(False)
    report_to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = may_change(
        default_factory=lambda: ["tensorboard"]
    )
    project: str = may_change("grpo_jax")
    algorithm: CartPoleAlgorithm = field(default_factory=CartPoleAlgorithm)
    rollout: CartPoleRollout = field(default_factory=CartPoleRollout)
    network: CartPoleNetwork = field(default_factory=CartPoleNetwork)
    optimizer: CartPoleOptimizer = field(default_factory=CartPoleOptimizer)
    training: CartPoleTraining = field(default_factory=CartPoleTraining)
    evaluation: CartPoleEvaluation = field(default_factory=CartPoleEvaluation)

    def __post_init__(self) -> None:
        """Refuse what no section can refuse alone."""
        check_ranges(self, "")
        every = self.evaluation.every
        for name in ("iterations", "save_every"):
            value = getattr(self.training, name)
            require(value % every == 0, f"training.{name}", f"a multiple of evaluation.every = {every}", value)
        minibatches = self.algorithm.minibatches
        steps = self.rollout.steps
        divides = self.algorithm.name != "ppo" or steps % minibatches == 0
        require(divides, "algorithm.minibatches", f"a divisor of rollout.steps = {steps}", minibatches)


@dataclass(frozen=True)
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
