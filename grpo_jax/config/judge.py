"""What every judge of a config has: where it runs, and what it says before it is loaded."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from grpo_jax.config.fields import Count, NonNegative, Options, PositiveCount, Section, require, resume_mutable


class PoolSection(Section):
    """Actors of a Ray cluster that a judge runs in (docs/judges.md)."""

    replicas: PositiveCount = resume_mutable(1)
    """Actors that run this judge, a copy of it in each."""
    resources: dict[str, NonNegative] = resume_mutable({})
    """What each actor is given: num_cpus, num_gpus, memory in bytes, or a resource that the cluster names."""
    runtime_env: Options = resume_mutable({})
    """Ray's runtime environment of the actors, such as pip or py_executable."""
    address: str | None = resume_mutable(None)
    """HOST:PORT of the cluster; null for one on this machine that the run starts and ends."""
    batch: Count = resume_mutable(0)
    """Rows that an actor is given at a time; 0 takes the judge's own batch_size, and 32 where it has none."""
    in_flight: PositiveCount = resume_mutable(2)
    """Batches that are on their way to an actor at once."""
    batch_attempts: PositiveCount = resume_mutable(3)
    """Actors that may die over one batch, or be late with it, until the judge has failed on it."""
    batch_timeout: NonNegative = resume_mutable(600.0)
    """Seconds an actor may take for one batch; then it is ended, and another gets the batch. 0 for no limit."""
    max_restarts: Annotated[int, Ge(-1)] = resume_mutable(10)
    """How often Ray starts each actor again that died; -1 for no limit."""

    def __post_init__(self) -> None:
        named = self.address is None or (":" in self.address and self.address.rpartition(":")[2].isdigit())
        require(named, "address", "HOST:PORT of a Ray cluster, or null for one of the run's own", self.address)

    @property
    def cards(self) -> float:
        """Cards of each actor."""
        return self.resources.get("num_gpus", 0.0)


class Judge(Section):
    """Judges texts or pictures; derive from it, and give it a `load`."""

    pool: PoolSection | None = resume_mutable(None)
    """The pool of Ray actors that it runs in; null for the run's own process."""

    runs_on: ClassVar[str] = "auto"
    """Device unless `devices` says otherwise."""

    def check(self) -> None:
        """Refuse files that are not there; no weight is read."""

    def load(self, device: str) -> Any:
        """Return the argument that rewards get under the judge's name."""
        raise NotImplementedError

    def memory(self) -> list[tuple[str, int, str]]:
        """Return what --plan counts: (name, bytes, note)."""
        return [(type(self).__name__, 0, "it does not say")]

    def savings(self) -> list[dict[str, object]]:
        """Return fields that can take less memory, for --plan; working memory first."""
        return []
