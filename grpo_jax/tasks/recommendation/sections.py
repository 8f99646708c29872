"""What the recommendation task adds to a config: the sections `retrieval` and `warm_start`.

Its data are `tasks.recommendation.section`. Every field has its help line in the docstring of its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_jax.config.sections import require

SERVICE_FIELDS = ("backend", "service", "address", "timeout", "attempts", "budget", "window", "cache", "device")
"""Fields that say where ranks come from and change none of them: a resumed run may have others."""


@dataclass(frozen=True)
class RetrievalSection:
    """What ranks the catalogue against a completion.

    Args:
        backend: "local" ranks in this process; "ray" asks a service that `python -m bridges.retrieval serve` started.
        encoder: "tfidf", or a folder or hub name of a sentence-transformers model.
        ties: Where items that score like the target stand: "against" before it, "average", or "favour" behind it.
        temperature: Of the softmax over similarities that the reward "soft" is read from.
        service: Name of the service (ray).
        address: Of the Ray cluster; null for RAY_ADDRESS or the one on this machine.
        timeout: Seconds one attempt of a call may take (ray).
        attempts: Tries of one call before its ranks count as missing.
        budget: Calls that may go missing among the last `window`; one more saves and stops the run.
        window: Calls that are remembered.
        cache: Folder that keeps the catalogue's vectors between runs (local); null keeps none.
        device: Of a sentence-transformers model in this process: "cpu" or "gpu:N".
    """

    backend: Literal["local", "ray"] = "local"
    encoder: str = "tfidf"
    ties: Literal["against", "average", "favour"] = "against"
    temperature: float = 0.05
    service: str = "retrieval"
    address: str | None = None
    timeout: float = 120.0
    attempts: int = 3
    budget: int = 5
    window: int = 100
    cache: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Checks the ranges."""
        require(bool(self.encoder), "retrieval.encoder", "tfidf, a folder or a name", self.encoder)
        for name in ("temperature", "timeout"):
            require(getattr(self, name) > 0, f"retrieval.{name}", "a number > 0", getattr(self, name))
        require(self.attempts >= 1, "retrieval.attempts", "a number >= 1", self.attempts)
        require(self.budget >= 0, "retrieval.budget", "a number >= 0", self.budget)
        require(self.window > self.budget, "retrieval.window", f"more than budget = {self.budget}", self.window)


@dataclass(frozen=True)
class WarmStartSection:
    """Supervised steps before the first iteration, by the same trainer; "before" is measured after them.

    Args:
        steps: Supervised updates; 0 for none.
        pairs: "next" teaches the title of the item that came next; "forms" the last title, the next one, or both, one
            in three each; of the dummy world alone, "lessons" teach the form of a title and nothing of the rules,
            "hearsay" titles whose words are right in a quarter of the cases and the last title's in more.
        batch: Pairs of one update.
        learning_rate: Peak learning rate, after a tenth of the steps as a warm-up; it falls to 0 along a cosine.
        title_characters: Taught titles are cut to so many characters; 0 for never.
    """

    steps: int = 0
    pairs: Literal["next", "forms", "lessons", "hearsay"] = "next"
    batch: int = 64
    learning_rate: float = 1e-3
    title_characters: int = 0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        for name in ("steps", "title_characters"):
            require(getattr(self, name) >= 0, f"warm_start.{name}", "a number >= 0", getattr(self, name))
        require(self.batch >= 1, "warm_start.batch", "a number >= 1", self.batch)
        require(self.learning_rate > 0, "warm_start.learning_rate", "a number > 0", self.learning_rate)
