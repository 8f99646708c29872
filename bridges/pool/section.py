"""The config fields of a pool, which stand beside a judge's own; and the judge with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_jax.config.fields import may_change, require
from grpo_jax.errors import UserError


@dataclass(frozen=True)
class PoolSection:
    """Actors of a Ray cluster that a judge runs in.

    Args:
        replicas: Actors of a Ray cluster that run this judge, a copy of it in each; 0 keeps it in the run's process.
        resources: What each actor is given: num_cpus, num_gpus, memory in bytes, or a resource that the cluster names.
        runtime_env: Ray's runtime environment of the actors, such as pip or py_executable (docs/judges.md).
        address: HOST:PORT of the cluster; null for one on this machine that the run starts and ends.
        batch: Rows that an actor is given at a time; 0 takes the judge's own batch_size, and 32 where it has none.
        in_flight: Batches that are on their way to an actor at once.
        batch_attempts: Actors that may die over one batch, or be late with it, until the judge has failed on it.
        batch_timeout: Seconds an actor may take for one batch; then it is ended, and another gets the batch. 0 for no
            limit.
        max_restarts: How often Ray starts each actor again that died; -1 for no limit.
    """

    replicas: int = may_change(0)
    resources: dict[str, float] = may_change(default_factory=dict)
    runtime_env: dict[str, Any] = may_change(default_factory=dict)
    address: str | None = may_change(None)
    batch: int = may_change(0)
    in_flight: int = may_change(2)
    batch_attempts: int = may_change(3)
    batch_timeout: float = may_change(600.0)
    max_restarts: int = may_change(10)

    def __post_init__(self) -> None:
        least = {"replicas": 0, "batch": 0, "batch_timeout": 0, "in_flight": 1, "batch_attempts": 1, "max_restarts": -1}
        for name, bound in least.items():
            require(getattr(self, name) >= bound, name, f"a number >= {bound}", getattr(self, name))
        for name, amount in self.resources.items():
            require(amount >= 0, f"resources.{name}", "a number >= 0", amount)
        named = self.address is None or (":" in self.address and self.address.rpartition(":")[2].isdigit())
        require(named, "address", "HOST:PORT of a Ray cluster, or null for one of the run's own", self.address)

    @property
    def cards(self) -> float:
        """Cards of each actor."""
        return self.resources.get("num_gpus", 0.0)


@dataclass(frozen=True)
class Pooled:
    """A judge that runs in a pool: itself a judge. Other attributes are the judge's.

    `called` is its name in the config, such as "judges.scorer"; "" for its class.
    """

    section: ClassVar[type] = PoolSection

    judge: Any
    pool: PoolSection = field(default_factory=PoolSection)
    called: str = field(default="", compare=False)

    def __getattr__(self, name: str) -> Any:
        """A field or other attribute of the judge."""
        if name.startswith("__") or name in ("judge", "pool", "called"):  # of one that is being copied
            raise AttributeError(name)
        return getattr(self.judge, name)

    @property
    def parts(self) -> tuple[Any, PoolSection]:
        """The judge, and the section of the pool."""
        return self.judge, self.pool

    @property
    def runs_on(self) -> str:
        """Device unless `devices` says otherwise: for a pool no card of this machine is kept."""
        return "cpu" if self.pool.replicas else getattr(self.judge, "runs_on", "auto")

    @property
    def elsewhere(self) -> bool:
        """Tell whether the judge takes no device of the run's process."""
        return self.pool.replicas > 0

    def check(self) -> None:
        """Run the judge's own check; where its actors are elsewhere or have packages of their own, they run it."""
        if not (self.pool.replicas and (self.pool.runtime_env or self.pool.address)):
            getattr(self.judge, "check", lambda: None)()

    def load(self, device: str) -> Any:
        """Return the proxy of the judge that the actors have loaded; the judge itself where there are none."""
        if not self.pool.replicas:
            return self.judge.load(device)
        if device != "cpu":
            raise UserError(f"devices: expected none for a judge in a pool, which has its resources; got {device}")
        from bridges.pool.pool import load_pooled

        return load_pooled(self.judge, self.pool, self.called or type(self.judge).__name__)

    def memory(self) -> list[tuple[str, int, str]]:
        """The actors' share of this machine's memory; cards of a pool and other machines are not counted."""
        pool, counted = self.pool, getattr(self.judge, "memory", None)
        if pool.address or pool.cards:
            cards = f", each with {pool.cards:g} of its cards" if pool.cards else ""
            where = f"the Ray cluster at {pool.address}" if pool.address else "a Ray cluster of the run's own"
            return [(type(self.judge).__name__, 0, f"not counted: {pool.replicas} actors in {where}{cards}")]
        lines = [(type(self.judge).__name__, 0, "it does not say")] if counted is None else counted()
        copies = max(pool.replicas, 1)
        times = f", in {copies} actors" if pool.replicas else ""
        return [(name, copies * size, f"{note}{times}") for name, size, note in lines]

    def savings(self) -> list[dict[str, Any]]:
        """None: the actors' memory is their own."""
        return []
