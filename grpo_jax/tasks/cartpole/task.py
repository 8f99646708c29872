"""The task: keep a pole upright, entirely in JAX; where a mistake in the algorithm shows in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from grpo_jax.tasks.cartpole.config import CartPoleConfig
from grpo_jax.tasks.display import Chart, Curve, Display
from grpo_jax.tasks.task import Program, Say, Task


@dataclass(frozen=True)
class CartPole(Task):
    """CartPole-v1, several seeds at once; a run has sections of its own."""

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
                    Curve("evaluation/lowest", "worst seed", sparse=True),
                ),
                note="Mean over the seeds; 500 is the longest episode.",
            ),
            Chart("Seeds solved", (Curve("solved", "seeds", sparse=True),)),
        ),
    )

    def program(self, config: CartPoleConfig, say: Say) -> Program:
        """All seeds in one compiled function."""
        from grpo_jax.tasks.cartpole.program import make_program  # starts JAX

        return make_program(config, say)
