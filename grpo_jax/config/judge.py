"""The protocol of a judge: `load`, `check` and `memory` of its class, and the call of the loaded object."""

from __future__ import annotations

import inspect
from typing import Any

from grpo_jax.config.fields import NonNegative, Options, PositiveCount, Section, require, resume_mutable


class PoolSection(Section):
    """Ray actors that run a judge (docs/judges.md)."""

    replicas: PositiveCount = resume_mutable(1)
    """Number of actors, each with its own copy of the judge."""
    resources: dict[str, NonNegative] = resume_mutable({})
    """Resources of each actor: num_cpus, num_gpus, memory in bytes."""
    runtime_env: Options = resume_mutable({})
    """Ray's runtime environment of the actors, such as pip or py_executable."""
    address: str | None = resume_mutable(None)
    """HOST:PORT of the cluster; null to start one on this machine for the run."""
    batch_timeout: NonNegative = resume_mutable(600.0)
    """Time limit of one batch in seconds; then its actor ends, and another gets the batch. 0 for none."""

    def __post_init__(self) -> None:
        named = self.address is None or (":" in self.address and self.address.rpartition(":")[2].isdigit())
        require(named, "address", "HOST:PORT of a Ray cluster, or null for one of the run's own", self.address)

    @property
    def cards(self) -> float:
        """Return the GPUs per actor."""
        return self.resources.get("num_gpus", 0.0)


class Judge(Section):
    """Base class of a judge: a pydantic model with the fields `judges.NAME.FIELD`.

    A callable loaded judge is a reward under its own name: judge(prompts, completions, **columns) → a score per
    completion, None if it does not apply. Rewards receive other judges as their argument NAME.
    """

    pool: PoolSection | None = resume_mutable(None)
    """Pool of Ray actors that run the judge; null for the run's own process."""

    def load(self, device: str = "cpu") -> Any:
        """Return the object that rewards get as the argument NAME, by default the judge itself.

        `device` is "cpu" or "gpu:N". A judge takes the next free GPU, unless its `load` has the default "cpu" or
        `devices` sets another. The object's `__str__` is its line at the start of a run. A renderer has these members:
        `draw(texts, seeds, *, evaluation)` → float [B, 3, H, W] in [0, 1], `count_tokens(texts)`, `window` (the text
        encoder's limit of tokens) and `device`.
        """
        return self

    def check(self) -> None:
        """Raise UserError if a file is missing or unsuitable, before any weight is read."""

    def memory(self) -> list[tuple[str, int, str]]:
        """Return (name, bytes, note) of each part for `--plan`."""
        return [(type(self).__name__, 0, "it does not say")]

    def __str__(self) -> str:
        return type(self).__name__


def default_device(judge: Judge) -> str:
    """Return a judge's device unless `devices` sets another: "auto", or the default of its `load`."""
    device = inspect.signature(judge.load).parameters.get("device")
    return "cpu" if judge.pool else "auto" if device is None or device.default is device.empty else device.default


def title(loaded: object) -> str:
    """Return a loaded judge's line at the start of a run: its `__str__`, or the name of its class."""
    return str(loaded) if type(loaded).__str__ is not object.__str__ else type(loaded).__name__
