"""A judge that runs in a pool of Ray actors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_jax.config.judge import Judge, PoolSection
from grpo_jax.errors import UserError


def placed(judge: Judge, name: str) -> Judge | Pooled:
    """Return a judge of the config as it is loaded: in its pool, if it has one. `name` is its place in errors."""
    return Pooled(judge, judge.pool, name) if judge.pool else judge


@dataclass(frozen=True)
class Pooled:
    """A judge with the pool that it runs in, called `name` in errors."""

    judge: Judge
    pool: PoolSection
    name: str = ""

    def check(self) -> None:
        """Run the judge's own check; actors that are elsewhere or have packages of their own run it themselves."""
        if not (self.pool.runtime_env or self.pool.address):
            self.judge.check()

    def load(self, device: str) -> Any:
        """Return the proxy of the judge that the actors have loaded."""
        if device != "cpu":
            raise UserError(f"devices: expected none for a judge in a pool, which has its resources; got {device}")
        from bridges.ray_pool.pool import load_pooled

        return load_pooled(self.judge, self.pool, self.name or type(self.judge).__name__)

    def memory(self) -> list[tuple[str, int, str]]:
        """Return the actors' share of this machine's memory; cards of a pool and other machines are not counted."""
        pool = self.pool
        if pool.address or pool.cards:
            cards = f", each with {pool.cards:g} of its cards" if pool.cards else ""
            where = f"the Ray cluster at {pool.address}" if pool.address else "a Ray cluster of the run's own"
            return [(type(self.judge).__name__, 0, f"not counted: {pool.replicas} actors in {where}{cards}")]
        lines = self.judge.memory()
        return [(name, pool.replicas * size, f"{note}, in {pool.replicas} actors") for name, size, note in lines]
